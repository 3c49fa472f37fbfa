"""The team of threads that OpenMP keeps for each thread that computes.

Owns the one call that ends a team. Does not know who computes when. Guarantees that only GNU's OpenMP is asked (the one
that comes with torch on Linux); with another one, or none, nothing happens.

As long as there are more threads in all teams together than processors, GNU's OpenMP lets those of a working team sleep
at the end of each operation instead of waiting awake, and waking them takes as long as a small operation. Computations
that take turns, each on a thread of its own, therefore end their teams when they stop. A team comes back with the next
operation, in a tenth of a millisecond. (libgomp: `do_spin` in config/linux/wait.h; OpenMP 5.0, 3.2.44,
omp_pause_resource_all.)
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_SOFT = 1  # omp_pause_soft: what was set stays set


def end_team() -> None:
    """End the calling thread's team. Nothing inside a parallel operation, or if it has none."""
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """GNU's omp_pause_resource_all. LLVM's and Intel's, which keep one pool for all threads, are left alone."""
    loaded = ctypes.CDLL(None)  # what the process has loaded for everybody; torch's OpenMP is part of it
    if not hasattr(loaded, "omp_pause_resource_all") or hasattr(loaded, "__kmpc_fork_call"):
        return None
    pause: Callable[[int], int] = loaded.omp_pause_resource_all
    return pause
