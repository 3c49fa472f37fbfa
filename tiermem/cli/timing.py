"""How long a call takes.

Owns the ways of timing that the short measurements share. Does not know what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of one call, never zero."""
    started = time.perf_counter()
    work()
    return max(time.perf_counter() - started, 1e-9)


def median_seconds(work: Callable[[], object], seconds: float) -> float:
    """Median seconds of a call, behind one that is not counted, over as many as fit into `seconds`, three at least."""
    work()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < seconds:
        taken.append(seconds_of(work))
    return sorted(taken)[len(taken) // 2]


def mean_seconds(work: Callable[[], object], seconds: float) -> float:
    """Mean seconds of a call, over as many as fit into `seconds`, three at least."""
    count, taken = 0, 0.0
    while count < 3 or taken < seconds:
        taken += seconds_of(work)
        count += 1
    return taken / count
