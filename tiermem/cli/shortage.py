"""What the system refuses a process: memory and threads.

Owns the telling of such errors from all others, and what is said of them. Does not know what asked. Guarantees a
sentence that says what was refused and what would help, for errors that are nobody's mistake, and None for the rest.
"""

from __future__ import annotations

import torch

_NO_MEMORY = "can't allocate memory"  # of torch's allocator for the CPU, which has no class of its own for it
_NO_THREAD = "can't start new thread"  # of Python
_LESS = "raise the limit (ulimit -v, the container's), or ask for less: a smaller --batch, --seq or budget"


def shortage_of(error: BaseException) -> str | None:
    """What the system has refused and what would help; None where `error` is something else."""
    text = str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY in text
    ):
        return f"out of memory ({text.rpartition('Allocator: ')[2] or 'Python got none'}); {_LESS}"
    if isinstance(error, RuntimeError) and text == _NO_THREAD:
        return f"{text}: the system allows no more; raise the limit (ulimit -u, the container's number of processes)"
    return None
