"""What takes time: a drive, a wire, the processor's cores.

Owns the models of bandwidth, latency, queue depth, mixed reading and writing, and of computation and update kernels
that slow each other down. Does not know pages or processes. Guarantees that no more bytes flow than the rates say,
whatever is asked for at once, and that better priorities go first.

A drive
-------
Two rows wait, reads and writes, each ordered by priority and then by arrival, as `swap.device_queue` has them. The
first `depth` blocks are with the drive: while both rows wait, the one with the better priority has three quarters of
them. Alone, each direction has its own bandwidth. Together the drive gives what lies, by the share of writes, on the
lines between its read, mixed and write bandwidths. Fewer blocks in flight than fill latency and bandwidth give their
part: block / (latency + block / bandwidth) each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tiermem.planner.clock import EPSILON

_SHARE_BEHIND = 0.25
_PRIORITIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveSpeed:
    """One rank's share of its drives: bytes a second alone and mixed, seconds of latency, blocks in flight."""

    read: float
    write: float
    mixed: float
    latency: float
    depth: int
    block: int

    def together(self, writes: float) -> float:
        """Bytes a second, both directions, when this share of the blocks in flight are writes."""
        if writes <= 0.5:
            return self.read + (self.mixed - self.read) * writes * 2
        return self.mixed + (self.write - self.mixed) * (writes - 0.5) * 2


class Transfer:
    """Bytes on their way; `promote` lets them overtake."""

    __slots__ = ("done", "left", "nbytes", "priority", "promoted", "rate")

    def __init__(self, nbytes: int, priority: int, done: Callable[[], None]) -> None:
        self.nbytes = nbytes
        self.left = float(nbytes)
        self.priority = priority
        self.done = done
        self.rate = 0.0
        self.promoted: Callable[[Transfer], None] | None = None

    def promote(self) -> None:
        """Go before what nobody waits for."""
        if self.promoted is not None and self.priority:
            self.promoted(self)


class _Row:
    """Transfers of one direction by priority, then by arrival."""

    def __init__(self) -> None:
        self._lanes: tuple[dict[Transfer, None], ...] = tuple({} for _ in range(_PRIORITIES))
        self.count = 0

    def add(self, transfer: Transfer) -> None:
        self._lanes[transfer.priority][transfer] = None
        self.count += 1

    def remove(self, transfer: Transfer) -> None:
        del self._lanes[transfer.priority][transfer]
        self.count -= 1

    def promote(self, transfer: Transfer) -> None:
        self.remove(transfer)
        transfer.priority = 0
        self.add(transfer)

    @property
    def best(self) -> int | None:
        if not self.count:
            return None
        return next(priority for priority, lane in enumerate(self._lanes) if lane)

    def first(self, slots: int, block: int) -> list[tuple[Transfer, int]]:
        """The transfers that the first `slots` blocks belong to, with how many each has."""
        found: list[tuple[Transfer, int]] = []
        for lane in self._lanes:
            for transfer in lane:
                if slots <= 0:
                    return found
                taken = min(slots, max(1, math.ceil(transfer.left / block)))
                found.append((transfer, taken))
                slots -= taken
        return found


class DriveModel:
    """A drive, or drives striped over, with a queue (see "A drive")."""

    def __init__(self, speed: DriveSpeed) -> None:
        self._speed = speed
        self._rows = (_Row(), _Row())
        self._flowing: list[tuple[Transfer, int]] = []
        self._changed = False
        self.busy = [0.0, 0.0]  # seconds reading, writing

    @property
    def reading(self) -> bool:
        """Whether anything is being read."""
        return self._rows[0].count > 0

    @property
    def writing(self) -> bool:
        """Whether anything is being written."""
        return self._rows[1].count > 0

    def start(self, nbytes: int, *, write: bool, priority: int, done: Callable[[], None]) -> Transfer:
        """Move bytes; `done()` is called when they have arrived."""
        transfer = Transfer(nbytes, priority, done)
        row = self._rows[write]
        row.add(transfer)

        def promote(waiting: Transfer) -> None:
            row.promote(waiting)
            self._changed = True

        transfer.promoted = promote
        self._changed = True
        return transfer

    def next_end(self) -> float:
        """See `clock.Resource`."""
        if self._changed:
            self._share()
        if not self._flowing:
            return math.inf
        return min([transfer.left / transfer.rate for transfer, _ in self._flowing])

    def advance(self, seconds: float) -> None:
        """See `clock.Resource`."""
        if not self._flowing:
            return
        self.busy[0] += seconds * self.reading
        self.busy[1] += seconds * self.writing
        ended = []
        for transfer, row in self._flowing:
            transfer.left -= transfer.rate * seconds
            if transfer.left <= transfer.rate * EPSILON + 1e-6:
                ended.append((transfer, row))
        for transfer, row in ended:
            self._rows[row].remove(transfer)
            transfer.promoted = None
            self._changed = True
            transfer.done()

    def _share(self) -> None:
        """Give each transfer in front its part of the bandwidth."""
        self._changed = False
        speed = self._speed
        slots = self._slots()
        taken = [row.first(count, speed.block) for row, count in zip(self._rows, slots, strict=True)]
        used = [sum(count for _, count in group) for group in taken]
        total = sum(used)
        self._flowing = []
        if not total:
            return
        bandwidth = speed.together(used[1] / total)
        solo = speed.block / (speed.latency + speed.block / bandwidth)
        rate_of_slot = min(bandwidth / total, solo)
        for row, group in enumerate(taken):
            for transfer, count in group:
                # A request shorter than its blocks pays the latency for fewer bytes.
                short = min(1.0, transfer.nbytes / (count * speed.block))
                slot = short * speed.block / (speed.latency + short * speed.block / bandwidth)
                transfer.rate = count * min(rate_of_slot, slot)
                self._flowing.append((transfer, row))

    def _slots(self) -> tuple[int, int]:
        depth = self._speed.depth
        best = [row.best for row in self._rows]
        if best[0] is None or best[1] is None:
            return depth, depth
        behind = 0 if depth == 1 else min(max(1, round(depth * _SHARE_BEHIND)), depth // 2)
        return (depth - behind, behind) if best[0] <= best[1] else (behind, depth - behind)


class Wire:
    """One direction of a bus: one transfer after the other, better priorities first."""

    def __init__(self, rate: float, latency: float = 1e-5) -> None:
        self._rate = rate
        self._latency = latency
        self._row = _Row()
        self._current: Transfer | None = None

    def start(self, nbytes: int, *, priority: int, done: Callable[[], None]) -> Transfer:
        """Move bytes; `done()` is called when they have arrived."""
        transfer = Transfer(nbytes, priority, done)
        transfer.left = nbytes + self._latency * self._rate
        transfer.promoted = self._row.promote
        self._row.add(transfer)
        return transfer

    @property
    def busy(self) -> bool:
        """Whether anything is on its way."""
        return self._current is not None or self._row.count > 0

    def next_end(self) -> float:
        """See `clock.Resource`."""
        if self._current is None:
            group = self._row.first(1, 1)
            if not group:
                return math.inf
            self._current = group[0][0]
        return self._current.left / self._rate

    def advance(self, seconds: float) -> None:
        """See `clock.Resource`."""
        current = self._current
        if current is None:
            return
        current.left -= seconds * self._rate
        if current.left <= self._rate * EPSILON + 1e-6:
            self._row.remove(current)
            self._current = current.promoted = None
            current.done()


class Cores:
    """The computation and the update kernel, each one thing at a time, on cores they may have to share.

    `slower`: how much longer computation takes beside the kernel, the kernel beside computation, and each of them while
    bytes move, which `moving()` says.
    """

    def __init__(self, slower: tuple[float, float, float, float], moving: Callable[[], bool]) -> None:
        self._slower = slower
        self._moving = moving
        self._left = [0.0, 0.0]
        self._done: list[Callable[[], None] | None] = [None, None]
        self._rates = (1.0, 1.0)  # of the stretch of time that comes next
        self.busy = [0.0, 0.0]  # seconds computing, updating

    @property
    def computing(self) -> bool:
        """Whether the computation runs."""
        return self._done[0] is not None

    @property
    def updating(self) -> bool:
        """Whether an update kernel runs."""
        return self._done[1] is not None

    def compute(self, seconds: float, done: Callable[[], None]) -> None:
        """Compute for `seconds` of undisturbed time."""
        self._left[0], self._done[0] = seconds, done

    def update(self, seconds: float, done: Callable[[], None]) -> None:
        """Run an update kernel for `seconds` of undisturbed time."""
        self._left[1], self._done[1] = seconds, done

    def next_end(self) -> float:
        """See `clock.Resource`."""
        computing, updating = self.computing, self.updating
        if not (computing or updating):
            return math.inf
        beside_update, beside_compute, compute_beside_io, update_beside_io = self._slower
        moving = bool(compute_beside_io or update_beside_io) and self._moving()
        compute = 1 / (1 + beside_update * updating + compute_beside_io * moving)
        update = 1 / (1 + beside_compute * computing + update_beside_io * moving)
        self._rates = compute, update
        ends = self._left[0] / compute if computing else math.inf
        return min(ends, self._left[1] / update) if updating else ends

    def advance(self, seconds: float) -> None:
        """See `clock.Resource`."""
        for index, done in enumerate(tuple(self._done)):
            if done is None:
                continue
            self.busy[index] += seconds
            self._left[index] -= seconds * self._rates[index]
            if self._left[index] <= EPSILON:
                self._done[index] = None
                done()
