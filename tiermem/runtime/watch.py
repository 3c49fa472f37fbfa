"""What the computation is at, for the timeline: which unit, forward or backward.

Owns the spans of the compute lane. Stands between the gather scheduler and its listener and passes everything on; does
not wait and decides nothing. Guarantees that spans of one lane do not overlap, and that a span is at least as long as
the stalls inside it, so that what is left of it is computation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tiermem.timeline import COMPUTE_LANE, Timeline
from tiermem.zero3.engine import backward_number, call_at_backward_end
from tiermem.zero3.neighbours import Listener


class ComputeWatch:
    """A `Listener` that notes when a unit is first needed; until another one is, the time is that unit's."""

    def __init__(self, listener: Listener, timeline: Timeline, names: Sequence[str]) -> None:
        """`names`: of the units, by number."""
        self._needed = listener.unit_needed
        self.may_update = listener.may_update
        self.gradients_complete = listener.gradients_complete
        self.known_since = listener.known_since
        self._timeline = timeline
        self._names = names
        self._title = ""
        self._unit = -1
        self._started = 0.0
        self._backward = -1

    def unit_needed(self, unit: int) -> None:
        """Note it, and wait for a pending update of the unit."""
        number = backward_number()
        title = f"{'backward' if number >= 0 else 'forward'} {self._names[unit]}"
        if title != self._title:
            self.close()
            self._title, self._unit, self._started = title, unit, time.perf_counter()
        if number >= 0 and number != self._backward:
            self._backward = number
            call_at_backward_end(self.close)
        self._needed(unit)

    def close(self) -> None:
        """The unit that was last needed is no longer what is computed."""
        if self._title:
            ended = time.perf_counter()
            self._timeline.record(self._title, COMPUTE_LANE, self._started, ended, {"unit": self._unit})
            self._title = ""
