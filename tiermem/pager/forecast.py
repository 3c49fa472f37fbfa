"""Where in the recorded step each lane stands, and what follows from it.

Owns the `Forecast`, which answers "when is this page used next" and "what comes next" from a `Schedule`. Does not know
sizes, tiers or budgets. Guarantees that positions grow for ever (a step later is a period later), that a lane which
lags is answered with what it has still to do, and that an access which the schedule does not hold changes nothing but a
counter.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

from tiermem.pager.agenda import Agenda
from tiermem.pager.lane_order import LaneOrder
from tiermem.pager.page import Kind, Lane, PageKey
from tiermem.pager.schedule import Schedule, due_positions, is_gradient

# Without a schedule the page used longest ago is taken to be needed last (LRU), and any such guess is further away
# than every recorded use.
_UNKNOWN = 1 << 60

# Added to the next use of a page that the plan does not keep until then: it goes before any that is kept.
LATER = 1 << 40

# Before every use: of pages that are to stay where they are even if others are needed sooner.
SETTLED = -1

# An access that lies further ahead in its lane than this many accesses is either an extra one (of a page that had its
# turn) or the first after a gap; only the access after it tells which, so that one odd access does not throw the
# whole forecast off.
_LEAP = 16
_NOT_NEXT = (Kind.GRAD, Kind.TRANSIT)  # added to once more, or exchanged beside something else: see `Forecast.note`


class Forecast:
    """Where each lane stands in the schedule, and what follows from it. Used on the pager's loop only."""

    def __init__(self, agenda: Agenda | None = None) -> None:
        self._schedule: Schedule | None = None
        self._lanes: dict[Lane, LaneOrder] = {}
        self._step = 0  # how many have begun since this schedule was set
        self._regular = True  # whether the present one has gone as recorded so far
        # For each page of the update: where it is accessed, and after which access of the computation it may come.
        self._due: dict[PageKey, tuple[int, int]] = {}
        self._done: dict[PageKey, int] = {}  # one past the latest access that the update has made, with an agenda
        self._stays: Sequence[bool] | None = None
        self._reaching = LaneOrder()  # the computation's accesses that the plan lets come from HOST
        self._fetched: set[PageKey] = set()  # since their last access, for the next one
        self._agenda = agenda
        self.surprises = 0  # accesses that the schedule did not expect there, since the beginning
        self.version = 0  # raised whenever what comes next may be other than it was

    @property
    def has_schedule(self) -> bool:
        """Whether a schedule is set."""
        return self._schedule is not None

    def set_schedule(
        self, schedule: Schedule | None, stays: Sequence[bool] | None = None, reaches: Sequence[bool] | None = None
    ) -> None:
        """Follow `schedule` from its beginning, or (None) know nothing of the future.

        `stays`: for each access, whether the plan keeps the page in memory until then (`plan.Plan`); None: no plan.
        `reaches`: for each, whether HOST is where it is served from, or written to; None: always.
        """
        self._schedule = schedule
        self._stays = stays
        self._fetched.clear()
        self._lanes = {lane: LaneOrder() for lane in Lane}
        self._reaching = LaneOrder()
        self._step = 0
        self._regular = True
        self.version += 1
        for position, access in enumerate(schedule.accesses if schedule else ()):
            order = self._lanes[access.lane]
            order.positions.append(position)
            order.keys.append(access.key)
            order.of_key.setdefault(access.key, []).append(position)
            if access.lane is Lane.COMPUTE and (reaches is None or reaches[position]):
                self._reaching.of_key.setdefault(access.key, []).append(position)
        self._due = due_positions(schedule) if schedule is not None else {}
        self._done = {}

    def beside(self, schedule: Schedule) -> Forecast:
        """The forecast of an evaluation, which goes round in `schedule`; both know what the update does."""
        other = _Beside(self._agenda, self)
        other.set_schedule(schedule)
        return other

    def begin_step(self) -> bool:
        """A new step starts: the computation is at its beginning; the update may lag, but by less than a step.

        Returns whether the step before went as recorded. If not, next uses asked for during it may be wrong.
        """
        if self._schedule is None:
            return True
        period, compute = self._schedule.period, self._lanes[Lane.COMPUTE]
        self._step += 1
        start = self._step * period
        regular = self._regular and compute.between(compute.cursor, start, period) == 0
        self.rewind()
        return regular

    def mark(self) -> None:
        """Note where the computation is: `rewind` may bring it back there."""
        if self._schedule is not None:
            self._lanes[Lane.COMPUTE].marked = self._lanes[Lane.COMPUTE].cursor

    def rewind(self, *, to_mark: bool = False) -> bool:
        """The step is at its beginning (or mark), whatever was looked at in between; whether that had led astray."""
        if self._schedule is None:
            return False
        period, compute, update = self._schedule.period, self._lanes[Lane.COMPUTE], self._lanes[Lane.UPDATE]
        start = compute.marked if to_mark else self._step * period
        astray = compute.cursor != start or compute.leap is not None
        self._regular = True
        self.version += 1
        compute.cursor, compute.leap = start, None
        update.cursor = min(max(update.cursor, start - period), start)
        return astray

    def set_agenda(self, groups: Sequence[Sequence[PageKey]]) -> set[PageKey]:
        """What the update does next, unit by unit; replaces what the recorded order says about lagging updates.

        Returns the pages whose next use may have changed.
        """
        self._agenda = self._agenda or Agenda()
        self.version += 1
        return self._agenda.set(groups)

    def extend_agenda(self, group: Sequence[PageKey]) -> set[PageKey]:
        """One more unit at the end of the agenda; returns its pages."""
        self._agenda = self._agenda or Agenda()
        self.version += 1
        self._agenda.extend(group)
        return set(group)

    def note(self, lane: Lane, key: PageKey) -> None:
        """Move the lane's cursor past its next access to `key`; an access not expected here is a surprise."""
        self._fetched.discard(key)
        if lane is Lane.UPDATE and self._agenda is not None:
            self._agenda.tick_off(key)
            self.update_done(key)
            return
        if self._schedule is None:
            return
        order, period = self._lanes[lane], self._schedule.period
        position = order.next_at(key, period)
        if position is None:
            self.surprises += 1
            return
        skipped = 0 if order.is_next(position, period) else order.between(order.cursor, position, period)
        if skipped and key.kind in _NOT_NEXT and position // period > (order.cursor - 1) // period:
            self.surprises += 1  # no way leads past the end of the step to those of another one
            return
        reach = min(_LEAP, len(order.positions) // 2)
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

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan of what stays in memory."""
        return self._stays is not None

    def fetched(self, key: PageKey) -> None:
        """The page is brought for its next access, and stays until then whatever the plan says of the copy before."""
        self._fetched.add(key)

    def next_use(
        self, key: PageKey, last_use: int, lanes: Collection[Lane] = tuple(Lane), *, planned: bool = True
    ) -> int:
        """Absolute position of the next access to `key` by one of `lanes`; without one, LRU order by `last_use`.

        A page that the plan does not keep for that access is `LATER`, after all that it keeps. Not `planned`: on
        another tier than the plan's.
        """
        if self._schedule is None:
            return _UNKNOWN - last_use
        agenda, compute = self._agenda, self._lanes[Lane.COMPUTE]
        if agenda is not None and key in agenda.pages and Lane.UPDATE in lanes:
            return compute.cursor
        period, nearest = self._schedule.period, None
        for lane in lanes:
            order = self._lanes[lane]
            if key in order.of_key:
                use = order.next_at(key, period, None if order is compute else self._start(lane, key))
                if use is not None and (nearest is None or use < nearest):
                    nearest = use
        if nearest is None:
            return _UNKNOWN - last_use
        kept = not planned or self._stays is None or self._stays[nearest % period] or key in self._fetched
        return nearest if kept else LATER + nearest

    def next_use_below(self, key: PageKey, last_use: int, *, above: bool) -> int:
        """The same for a copy in HOST where the computation works on a tier above; `above`: that has a copy, too.

        A copy above serves the access that it was brought for, and those that the plan expects it to be there for.
        """
        if self._schedule is None or self._stays is None or (self._agenda is not None and key in self._agenda.pages):
            return self.next_use(key, last_use)
        period, compute = self._schedule.period, self._lanes[Lane.COMPUTE]
        start, fetched = compute.cursor, key in self._fetched
        if above and fetched:
            start = (compute.next_at(key, period) or start) + 1
        use = (self._reaching if above else compute).next_at(key, period, start)
        update = self._lanes[Lane.UPDATE].next_at(key, period, self._start(Lane.UPDATE, key))
        if update is not None and (use is None or update < use):
            use, above = update, False
        if use is None:
            return _UNKNOWN - last_use
        kept = self._stays[use % period] or (fetched and not above)
        return use if kept else LATER + use

    def upcoming(self, limit: int) -> Iterator[tuple[int, Lane, PageKey]]:
        """The next accesses of all lanes by position, at most one step ahead and at most `limit` of them.

        Lanes are merged as they come, so that taking a few costs a few, however long the step is. What is on the
        agenda comes in between: a few tiles first, and then a unit for each unit that the computation goes on to, or
        the update by the record before it comes to parameters.
        """
        if self._schedule is None:
            return iter(())
        agenda, schedule = self._agenda, self._schedule
        accesses = self._merge(schedule.period) if agenda is None else self._with_agenda(agenda, schedule)
        return itertools.islice(accesses, limit)

    def _with_agenda(self, agenda: Agenda, schedule: Schedule) -> Iterator[tuple[int, Lane, PageKey]]:
        """One step of the record, less what is announced or done already, with the agenda in between.

        With `Schedule.hasty` only that many pages of updates that are not announced yet come where they are recorded.
        The others come after the next parameters that the computation asks for, and after the gradients of these,
        which would find no room otherwise. So does the agenda where the computation is about to write such gradients.

        All lanes start where the computation is, so that nothing has to be merged. One loop without calls: every look
        ahead goes through it for each access it sees.
        """
        compute, update, param, grad = Lane.COMPUTE, Lane.UPDATE, Kind.PARAM, Kind.GRAD
        now, accesses = self._lanes[compute].cursor, schedule.accesses
        announced, waiting, done = agenda.pages, agenda.portions(), self._done
        together = schedule.hasty is not None and bool(accesses)
        hasty = len(accesses) if schedule.hasty is None else schedule.hasty
        seen, put_off, unit = 0, list[tuple[int, Lane, PageKey]](), None
        cycle, inside = divmod(now, period := schedule.period)
        # Between a unit that backward has left, whose update is announced, and the gradients of the next one?
        last, head = accesses[inside - 1] if together else None, iter(next(waiting, ()))
        due = together and is_gradient(accesses[inside])
        if not (due or (last is not None and is_gradient(last) and last.key in announced)):
            for key in head:
                yield now, update, key
        first = cycle * period
        rest = range(self._skip_done(now, schedule) - first, len(accesses))
        for start, part in ((first, rest), (first + period, range(inside))):
            for index in part:
                lane, key = accesses[index]
                if due and not (together and key[1] is grad):
                    for late in itertools.chain(head, next(waiting, ())):
                        yield now, update, late
                    yield from put_off
                    seen, put_off, due = 0, [], False
                if lane is compute:
                    yield start + index, lane, key
                    if key[1] is param:
                        due, unit = True, None
                    continue
                known = key in announced
                if not known and start + index < done.get(key, 0):
                    continue
                if key[0] != unit and not together:
                    # After another unit's update, and no parameters between them: the computation waits for both.
                    for late in itertools.chain(head, next(waiting, ())) if unit is not None else ():
                        yield now, update, late
                    unit = key[0]
                if not known:
                    seen += 1
                    if seen <= hasty:
                        yield start + index, lane, key
                    else:
                        put_off.append((start + index, lane, key))
        for group in (head, *waiting):
            for late in group:
                yield now, update, late
        yield from put_off

    def _skip_done(self, position: int, schedule: Schedule) -> int:
        """The first access of the step from `position` on that is not an update that is done.

        What is done stays done, and where the last look came to is remembered: where all updates come after the last
        gradient, a look does not have to cross those of all units before.
        """
        order = self._lanes[Lane.UPDATE]
        position = max(position, order.cursor)
        accesses, period, update = schedule.accesses, schedule.period, Lane.UPDATE
        end = position - position % period + len(accesses)
        while position < end:
            lane, key = accesses[position % period]
            if lane is not update or position >= self._done.get(key, 0):
                break
            position += 1
        order.cursor = position
        return position

    def _merge(self, period: int) -> Iterator[tuple[int, Lane, PageKey]]:
        heads = {lane: order.ahead(self._start(lane), period) for lane, order in self._lanes.items() if order.positions}
        front = {lane: next(head) for lane, head in heads.items()}
        while front:
            lane = min(front, key=lambda candidate: front[candidate][0])
            position, key = front[lane]
            yield position, lane, key
            following = next(heads[lane], None)
            if following is None:
                del front[lane]
            else:
                front[lane] = following

    def _start(self, lane: Lane, key: PageKey | None = None) -> int:
        """From where on a lane's recorded accesses (to `key`) are still to come.

        An update whose agenda is known does what lags from there; of the record it needs what the computation has yet
        to bring about, less what it has done already, which may be ahead of the computation.
        """
        start = self._lanes[Lane.COMPUTE if self._agenda is not None else lane].cursor
        return start if key is None or lane is Lane.COMPUTE else max(start, self._done.get(key, 0))

    def update_done(self, key: PageKey) -> None:
        """The update has made the access to `key` that the computation brought about last."""
        if self._schedule is not None and key in self._due:
            position, gradient = self._due[key]
            period, cursor = self._schedule.period, self._lanes[Lane.COMPUTE].cursor
            self._done[key] = position + (cursor - 1 - gradient) // period * period + 1


class _Beside(Forecast):
    """The forecast of an evaluation. It has no update: what the update does meanwhile is noted in that of the step."""

    def __init__(self, agenda: Agenda | None, step: Forecast) -> None:
        super().__init__(agenda)
        self._of_step = step

    def update_done(self, key: PageKey) -> None:
        self._of_step.update_done(key)
