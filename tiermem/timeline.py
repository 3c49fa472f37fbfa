"""When things happened, for people to look at.

Owns a bounded record of spans of time and of levels, and how they are written for Perfetto or chrome://tracing. Does
not know what they mean; a lane is a row of the picture ("compute", "swap->host"). Guarantees that recording is cheap,
safe from any thread and never fails, that the newest events are kept when there are too many, and that overlapping
events of one lane are all visible.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiermem.output_file import write_whole

COMPUTE_LANE = "compute"
UPDATE_LANE = "update"
RANKS_LANE = "ranks"
STEP_LANE = "steps"
STALL = "stall"
"""The event in which the computation waited; its detail `waits` names the pages, none for a task.

Where all ranks were waited for, its detail `for` is RANKS_LANE.
"""

_NO_DETAILS: Mapping[str, object] = {}


@dataclass(frozen=True, slots=True)
class Event:
    """A span of time in a lane; `start` and `end` are seconds of `time.perf_counter`."""

    name: str
    lane: str
    start: float
    end: float
    details: Mapping[str, object]


Level = tuple[str, float, float]
"""A name, a moment in seconds of `time.perf_counter`, and the value from then on."""


class Timeline:
    """Keeps the last `capacity` events, and as many levels."""

    __slots__ = ("_events", "_levels")

    def __init__(self, capacity: int = 200_000) -> None:
        # Appending to a bounded deque is atomic, so the threads that record need no lock.
        self._events: deque[Event] = deque(maxlen=capacity)
        self._levels: deque[Level] = deque(maxlen=capacity)

    def record(
        self, name: str, lane: str, start: float, end: float, details: Mapping[str, object] = _NO_DETAILS
    ) -> None:
        """Add an event. `details` are shown when it is clicked; they are not to be changed afterwards."""
        self._events.append(Event(name, lane, start, end, details))

    def level(self, name: str, moment: float, value: float) -> None:
        """Say that `name`, such as the reserved bytes of a tier, has this value from `moment` on."""
        self._levels.append((name, moment, value))

    def levels(self) -> list[Level]:
        """Return the levels kept, in order of recording."""
        return list(self._levels.copy())

    def events(self) -> list[Event]:
        """Return the events kept, in order of recording."""
        return list(self._events.copy())

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the events as Chrome trace JSON, which ui.perfetto.dev and chrome://tracing open. Raises OSError."""
        text = json.dumps(chrome_trace(self.events(), self.levels(), process=os.getpid()), default=str)
        write_whole(path, text)


def chrome_trace(events: Sequence[Event], levels: Sequence[Level] = (), *, process: int) -> dict[str, object]:
    """Return events in the Trace Event Format: microseconds from the earliest event, one named row per lane.

    The format lets the events of a row nest but not overlap otherwise, so a lane gets as many rows as it needs. Levels
    become counters, drawn as curves.
    """
    origin = min([event.start for event in events] + [moment for _, moment, _ in levels], default=0.0)
    lanes: dict[str, list[Event]] = {}
    for event in events:
        lanes.setdefault(event.lane, []).append(event)
    trace: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": "tiermem"}}
    ]
    row = 0
    for lane, members in lanes.items():
        for number, part in enumerate(_rows(members)):
            row += 1
            title = lane if number == 0 else f"{lane} #{number + 1}"
            identity: dict[str, object] = {"pid": process, "tid": row}
            trace.append({"ph": "M", "name": "thread_name", **identity, "args": {"name": title}})
            trace.append({"ph": "M", "name": "thread_sort_index", **identity, "args": {"sort_index": row}})
            for event in part:
                begin, end = (round((moment - origin) * 1e6, 3) for moment in (event.start, event.end))
                span = {"name": event.name, "cat": lane, "ts": begin, "dur": max(0.0, round(end - begin, 3))}
                trace.append({"ph": "X", **span, **identity, "args": dict(event.details)})
    for name, moment, value in levels:
        counter = {"ph": "C", "name": name, "pid": process, "tid": 0, "ts": round((moment - origin) * 1e6, 3)}
        trace.append({**counter, "args": {"value": value}})
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def _rows(events: Sequence[Event]) -> list[list[Event]]:
    """Deal events into as few rows as a greedy walk needs, so that in each row any two nest or do not overlap."""
    rows: list[list[Event]] = []
    open_ends: list[list[float]] = []  # for each row the ends of the events open now, the outermost first
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        for row, ends in zip(rows, open_ends, strict=True):
            while ends and ends[-1] <= event.start:
                ends.pop()
            if not ends or event.end <= ends[-1]:
                row.append(event)
                ends.append(event.end)
                break
        else:
            rows.append([event])
            open_ends.append([event.end])
    return rows
