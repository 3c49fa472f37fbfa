"""The recorded order of page accesses, and where in it each lane stands.

Owns the immutable `Schedule` of one training step and the `Forecast`, which answers "when is this page used next" and
"what comes next" from it. Does not know sizes, tiers or budgets. Guarantees that positions grow for ever (a step later
is a period later), that a lane which lags is answered with what it has still to do, and that an access which the
schedule does not hold changes nothing but a counter.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tiermem.pager.page import Lane, PageKey

# Without a schedule the page used longest ago is taken to be needed last (LRU), and any such guess is further away
# than every recorded use.
_UNKNOWN = 1 << 60

# An access that lies further ahead in its lane than this many accesses is either an extra one (of a page that had its
# turn) or the first after a gap; only the access after it tells which, so that one odd access does not throw the
# whole forecast off.
_LEAP = 16


@dataclass(frozen=True, slots=True)
class Access:
    """One page access of a step: who makes it and which page it touches."""

    lane: Lane
    key: PageKey


@dataclass(frozen=True, slots=True)
class Schedule:
    """The accesses of one step in order; an access's index is its position, the number of accesses the period."""

    accesses: tuple[Access, ...]

    @property
    def period(self) -> int:
        """Positions from one step to the next."""
        return max(1, len(self.accesses))


@dataclass(slots=True)
class _LaneOrder:
    """The accesses of one lane: positions in order, the keys at them, and each key's own positions."""

    positions: list[int] = field(default_factory=list)
    keys: list[PageKey] = field(default_factory=list)
    of_key: dict[PageKey, list[int]] = field(default_factory=dict)
    cursor: int = 0  # absolute position: everything before it has happened
    leap: int | None = None  # where the cursor would be if the last surprising access was the end of a gap

    def next_at(self, key: PageKey, period: int, start: int | None = None) -> int | None:
        """The absolute position of the first access to `key` at or after `start` (by default the cursor)."""
        own = self.of_key.get(key)
        if own is None:
            return None
        cycle, inside = divmod(self.cursor if start is None else start, period)
        index = bisect.bisect_left(own, inside)
        return cycle * period + own[index] if index < len(own) else (cycle + 1) * period + own[0]

    def between(self, start: int, end: int, period: int) -> int:
        """How many accesses of the lane lie in the absolute positions from `start` up to, not including, `end`."""
        return self._before(end, period) - self._before(start, period)

    def _before(self, position: int, period: int) -> int:
        cycle, inside = divmod(position, period)
        return cycle * len(self.positions) + bisect.bisect_left(self.positions, inside)


class Forecast:
    """Where each lane stands in the schedule, and what follows from it. Used on the pager's loop only."""

    def __init__(self) -> None:
        self._schedule: Schedule | None = None
        self._lanes: dict[Lane, _LaneOrder] = {}
        self._step = 0
        self._regular = True
        self.surprises = 0
        self.version = 0

    @property
    def has_schedule(self) -> bool:
        """Whether a schedule is set."""
        return self._schedule is not None

    def set_schedule(self, schedule: Schedule | None) -> None:
        """Follow `schedule` from its beginning, or (None) know nothing of the future."""
        self._schedule = schedule
        self._lanes = {lane: _LaneOrder() for lane in Lane}
        self._step = 0
        self._regular = True
        self.version += 1
        for position, access in enumerate(schedule.accesses if schedule else ()):
            order = self._lanes[access.lane]
            order.positions.append(position)
            order.keys.append(access.key)
            order.of_key.setdefault(access.key, []).append(position)

    def begin_step(self) -> bool:
        """A new step starts: the computation is at its beginning; the update may lag, but by less than a step.

        Returns whether the step before went as recorded. If not, next uses asked for during it may be wrong.
        """
        if self._schedule is None:
            return True
        period = self._schedule.period
        compute, update = self._lanes[Lane.COMPUTE], self._lanes[Lane.UPDATE]
        self._step += 1
        self.version += 1
        start = self._step * period
        regular = self._regular and compute.cursor <= start and compute.between(compute.cursor, start, period) == 0
        self._regular = True
        compute.cursor, compute.leap = start, None
        update.cursor = min(max(update.cursor, start - period), start)
        return regular

    def note(self, lane: Lane, key: PageKey) -> None:
        """Move the lane's cursor behind its next access to `key`; an access not expected here is a surprise."""
        if self._schedule is None:
            return
        order, period = self._lanes[lane], self._schedule.period
        position = order.next_at(key, period)
        if position is None:
            self.surprises += 1
            return
        reach = min(_LEAP, len(order.positions) // 2)
        skipped = order.between(order.cursor, position, period)
        if skipped > reach:
            self._regular = False
            confirmed = None if order.leap is None else order.next_at(key, period, order.leap)
            if order.leap is None or confirmed is None or order.between(order.leap, confirmed, period) > reach:
                self.surprises += 1
                order.leap = position + 1
                return
            position = confirmed
        elif skipped:
            self._regular = False
        order.cursor, order.leap = position + 1, None

    def next_use(self, key: PageKey, last_use: int) -> int:
        """Absolute position of the next access to `key` by any lane; without one, LRU order by `last_use`."""
        if self._schedule is not None:
            period = self._schedule.period
            uses = [use for order in self._lanes.values() if (use := order.next_at(key, period)) is not None]
            if uses:
                return min(uses)
        return _UNKNOWN - last_use

    def upcoming(self, limit: int) -> Iterator[tuple[int, Lane, PageKey]]:
        """The next accesses of all lanes by position, at most one step ahead and at most `limit` of them.

        Lanes are merged as they come, so that taking a few costs a few, however long the step is.
        """
        if self._schedule is None:
            return
        period = self._schedule.period
        heads = {lane: _ahead(order, period) for lane, order in self._lanes.items() if order.positions}
        front = {lane: next(head) for lane, head in heads.items()}
        for _ in range(limit):
            if not front:
                return
            lane = min(front, key=lambda candidate: front[candidate][0])
            position, key = front[lane]
            yield position, lane, key
            following = next(heads[lane], None)
            if following is None:
                del front[lane]
            else:
                front[lane] = following


def _ahead(order: _LaneOrder, period: int) -> Iterator[tuple[int, PageKey]]:
    """One period's worth of a lane's accesses from its cursor on."""
    cycle, inside = divmod(order.cursor, period)
    first = bisect.bisect_left(order.positions, inside)
    count = len(order.positions)
    for step in range(count):
        turn, index = divmod(first + step, count)
        yield (cycle + turn) * period + order.positions[index], order.keys[index]


def schedule_of(accesses: Iterable[tuple[Lane, PageKey]]) -> Schedule:
    """The schedule with these (lane, key) accesses in this order."""
    return Schedule(tuple(Access(lane, key) for lane, key in accesses))
