"""How long the computation waits for its pages, and what is done meanwhile.

Owns the count of these waits, what share of the step they are, and when the C library's heap is given back. Does not
know pages or moves. Guarantees that the heap is given back only while somebody waits anyway, and only where a good part
of the step is waiting: elsewhere the computation would be the longer for clearing those pages again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from tiermem.memory.heap import keeps_freed_blocks, trim_heap
from tiermem.pager.page import PageKey
from tiermem.stats import Counters
from tiermem.timeline import COMPUTE_LANE, STALL, Timeline

LONG = 0.01
"""Seconds after which a wait is long enough for something to be done meanwhile."""

# A wait shorter than this found its lease granted already: it is counted, but no event, of which there are so many.
_BARELY = 20e-6
# Of this step so far and the one before. Measured: at most 0.25 where the computation is the limit, at least 0.32 where
# the drive is.
_MUCH = 0.3
# Bytes by which the process may grow before the heap goes back once more: what is used again has to be cleared again.
_GROWN = 96 << 20


@dataclass(slots=True)
class _Span:
    """Seconds of a step, from its first wait to its last."""

    waited: float = 0.0
    passed: float = 0.0


class Waits:
    """What the computation waits for pages, or for a task such as an update. Any thread."""

    def __init__(self, counters: Counters, timeline: Timeline) -> None:
        self._counters = counters
        self._timeline = timeline
        # Threads whose waits are no stalls: the wait of whoever waits for such a thread is counted instead.
        self.aside: set[int] = set()
        self._process, self._resident = psutil.Process(), 0  # bytes of it since which growth counts
        self._last = 0.0  # when the latest wait of this step ended; 0: there was none yet
        self._before = _Span()  # the step before this one
        self._now: _Span | None = None  # None: pages are being filled

    def begin_step(self) -> None:
        """The computation is at the beginning of a step. Its first wait may be long in coming: data are loaded, say."""
        self._before, self._now, self._last = self._now or _Span(), _Span(), 0.0

    def note(self, started: float, ended: float, keys: Sequence[PageKey] = ()) -> None:
        """The calling thread has waited, in seconds of `time.perf_counter`: for these pages, or for a task."""
        if threading.get_ident() in self.aside:
            return
        if self._now is not None:
            self._now.waited += ended - started
            self._now.passed += ended - (self._last or started)
            self._last = ended
        self._counters.count(stall_seconds=ended - started)
        if ended - started > _BARELY:
            self._timeline.record(STALL, COMPUTE_LANE, started, ended, {"waits": keys})

    def meanwhile(self) -> None:
        """The calling thread's wait goes on, and is a long one: give the heap back if that costs the step nothing."""
        if self._now is None or threading.get_ident() in self.aside:
            return
        waited, passed = self._before.waited + self._now.waited, self._before.passed + self._now.passed
        if waited > _MUCH * passed and not keeps_freed_blocks():
            resident = self._process.memory_info().rss
            if resident > self._resident + _GROWN:
                trim_heap()
                self._resident = self._process.memory_info().rss
            self._resident = min(self._resident, resident)
