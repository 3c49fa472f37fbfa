"""Work ahead of time: planning what stays, fetching what comes next, and writing down what will have to leave.

Owns what was chosen to be fetched and when to look at the coming accesses again. Does not serve anybody: demands go
first and this runs after them. Guarantees that looking ahead costs a bounded number of steps for each lease (a look is
repeated only after an eighth of what it saw has passed), and that a tier which can hold every page there is writes
nothing early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from swap.requests import Priority
from tiermem.memory.tiers import Tier
from tiermem.pager.below import make_plan_below
from tiermem.pager.course import Limits
from tiermem.pager.forecast import LATER, SETTLED, Forecast
from tiermem.pager.page import Kind, Lane, PageKey
from tiermem.pager.plan import Plan, make_plan
from tiermem.pager.policy import choose_read_ahead
from tiermem.pager.residency import Residency
from tiermem.pager.room import Room
from tiermem.pager.schedule import Schedule, Step

# How many coming accesses a look takes in; its real bound is in bytes, this one bounds the work.
COMING = 256
# A look is repeated after this fraction of the accesses it saw has passed.
_PATIENCE = 8


@dataclass(frozen=True, slots=True)
class Appetite:
    """How far the pager looks ahead on a tier.

    Attributes:
        look_ahead: bytes fetched ahead of the cursors at most.
        reserve: bytes always left for the largest single demand.
        lead: bytes by which the computation is taken to be ahead of an update that lags.
    """

    look_ahead: int
    reserve: int
    lead: int = 0


@dataclass(frozen=True, slots=True)
class _Renewed:
    """Positions of a step of `period` accesses where contents are made anew."""

    positions: Collection[int] = ()
    period: int = 1

    def __contains__(self, position: int) -> bool:
        return position % self.period in self.positions


class Ahead:
    """Reads ahead and writes back early. Used on the pager's loop only."""

    def __init__(self, residency: Residency, room: Room, appetite: Mapping[Tier, Appetite]) -> None:
        self._residency = residency
        self._room = room
        self._appetite = appetite
        self._pending: dict[Tier, deque[tuple[PageKey, int]]] = {}
        # What the step goes by, while an evaluation goes by something else.
        self._aside: tuple[Forecast, _Renewed, Mapping[Tier, Appetite]] | None = None
        self._renewed = _Renewed()
        self._rests = False  # whether pages are written outside of steps
        # How far the last look came: the position of the first access that it found no room for.
        self._horizon = dict.fromkeys(residency.chain.memory_tiers, -1)
        # Of the last look: how many accesses it took in; how many leases had been granted; by which forecast it went.
        self._seen = 0
        self._uses = 0
        self._version = -1

    def make_plan(self, schedule: Schedule, rooms: Mapping[PageKey, int], look_ahead: int | None = None) -> Plan:
        """What stays in HOST in a step of this schedule. Any thread.

        `rooms`: bytes that each page takes. `look_ahead`: bytes fetched ahead into HOST; None: as many as now. `follow`
        has to be told of it, too.
        What is kept by choice takes its bytes off the budget, and no room in the plan. With a device above it, what
        stays there is foreseen first; what leaves that is decided from use to use.
        """
        tier, chain = Tier.HOST, self._residency.chain
        kept = {key: nbytes for key, nbytes in rooms.items() if chain.keeps(key)} if chain.kept else {}
        appetite = self._appetite[tier]
        capacity = chain.capacity(tier) - appetite.reserve - sum(kept.values())
        below = {key: nbytes for key, nbytes in rooms.items() if key not in kept} if kept else rooms
        ahead = min(appetite.look_ahead if look_ahead is None else look_ahead, capacity)
        limits = Limits(capacity, ahead, appetite.lead, behind=2 * appetite.reserve)
        if chain.top is tier:
            return make_plan(schedule, below, limits)
        device = Limits(chain.capacity(chain.top) - self._appetite[chain.top].reserve)
        return make_plan_below(schedule, below, limits, device, chain.settled, above=rooms)

    def follow(self, schedule: Schedule | None, plan: Plan | None, look_ahead: int | None = None) -> None:
        """Go by another schedule, and keep what the plan for it keeps; `look_ahead` as for `make_plan`."""
        self.evaluate(Step.BEGINS)
        if look_ahead is not None:
            self._appetite = {**self._appetite, Tier.HOST: replace(self._appetite[Tier.HOST], look_ahead=look_ahead)}
        stays, reaches = (None, None) if plan is None else (plan.stays, plan.reaches)
        self._renewed = _Renewed(renewed_gradients(schedule), schedule.period) if schedule else _Renewed()
        self._residency.forecast.set_schedule(schedule, stays, reaches)
        self._room.homes.follow(at_home=plan is not None and plan.at_home)
        self._residency.reclassify()

    def evaluate(self, schedule: Schedule | Step) -> None:
        """Go by the schedule of an evaluation, of which no plan knows; or by the step's again, from where that is.

        What an evaluation does not use stays as long as it is in nobody's way. While the step rests nothing is written
        early: it may be changed again at once.
        """
        residency, aside = self._residency, self._aside
        self._rests = schedule is Step.RESTS
        if self._rests:
            return
        if schedule is Step.PAUSES:
            residency.forecast.mark()
            return
        if aside is not None:
            residency.forecast, self._renewed, self._appetite = aside
            self._aside = None
        if isinstance(schedule, Schedule):
            self._aside = residency.forecast, self._renewed, self._appetite
            residency.forecast, self._renewed = residency.forecast.beside(schedule), _Renewed()
            self._appetite = {**self._appetite, Tier.HOST: self._evaluating(schedule)}
        elif not residency.forecast.rewind(to_mark=schedule is Step.GOES_ON) and aside is None:
            return
        self._version = -1
        residency.reclassify()

    def _evaluating(self, schedule: Schedule) -> Appetite:
        """Half as far ahead, but a page at least: there are no tiles to update, and what stays is not read again."""
        appetite, pages = self._appetite[Tier.HOST], self._residency.pages
        largest = max((pages[access.key].room for access in schedule.accesses if access.key in pages), default=0)
        look_ahead = min(appetite.look_ahead, max(largest, appetite.look_ahead // 2))
        return replace(appetite, look_ahead=look_ahead)

    def rooms(self) -> dict[PageKey, int]:
        """Bytes that each page takes on a tier."""
        return {key: page.room for key, page in self._residency.pages.items()}

    def write_back(self, claimed: Collection[Tier]) -> None:
        """Send dirty pages off before their room is asked for, the one used last first.

        What read-ahead may want and the reserve should be had without a write. That is never more than the bytes which
        are not on the tier at all: where every page fits, nothing has to leave, and nothing is written early.

        What the computation has written on a DEVICE is sent off at once: gradients are wanted in HOST, by the update,
        and a copy costs no wear. Not into room that a demand has `claimed`. What ranks exchange is wanted on the DEVICE
        only, and leaves it where somebody wants its place.
        """
        residency = self._residency
        census = residency.census
        for tier in residency.chain.memory_tiers:
            if tier is Tier.DEVICE:
                if Tier.HOST not in claimed:
                    self._write_down(tier, SETTLED)  # not what is updated there and has no need of another copy
                continue
            appetite, capacity = self._appetite[tier], residency.chain.capacity(tier)
            if residency.total <= capacity or self._rests:
                continue
            if residency.forecast.is_planned:
                # What the plan does not keep has to be written at some time; what it keeps may be changed again.
                self._write_down(tier, LATER - 1)
                continue
            absent = residency.total - residency.chain.arenas[tier].reserved
            wanted = min(appetite.look_ahead, absent) + appetite.reserve
            keep = max(0, self._room.unheld(tier) - wanted)
            if census.dirty(tier) <= keep:
                continue
            with closing(census.writable(tier)) as candidates:
                for use, page in candidates:
                    if census.dirty(tier) <= keep or use <= self._horizon[tier]:
                        break  # what is used before the last page fetched ahead would only have to be read again
                    if page.key == residency.used_last and not residency.forecast.has_schedule:
                        continue  # it may be changed again at once: each gradient of a tile leases it anew
                    self._room.send_off(page, tier)

    def _write_down(self, tier: Tier, beyond: int) -> None:
        """Have what is used at a position beyond this one written, as long as there is room below for it."""
        census = self._residency.census
        if not census.dirty(tier) or census.farthest_writable(tier) <= beyond:
            return
        with closing(census.writable(tier)) as candidates:
            for use, page in candidates:
                # Buckets may wait for the end of the step; what comes behind them here is used before that.
                waits = tier is Tier.DEVICE and page.key.kind is Kind.TRANSIT
                if waits or use <= beyond or not self._room.send_off(page, tier):
                    break

    def read(self) -> None:
        """Start fetching what is needed next and fits; not while a demand lacks room."""
        forecast, uses = self._residency.forecast, self._residency.uses
        if not forecast.has_schedule:
            return
        if forecast.version != self._version or uses - self._uses >= self._seen // _PATIENCE:
            self._seen, self._uses, self._version = 0, uses, forecast.version
            for tier in self._residency.chain.memory_tiers:
                self._look(tier)
        for tier, pending in self._pending.items():
            if pending:
                self._start(tier, pending)

    @property
    def has_everything(self) -> bool:
        """Whether all that has contents is there or on its way, and stays: where HOST is all there is above SWAP."""
        return self._residency.chain.top is Tier.HOST and self._has_all(Tier.HOST)

    def _has_all(self, tier: Tier) -> bool:
        residency = self._residency
        return residency.total <= residency.chain.capacity(tier) and not residency.census.has_away(tier)

    def _look(self, tier: Tier) -> None:
        """Decide what to fetch; it is started when its bytes are on the tier below and there is a frame for it."""
        appetite = self._appetite[tier]
        positions: dict[PageKey, int] = {}
        self._horizon[tier] = -1
        if self._has_all(tier):
            self._pending[tier] = deque()
            return  # everything is there, or on its way, and stays: a look would find nothing to do
        chosen = choose_read_ahead(
            self._coming(tier, positions),
            capacity=self._residency.chain.capacity(tier),
            held=self._residency.census.fixed(tier),
            reserve=appetite.reserve,
            look_ahead=appetite.look_ahead,
        )
        self._horizon[tier] = max(positions.values(), default=-1)
        self._pending[tier] = deque((key, positions[key]) for key in chosen)

    def _start(self, tier: Tier, pending: deque[tuple[PageKey, int]]) -> None:
        """Start what can be started, in order, up to the first that finds no frame."""
        below = self._residency.chain.towards(tier, Tier.SWAP)
        planned = self._residency.forecast.is_planned and tier is Tier.HOST
        later = []
        while pending:
            key, position = pending[0]
            page = self._residency.pages.get(key)
            if page is None:  # removed since it was chosen
                pending.popleft()
                continue
            wanted = page.valid and tier not in page.frames and page.error is None
            if wanted and not page.doomed and not page.exclusive:
                if below not in page.valid or page.move is not None:
                    later.append(pending[0])  # on its way to the tier below
                elif not self._room.make_ahead(page, tier, LATER - 1 if planned else position):
                    break
                else:
                    self._residency.start_move(page, tier, Priority.READ_AHEAD)
            pending.popleft()
        pending.extendleft(reversed(later))

    def _coming(self, tier: Tier, positions: dict[PageKey, int]) -> Iterator[tuple[PageKey, int, bool]]:
        """What is accessed next on the tier, each page once; notes where, also of what stays there (leased, kept)."""
        pages, chain, compute, host = self._residency.pages, self._residency.chain, Lane.COMPUTE, Tier.HOST
        top, settled, transit = chain.top, chain.settled, Kind.TRANSIT
        for position, lane, key in self._residency.forecast.upcoming(COMING):
            self._seen += 1
            if key in positions:
                continue
            page = pages.get(key)
            wanted = top if lane is compute or key[0] in settled else host
            if page is None or page.error is not None or wanted < tier:
                continue
            # What its update in HOST is going to use up will be written anew on the DEVICE: as what has no contents.
            anew = tier is not host and lane is compute and position in self._renewed
            written = bool(page.valid) and not anew
            if lane is not compute and not written:
                continue  # written when the update comes to it; nobody knows whether there is anything to update
            if tier is not wanted and (top in page.frames or (key.kind is transit and not written)):
                # It is there, or has its place there: nothing is needed on the way. And what is exchanged among ranks
                # begins, and mostly ends, on the top tier.
                continue
            positions[key] = position
            if tier not in page.leases and not (page.home is host is tier):
                # Without contents it is about to be written anew: nothing to fetch, but it will want its room.
                yield key, page.room, tier in page.frames or not written


def renewed_gradients(schedule: Schedule) -> frozenset[int]:
    """Where the computation writes a gradient whose contents the update has used up: nobody has to fetch them."""
    latest: dict[PageKey, Lane] = {}
    found = set()
    for position, (lane, key) in (*enumerate(schedule.accesses), *enumerate(schedule.accesses)):  # step upon step
        if key.kind is Kind.GRAD:
            if lane is Lane.COMPUTE and latest.get(key) is Lane.UPDATE:
                found.add(position)
            latest[key] = lane
    return frozenset(found)
