"""What was moved, how long it took, and who waited.

Owns the frozen records that `statistics()` returns and the one accumulator behind them. Does not know pages or files;
an edge is a name such as "swap->host". Guarantees that what is counted appears in exactly one step or since the last,
that the total is the sum of all of it, and that counting is safe from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields

from tiermem.errors import InvariantError
from tiermem.look_ahead import LookAhead
from tiermem.memory.sizes import format_bytes
from tiermem.wear import UNKNOWN, Endurance, Wear, measure_wear

READ_EDGE = "swap->host"
WRITE_EDGE = "host->swap"


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Bytes of one tier: its budget, what is reserved now, and the most that ever was."""

    name: str
    budget: int
    reserved: int
    high_water: int


@dataclass(frozen=True, slots=True)
class DriveStatistics:
    """One drive since the run began: its swap directories, their room, and what moved.

    `share`: the part of 1 of every striped page that goes there. `busy_seconds`: at least one block was in flight.
    """

    directories: tuple[str, ...]
    budget: int
    reserved: int
    share: float
    bytes_read: int = 0
    bytes_written: int = 0
    busy_seconds: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth while busy, reads and writes together; 0.0 if never busy."""
        return (self.bytes_read + self.bytes_written) / self.busy_seconds if self.busy_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class EdgeStatistics:
    """Moves over one edge: how many bytes and moves finished, and for how many seconds at least one was in flight."""

    name: str
    nbytes: int = 0
    moves: int = 0
    busy_seconds: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth while busy; 0.0 if never busy."""
        return self.nbytes / self.busy_seconds if self.busy_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """What happened in one step, or in all of a run.

    `stall_seconds`: how long the compute thread waited for moves, updates and ranks; `rank_seconds`: the part of it for
    what all ranks do together, from when it was waited for until it had come. `cache_hits` and `cache_misses`: leases
    whose page was there, or had to be waited for. `evictions`: copies given up to make room. `discards`: pages
    forgotten. `held_frames`: frames that could not be reused when released, because somebody still looked at them.
    `speculated`: steps in which units were updated before `step()`, so that it could be undone; `confirmed`: those of
    them that counted; `redone`: those undone and updated again with what `step()` asked for. The rest were undone and
    dropped.
    """

    seconds: float = 0.0
    stall_seconds: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
    evictions: int = 0
    discards: int = 0
    held_frames: int = 0
    speculated: int = 0
    confirmed: int = 0
    redone: int = 0
    rank_seconds: float = 0.0
    edges: tuple[EdgeStatistics, ...] = ()

    def edge(self, name: str) -> EdgeStatistics:
        """Return the statistics of one edge, all zero if nothing moved over it."""
        return next((edge for edge in self.edges if edge.name == name), EdgeStatistics(name))

    @property
    def bytes_read(self) -> int:
        """Bytes read from swap."""
        return self.edge(READ_EDGE).nbytes

    @property
    def bytes_written(self) -> int:
        """Bytes written to swap."""
        return self.edge(WRITE_EDGE).nbytes

    @property
    def hit_rate(self) -> float:
        """Hits over hits and misses, from 0 to 1; 1.0 if there was neither."""
        asked = self.cache_hits + self.cache_misses
        return self.cache_hits / asked if asked else 1.0

    def plus(self, other: StepStatistics) -> StepStatistics:
        """Return the sum of two spans of time that do not overlap."""
        sums = {
            item.name: getattr(self, item.name) + getattr(other, item.name)
            for item in fields(self)
            if item.name != "edges"
        }
        names = dict.fromkeys(edge.name for edge in (*self.edges, *other.edges))
        return StepStatistics(**sums, edges=tuple(_add_edges(self.edge(name), other.edge(name)) for name in names))


def _add_edges(left: EdgeStatistics, right: EdgeStatistics) -> EdgeStatistics:
    return EdgeStatistics(
        left.name, left.nbytes + right.nbytes, left.moves + right.moves, left.busy_seconds + right.busy_seconds
    )


@dataclass(frozen=True, slots=True)
class Statistics:
    """A run so far: the last closed step, everything, how many steps were closed, the tiers from far to near, drives.

    `last` is None before the first step closed. `total` includes what happened since. `look_ahead`: the one in use.
    `ranks`: how many have the model together; all else is this one's.
    """

    last: StepStatistics | None = None
    total: StepStatistics = field(default_factory=StepStatistics)
    steps: int = 0
    tiers: tuple[TierStatistics, ...] = ()
    drives: tuple[DriveStatistics, ...] = ()
    look_ahead: LookAhead | None = None
    ranks: int = 1

    def wear(self, endurance: Endurance = UNKNOWN) -> Wear:
        """Return what the writing so far, going on at the pace of the last step, means for the drives."""
        last = self.last or StepStatistics()
        return measure_wear(
            self.total.bytes_written,
            paced_bytes=last.bytes_written,
            seconds=last.seconds,
            endurance=endurance,
        )

    def table(self) -> str:
        """Return tables as plain text: what happened (last step, all steps), what tiers hold, what drives moved."""
        spans = [span for span in (self.last, self.total) if span is not None]
        titles = ["last step", f"total of {self.steps} steps"][-len(spans) :]
        rows = [["", *titles], ["seconds", *(f"{span.seconds:.3f}" for span in spans)]]
        rows.append(["stall seconds", *(f"{span.stall_seconds:.3f}" for span in spans)])
        if any(span.rank_seconds for span in spans):
            rows.append(["of them for ranks", *(f"{span.rank_seconds:.3f}" for span in spans)])
        for name in dict.fromkeys(edge.name for span in spans for edge in span.edges):
            edges = [span.edge(name) for span in spans]
            rows.append([f"{name} bytes", *(format_bytes(edge.nbytes) for edge in edges)])
            rows.append([f"{name} moves", *(str(edge.moves) for edge in edges)])
            rows.append([f"{name} busy seconds", *(f"{edge.busy_seconds:.3f}" for edge in edges)])
            rows.append([f"{name} GB/s while busy", *(f"{edge.bytes_per_second / 1e9:.2f}" for edge in edges)])
        rows.append(["cache hits", *(f"{span.cache_hits} ({span.hit_rate:.0%})" for span in spans)])
        rows.extend(
            [name.replace("_", " "), *(str(getattr(span, name)) for span in spans)]
            for name in ("cache_misses", "evictions", "discards", "held_frames", "speculated", "confirmed", "redone")
        )
        tiers = [["tier", "budget", "reserved", "high-water mark"]]
        tiers.extend(
            [tier.name, *map(format_bytes, (tier.budget, tier.reserved, tier.high_water))] for tier in self.tiers
        )
        drives = [["drive", "share", "reserved", "read", "written", "busy seconds", "GB/s while busy"]]
        drives.extend(
            [
                ", ".join(drive.directories),
                f"{drive.share:.0%}",
                *map(format_bytes, (drive.reserved, drive.bytes_read, drive.bytes_written)),
                f"{drive.busy_seconds:.3f}",
                f"{drive.bytes_per_second / 1e9:.2f}",
            ]
            for drive in self.drives
        )
        return "\n\n".join(_align(table) for table in (rows, tiers, drives) if len(table) > 1)


def _align(rows: Sequence[Sequence[str]]) -> str:
    """First column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *rest = row
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


class _Edge:
    """Running numbers of one edge. `busy_since` is the start of the present busy spell while moves are in flight."""

    __slots__ = ("busy_seconds", "busy_since", "in_flight", "moves", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self.moves = 0
        self.in_flight = 0
        self.busy_seconds = 0.0
        self.busy_since = 0.0

    def accrued(self, name: str, now: float) -> EdgeStatistics:
        """Return what has accrued up to `now`, the present busy spell included."""
        spell = now - self.busy_since if self.in_flight else 0.0
        return EdgeStatistics(name, self.nbytes, self.moves, self.busy_seconds + spell)

    def reset(self, now: float) -> None:
        """Start from zero; moves in flight stay in flight and are busy from `now` on."""
        self.nbytes, self.moves, self.busy_seconds, self.busy_since = 0, 0, 0.0, now


class _Tally:
    """The open span; changed in place, because every lease is counted. The names are those of `StepStatistics`."""

    __slots__ = ("counts", "rank_seconds", "stall_seconds")

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.stall_seconds = 0.0
        self.rank_seconds = 0.0

    def frozen(self, seconds: float, edges: tuple[EdgeStatistics, ...]) -> StepStatistics:
        """What was counted, and how long it took."""
        stalled, for_ranks = self.stall_seconds, self.rank_seconds
        return StepStatistics(seconds, stalled, rank_seconds=for_ranks, edges=edges, **self.counts)


class Counters:
    """Counts the present span of time; `step` closes it. Any thread may call any method. `clock` returns seconds."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[float, float], None] = lambda started, ended: None,  # noqa: ARG005 - nobody wants to know
    ) -> None:
        """`on_step(started, ended)` is told of every closed step, in seconds of `clock`."""
        self._clock = clock
        self._on_step = on_step
        self._lock = threading.RLock()  # a signal handler may ask for the statistics in the middle of anything
        self._edges: dict[str, _Edge] = {}
        self._open = _Tally()
        self._opened_at = clock()
        self._last: StepStatistics | None = None
        self._total = StepStatistics()
        self._steps = 0

    def move_started(self, edge: str) -> None:
        """A move over `edge` is in flight."""
        with self._lock:
            record = self._edges.setdefault(edge, _Edge())
            if record.in_flight == 0:
                record.busy_since = self._clock()
            record.in_flight += 1

    def move_finished(self, edge: str, nbytes: int) -> None:
        """A move over `edge` is no longer in flight; it moved `nbytes`, 0 if it failed."""
        with self._lock:
            record = self._edges.get(edge)
            if record is None or record.in_flight == 0:
                raise InvariantError(f"a move over {edge} finished, but none is in flight")
            record.in_flight -= 1
            if record.in_flight == 0:
                record.busy_seconds += self._clock() - record.busy_since
            record.nbytes += nbytes
            record.moves += 1

    def count(
        self,
        *,
        cache_hits: int = 0,
        cache_misses: int = 0,
        evictions: int = 0,
        discards: int = 0,
        held_frames: int = 0,
        speculated: int = 0,
        confirmed: int = 0,
        redone: int = 0,
        stall_seconds: float = 0.0,
        rank_seconds: float = 0.0,
    ) -> None:
        """Add to the present span; see `StepStatistics` for what each number means."""
        with self._lock:
            counts = self._open.counts
            if cache_hits:
                counts["cache_hits"] += cache_hits
            if cache_misses:
                counts["cache_misses"] += cache_misses
            if evictions:
                counts["evictions"] += evictions
            if discards:
                counts["discards"] += discards
            if held_frames or speculated or confirmed or redone:
                counts["held_frames"] += held_frames
                counts["speculated"] += speculated
                counts["confirmed"] += confirmed
                counts["redone"] += redone
            self._open.stall_seconds += stall_seconds
            self._open.rank_seconds += rank_seconds

    def step(self) -> StepStatistics:
        """Close the present step and return it; the next one begins."""
        with self._lock:
            started, now = self._opened_at, self._clock()
            closed = self._last = self._span(now)
            self._total = self._total.plus(closed)
            self._steps += 1
            self._open, self._opened_at = _Tally(), now
            for record in self._edges.values():
                record.reset(now)
        self._on_step(started, started + closed.seconds)
        return closed

    @property
    def steps(self) -> int:
        """How many steps are closed."""
        return self._steps

    def snapshot(self, tiers: Iterable[TierStatistics] = (), drives: Iterable[DriveStatistics] = ()) -> Statistics:
        """Return the run so far. `total` includes what has accrued since the last step closed."""
        with self._lock:
            total = self._total.plus(self._span(self._clock()))
            return Statistics(self._last, total, self._steps, tuple(tiers), tuple(drives))

    def _span(self, now: float) -> StepStatistics:
        """Return what was counted since the present span was opened."""
        edges = tuple(record.accrued(name, now) for name, record in self._edges.items())
        return self._open.frozen(now - self._opened_at, edges)
