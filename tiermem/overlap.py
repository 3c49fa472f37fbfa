"""What the computation waited for, and what would have prevented it: a report on a timeline.

Owns the reading of recorded events. Does not record, and does not know pages: it compares names and lanes. Guarantees
that every stall of the steps it looks at is put down to exactly one cause, and that the causes add up to the stalls.

How a cause is found. A stall names the pages that were waited for; a move that carries such a page and overlaps the
stall is what it waited for. If an update kernel ran for most of the stall and none of the moves did, the update was
the slower. If the move began late in the stall and write-backs were going on until then, room had to be made first: the
budget. If the move's edge had been idle just before the stall, the move could have begun then: look-ahead. Otherwise
the edge was busy all along: bandwidth. Where ranks were waited for, it was them if they were at it for most of the
stall (then the announcement had been made, and this rank's own pages were there), or if nothing else explains it.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tiermem.figures import counted, format_seconds
from tiermem.timeline import COMPUTE_LANE, RANKS_LANE, STALL, STEP_LANE, UPDATE_LANE, Event

_MOSTLY = 0.5  # share of a stall
_BUSY = 0.7  # share of the time before a stall above which an edge counts as busy
_LATE = 0.2  # share of a stall after which a move counts as begun late
_SHOWN = 5  # of the waits, the longest


class Cause(enum.Enum):
    """Why the computation stood still; the value says what would have prevented it."""

    BANDWIDTH = "more bandwidth would have prevented: the edge was busy before and during the wait"
    LOOK_AHEAD = "looking further ahead would have prevented: the edge had been idle just before"
    BUDGET = "a larger budget would have prevented: bytes had to be written back to make room first"
    UPDATE = "a faster update, or another schedule, would have prevented: its kernel ran meanwhile"
    RANKS = "ranks that are as far, or a faster connection, would have prevented: all ranks did something together"
    OTHER = "no move and no kernel explains"


@dataclass(frozen=True, slots=True)
class Wait:
    """The stalls of one unit and phase with the same edge and cause. `edge` is "" where no move explains them."""

    during: str
    edge: str
    cause: Cause
    seconds: float
    stalls: int


@dataclass(frozen=True, slots=True)
class EdgeUse:
    """How long moves went over an edge, and for how much of that the computation was not standing still."""

    name: str
    busy_seconds: float
    hidden_seconds: float

    @property
    def hidden_share(self) -> float:
        """From 0, all of it was waited for, to 1."""
        return self.hidden_seconds / self.busy_seconds if self.busy_seconds > 0 else 1.0


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """Over `steps` whole steps of `seconds` together: the waits, longest first, and each edge and the update kernel."""

    steps: int
    seconds: float
    stall_seconds: float
    waits: tuple[Wait, ...]
    edges: tuple[EdgeUse, ...]

    def by_cause(self) -> dict[Cause, float]:
        """Seconds of stalls for each cause, the largest first; they add up to `stall_seconds`."""
        sums: dict[Cause, float] = {}
        for wait in self.waits:
            sums[wait.cause] = sums.get(wait.cause, 0.0) + wait.seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, object]:
        """As JSON values."""
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "stall_seconds": self.stall_seconds,
            "causes": [
                {"cause": cause.name.lower(), "seconds": seconds, "meaning": cause.value}
                for cause, seconds in self.by_cause().items()
            ],
            "waits": [
                {
                    "during": wait.during,
                    "edge": wait.edge,
                    "cause": wait.cause.name.lower(),
                    "seconds": wait.seconds,
                    "stalls": wait.stalls,
                }
                for wait in self.waits
            ],
            "edges": [
                {"name": use.name, "busy_seconds": use.busy_seconds, "hidden_seconds": use.hidden_seconds}
                for use in self.edges
            ],
        }

    def to_lines(self) -> list[str]:
        """For people: one sentence each."""
        if not self.steps:
            return ["the timeline holds no whole step"]
        share = 100 * self.stall_seconds / self.seconds if self.seconds else 0.0
        waited = f"the computation waited {format_seconds(self.stall_seconds)} ({share:.0f} %)"
        lines = [f"{counted(self.steps, 'step')}, {format_seconds(self.seconds)}; {waited}"]
        lines += [f"{format_seconds(seconds)} that {cause.value}" for cause, seconds in self.by_cause().items()]
        lines += [
            f"{format_seconds(wait.seconds)} in {counted(wait.stalls, 'wait')} during {wait.during}"
            + (f", for {wait.edge}" if wait.edge else "")
            for wait in self.waits[:_SHOWN]
        ]
        lines += [
            f"{use.name}: busy {format_seconds(use.busy_seconds)}, {100 * use.hidden_share:.0f} % of it hidden"
            for use in self.edges
        ]
        return lines


def explain_stalls(events: Sequence[Event]) -> OverlapReport:
    """Explain the stalls of the whole steps that `events` hold.

    Events before the first and after the last recorded step, and stalls outside of any step, are left out. So is what
    lies in the first step before anything was computed: the making of the pages, which no later step does again.
    """
    steps = sorted((event for event in events if event.lane == STEP_LANE), key=lambda event: event.start)
    if not steps:
        return OverlapReport(0, 0.0, 0.0, (), ())
    units = [event for event in events if event.lane == COMPUTE_LANE and event.name != STALL]
    computing = min((event.start for event in units), default=steps[0].start)
    if steps[0].start < computing < steps[0].end:
        steps[0] = replace(steps[0], start=computing)
    within = _Lane(steps)
    stalls = [event for event in events if event.name == STALL and within.at(event.start) is not None]
    moves: dict[str, list[Event]] = {}
    for event in events:
        if event.lane not in (COMPUTE_LANE, STEP_LANE):
            moves.setdefault(event.lane, []).append(event)
    lanes = {name: _Lane(members) for name, members in moves.items()}
    at_work = _Lane(units)
    sums: dict[tuple[str, str, Cause], tuple[float, int]] = {}
    for stall in stalls:
        edge, cause = _explain(stall, lanes)
        during = at_work.at(stall.start)
        key = (during.name if during is not None else "the rest of the step", edge, cause)
        seconds, count = sums.get(key, (0.0, 0))
        sums[key] = (seconds + stall.end - stall.start, count + 1)
    waits = [Wait(*key, seconds=seconds, stalls=count) for key, (seconds, count) in sums.items()]
    stalled = _Lane(stalls)
    return OverlapReport(
        steps=len(steps),
        seconds=sum(step.end - step.start for step in steps),
        stall_seconds=sum(stall.end - stall.start for stall in stalls),
        waits=tuple(sorted(waits, key=lambda wait: -wait.seconds)),
        edges=tuple(_use(name, lane, within, stalled) for name, lane in sorted(lanes.items())),
    )


def _use(name: str, lane: _Lane, within: _Lane, stalled: _Lane) -> EdgeUse:
    """How long a lane was busy in these steps, and outside of stalls."""
    busy = waited = 0.0
    for start, end in lane.spans:
        for begin, finish in within.parts(start, end):
            busy += finish - begin
            waited += stalled.covered(begin, finish)
    return EdgeUse(name, busy, busy - waited)


def _explain(stall: Event, lanes: dict[str, _Lane]) -> tuple[str, Cause]:
    length = stall.end - stall.start
    wanted = _names(stall)
    carrying = [
        (lane, move)
        for lane in lanes.values()
        for move in lane.overlapping(stall.start, stall.end)
        if move.name in wanted
    ]
    # What ended last is what was waited for.
    lane, move = max(carrying, key=lambda found: found[1].end, default=(None, None))
    together, for_ranks = lanes.get(RANKS_LANE), stall.details.get("for") == RANKS_LANE
    if for_ranks and together is not None and together.covered(stall.start, stall.end) >= _MOSTLY * length:
        return RANKS_LANE, Cause.RANKS
    kernels = lanes.get(UPDATE_LANE)
    updating = kernels.covered(stall.start, stall.end) / length if kernels is not None and length > 0 else 0.0
    if lane is None or move is None:
        if updating >= _MOSTLY:
            return "", Cause.UPDATE
        busiest = max(
            (one for name, one in lanes.items() if name not in (UPDATE_LANE, RANKS_LANE)),
            key=lambda one: one.covered(stall.start, stall.end),
            default=None,
        )
        if busiest is not None and length > 0 and busiest.covered(stall.start, stall.end) / length >= _MOSTLY:
            return busiest.name, Cause.BANDWIDTH  # an update was waited for, and that waited for its tiles
        return (RANKS_LANE, Cause.RANKS) if for_ranks else ("", Cause.OTHER)
    if move.start > stall.start + _LATE * length and _making_room(move, stall, lanes):
        return move.lane, Cause.BUDGET
    before = stall.start - length
    if length > 0 and lane.covered(before, stall.start) / length < _BUSY:
        return move.lane, Cause.LOOK_AHEAD
    return move.lane, Cause.BANDWIDTH


def _making_room(move: Event, stall: Event, lanes: dict[str, _Lane]) -> bool:
    """Whether bytes went the other way for most of the time from the stall's beginning to the move's."""
    source, _, target = move.lane.partition("->")
    back = lanes.get(f"{target}->{source}")
    return back is not None and back.covered(stall.start, move.start) >= _MOSTLY * (move.start - stall.start)


def _names(stall: Event) -> set[str]:
    waits = stall.details.get("waits", ())
    return {str(one) for one in waits} if isinstance(waits, Iterable) else set()


class _Lane:
    """Events of one lane, and the union of their spans."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.name = events[0].lane if events else ""
        self._events = sorted(events, key=lambda event: event.start)
        self._starts = [event.start for event in self._events]
        self._longest = max((event.end - event.start for event in events), default=0.0)
        self.spans: list[tuple[float, float]] = []
        for event in self._events:
            if self.spans and event.start <= self.spans[-1][1]:
                self.spans[-1] = (self.spans[-1][0], max(self.spans[-1][1], event.end))
            else:
                self.spans.append((event.start, event.end))
        self._span_starts = [start for start, _ in self.spans]

    def overlapping(self, start: float, end: float) -> list[Event]:
        """The events that share time with [start, end]."""
        first = bisect.bisect_left(self._starts, start - self._longest)
        last = bisect.bisect_left(self._starts, end)
        return [event for event in self._events[first:last] if event.end > start]

    def parts(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """The parts of [start, end] in which at least one event was going on, in order."""
        for index in range(max(0, bisect.bisect_right(self._span_starts, start) - 1), len(self.spans)):
            begin, finish = self.spans[index]
            if begin >= end:
                break
            if finish > start:
                yield max(begin, start), min(finish, end)

    def covered(self, start: float, end: float) -> float:
        """Seconds of [start, end] in which at least one event was going on."""
        return sum(finish - begin for begin, finish in self.parts(start, end))

    def at(self, moment: float) -> Event | None:
        """An event that was going on at that moment, the one that began last."""
        found = [event for event in self.overlapping(moment, moment + 1e-9) if event.start <= moment]
        return found[-1] if found else None
