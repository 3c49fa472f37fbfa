"""How long a call takes.

Owns the ways of timing that the short measurements share. Does not know what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_LONG = 4  # times what was to be measured for


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of one call, never zero."""
    started = time.perf_counter()
    work()
    return max(time.perf_counter() - started, 1e-9)


def median_seconds(work: Callable[[], object], seconds: float) -> float:
    """Median seconds of a call, after one that is not counted: over as many as fit into `seconds`.

    Three at least, or fewer where they take several times as long: what takes long varies little.
    """
    work()
    taken: list[float] = []
    while sum(taken) < seconds or (len(taken) < 3 and sum(taken) < _LONG * seconds):
        taken.append(seconds_of(work))
    return sorted(taken)[len(taken) // 2]


def mean_seconds(work: Callable[[], object], seconds: float) -> float:
    """Mean seconds of a call, over as many as `median_seconds` takes."""
    count, taken = 0, 0.0
    while taken < seconds or (count < 3 and taken < _LONG * seconds):
        taken += seconds_of(work)
        count += 1
    return taken / count
