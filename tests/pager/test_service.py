"""Named scenarios of the service, on tiers whose transfers end when the test says so. Every page here is 10 bytes."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from doubles_chain import NextEvent, SteppedArena, SteppedCopies, SteppedSlab, SteppedTransfer, stepped_chain
from hypothesis import given
from hypothesis import strategies as st

from swap.requests import Priority
from tiermem.errors import CapacityError, InvariantError
from tiermem.memory.tiers import Tier
from tiermem.pager.ahead import Appetite, renewed_gradients
from tiermem.pager.forecast import Forecast
from tiermem.pager.page import Intent, Kind, Lane, Page, PageKey
from tiermem.pager.protection import Protection
from tiermem.pager.residency import Residency
from tiermem.pager.schedule import Step, schedule_of
from tiermem.pager.service import LeaseRequest, Service
from tiermem.stats import Counters

LOST = OSError(5, "injected")
READ, WRITE, FRESH = Intent.READ, Intent.WRITE, Intent.FRESH
SWAP, HOST, DEVICE = Tier.SWAP, Tier.HOST, Tier.DEVICE


class Bench:
    """A service with `count` pages, all of them on SWAP only to begin with."""

    def __init__(
        self,
        host: int,
        device: int | None = None,
        *,
        count: int = 6,
        look_ahead: int = 0,
        reserve: int = 10,
        kept: frozenset[int] = frozenset(),
        settled: frozenset[int] = frozenset(),
        arena: type[SteppedArena] = SteppedArena,
    ) -> None:
        self.chain, self.flying, self.store = stepped_chain(host, device, arena, kept=kept, settled=settled)
        self.ended: list[Any] = []
        self.forecast, self.counters = Forecast(), Counters()
        self.residency = Residency(
            self.chain, self.forecast, self.counters, ended=lambda *what: self.ended.append(what)
        )
        self.service = Service(self.residency, {tier: Appetite(look_ahead, reserve) for tier in self.chain.arenas})
        self.pages = [self.residency.add(PageKey(number, Kind.PARAM), 10, saved=True) for number in range(count)]
        for page in self.pages:
            self.store[page.key] = page.key.unit

    def ask(self, *numbers: int, intent: Intent = READ, lane: Lane = Lane.COMPUTE) -> Asked:
        pages = [self.pages[number] for number in numbers]
        return Asked(self, pages, intent, lane, self.chain.top if lane is Lane.COMPUTE else HOST)

    def pump(self) -> None:
        self.service.pump()
        self.residency.check_invariants()

    def moving(self) -> list[tuple[int, Tier]]:
        return [(transfer.page.key.unit, transfer.target) for transfer in self.flying]

    def end(self, number: int, error: BaseException | None = None) -> SteppedTransfer:
        transfer = next(transfer for transfer in self.flying if transfer.page.key.unit == number)
        self.flying.remove(transfer)
        transfer.finish(error)
        while self.ended:
            self.residency.finish_move(*self.ended.pop(0))
        self.pump()
        return transfer

    def settle(self) -> None:
        while self.flying:
            self.end(self.flying[0].page.key.unit)

    def bring(self, *numbers: int, intent: Intent = READ) -> None:
        """Use pages once each, in order, until everything has settled."""
        for number in numbers:
            asked = self.ask(number, intent=intent)
            self.settle()
            asked.give_back()

    def order(self, *numbers: int) -> None:
        self.forecast.set_schedule(schedule_of((Lane.COMPUTE, self.pages[number].key) for number in numbers))
        self.residency.reclassify()
        self.pump()

    def on(self, tier: Tier) -> set[int]:
        return {page.key.unit for page in self.pages if tier in page.valid}


class Asked:
    """A request and what became of it."""

    def __init__(self, bench: Bench, pages: list[Page], intent: Intent, lane: Lane, tier: Tier) -> None:
        self.bench, self.error = bench, None
        self.granted = self.refused = False
        self.request = LeaseRequest(pages, intent, lane, tier, self._finished)
        bench.service.submit(self.request)
        bench.pump()

    def _finished(self, error: BaseException | None) -> None:
        assert not self.granted
        assert not self.refused
        self.granted, self.refused, self.error = error is None, error is not None, error

    def give_back(self) -> None:
        assert self.granted, (self.error, self.request)
        self.bench.service.release(self.request.pages, self.request.tier)
        self.bench.pump()

    def frame(self) -> Any:
        return self.request.pages[0].frames[self.request.tier]


def test_a_demand_evicts_the_page_used_farthest_in_the_future() -> None:
    bench = Bench(30)
    bench.bring(0, 1, 2)
    bench.order(1, 0, 3, 2)
    asked = bench.ask(3)
    assert bench.on(HOST) == {0, 1}
    bench.settle()
    assert asked.granted
    assert bench.on(HOST) == {0, 1, 3}


def test_pages_leased_together_are_noted_in_the_order_asked_for() -> None:
    bench = Bench(60)
    bench.bring(1)
    bench.order(0, 1, 2, 3, 4, 5)
    asked = bench.ask(0, 1, 2)
    bench.end(2)
    bench.end(0)
    assert asked.granted, "page 1 was there first, page 0 last"
    assert next(bench.forecast.upcoming(1)) == (3, Lane.COMPUTE, bench.pages[3].key)
    assert bench.forecast.surprises == 0


def test_a_dirty_victim_is_written_back_before_it_goes() -> None:
    bench = Bench(10)
    bench.bring(0, intent=WRITE)
    assert bench.pages[0].valid == {HOST}
    asked = bench.ask(1)
    assert bench.moving() == [(0, SWAP)]
    assert bench.pages[0].valid == {HOST}, "the source stays valid until the move has ended"
    bench.end(0)
    assert bench.moving() == [(1, HOST)]
    assert bench.pages[0].valid == {SWAP}
    bench.end(1)
    assert asked.granted


def test_of_memory_in_one_piece_only_what_lies_in_the_place_that_is_cleared_is_written() -> None:
    bench = Bench(60, arena=SteppedSlab, reserve=0)
    large = bench.residency.add(PageKey(9, Kind.PARAM), 20, saved=True)
    bench.store[large.key] = 9
    bench.bring(0, 1, 2, 3, 4, 5, intent=WRITE)  # side by side
    bench.order(1, 5, 3, 4, 2, 0)  # those used last, 0, 2 and 4, do not lie side by side
    asked = Asked(bench, [large], READ, Lane.COMPUTE, HOST)
    written = {number for number, target in bench.moving() if target is SWAP}
    while not asked.granted:
        bench.end(bench.flying[0].page.key.unit)
        written |= {number for number, target in bench.moving() if target is SWAP}
    assert len(written) == 2, "one of them is written in vain for each that is not beside another that goes"
    assert bench.on(HOST) == {0, 1, 2, 3, 4, 5} - written


def bring_to_host(bench: Bench, *numbers: int, intent: Intent = READ) -> None:
    for asked in [bench.ask(number, intent=intent, lane=Lane.UPDATE) for number in numbers]:
        bench.settle()
        asked.give_back()


def claim_host(bench: Bench) -> Asked:
    """A demand for all of HOST that waits for a lease there: nothing comes down from the DEVICE by itself meanwhile."""
    whole = bench.residency.add(PageKey(8, Kind.STATE), bench.chain.capacity(HOST), saved=True)
    bench.store[whole.key] = 8
    waiting = Asked(bench, [whole], READ, Lane.UPDATE, HOST)
    assert not waiting.granted
    return waiting


def test_what_lies_between_two_holes_goes_although_it_is_on_its_way_up_when_nothing_else_would_help() -> None:
    bench = Bench(40, device=20, arena=SteppedSlab, reserve=0)
    bring_to_host(bench, 0, 1, 2, 3)
    places = bench.chain.arenas[HOST].places  # type: ignore[attr-defined]
    in_order = sorted(bench.pages[:4], key=lambda page: places[page.frames[HOST]])
    before, between, behind, last = in_order
    for page in (before, behind):
        bench.residency.drop(page, HOST)
    held, first = bench.ask(last.key.unit, lane=Lane.UPDATE), claim_host(bench)
    large = bench.residency.add(PageKey(9, Kind.PARAM), 20)
    written = Asked(bench, [large], FRESH, Lane.COMPUTE, DEVICE)
    wanted = bench.ask(between.key.unit)
    assert not wanted.granted
    written.frame().contents = 9
    written.give_back()  # it has to come down, and finds room to both sides of the one that is wanted
    assert bench.moving() == [(9, HOST)]
    for earlier in (held, first):
        earlier.give_back()
        bench.settle()
    assert wanted.granted
    assert wanted.frame().contents == between.key.unit
    assert bench.store[large.key] == 9


def test_what_is_on_its_way_up_stays_below_for_what_comes_down_for_its_sake() -> None:
    bench = Bench(20, device=10, reserve=0)
    bring_to_host(bench, 1, 2)
    bench.order(2)  # the one that is wanted is not foreseen: by its next use alone it would go first
    written = bench.ask(0, intent=FRESH)
    wanted = bench.ask(1)
    written.give_back()
    assert bench.moving() == [(0, HOST)]
    assert bench.on(HOST) == {1}
    bench.settle()
    assert wanted.granted


def test_what_stands_in_its_own_way_goes_and_comes_again_whatever_else_moves() -> None:
    bench = Bench(20, device=10, reserve=0)
    bring_to_host(bench, 1)
    bring_to_host(bench, 2, intent=WRITE)
    held, first = bench.ask(2, lane=Lane.UPDATE), claim_host(bench)
    bench.service.save(bench.pages[2])
    written = bench.ask(0, intent=FRESH)
    wanted = bench.ask(1)
    written.give_back()
    assert bench.moving() == [(2, SWAP), (0, HOST)]
    for earlier in (held, first):
        earlier.give_back()
        bench.settle()
    assert wanted.granted


def test_what_is_on_its_way_up_stays_between_two_holes_while_something_else_moves() -> None:
    bench = Bench(50, device=30, arena=SteppedSlab, reserve=0)
    bring_to_host(bench, 0, 1, 2, 3, 4)
    places = bench.chain.arenas[HOST].places  # type: ignore[attr-defined]
    before, between, behind, other, last = sorted(bench.pages[:5], key=lambda page: places[page.frames[HOST]])
    for page in (before, behind):
        bench.residency.drop(page, HOST)
    bench.ask(last.key.unit, lane=Lane.UPDATE)
    claim_host(bench)
    large = bench.residency.add(PageKey(9, Kind.PARAM), 20)
    written = Asked(bench, [large], FRESH, Lane.COMPUTE, DEVICE)
    bench.ask(other.key.unit)
    bench.ask(between.key.unit)
    written.give_back()
    assert bench.moving() == [(other.key.unit, DEVICE)]
    bench.end(other.key.unit)
    assert bench.moving() == [(9, HOST)]
    assert HOST in between.valid


def test_what_is_leaving_already_is_waited_for_and_nothing_else_goes() -> None:
    bench = Bench(20, reserve=0)
    bench.bring(1)
    bench.bring(2, intent=WRITE)
    bench.order(1)
    bench.service.save(bench.pages[2])
    bench.ask(3)
    assert bench.moving() == [(2, SWAP)]
    bench.end(2)
    assert bench.moving() == [(3, HOST)]
    assert bench.on(HOST) == {1}


def test_what_will_have_to_go_is_written_while_the_rest_is_still_on_its_way_up() -> None:
    bench = Bench(20, device=20, reserve=0)
    bring_to_host(bench, 1)
    bring_to_host(bench, 2, intent=WRITE)
    bench.ask(1)
    large = bench.residency.add(PageKey(9, Kind.STATE), 20, saved=True)
    bench.store[large.key] = 9
    wanted = Asked(bench, [large], READ, Lane.UPDATE, HOST)
    assert bench.moving() == [(1, DEVICE), (2, SWAP)]
    bench.settle()
    assert wanted.granted


def test_all_that_has_to_be_written_for_a_page_is_sent_off_at_once() -> None:
    bench = Bench(30, reserve=0)
    bench.bring(1, 2, 3, intent=WRITE)
    large = bench.residency.add(PageKey(9, Kind.STATE), 20, saved=True)
    bench.store[large.key] = 9
    Asked(bench, [large], READ, Lane.UPDATE, HOST)
    assert len(bench.moving()) == 2


def test_where_what_is_used_last_has_no_room_below_something_else_goes() -> None:
    bench = Bench(10, device=20, reserve=0)
    bench.bring(1)
    bench.ask(2, lane=Lane.UPDATE)
    bench.settle()
    written = bench.ask(0, intent=FRESH)
    written.give_back()
    bench.order(1)
    assert bench.ask(3, intent=FRESH).granted
    assert bench.on(DEVICE) == {0, 3}


@pytest.mark.parametrize("kept", [False, True])
def test_nothing_is_written_for_what_has_no_room_whatever_goes(kept: bool) -> None:
    bench = Bench(30, device=30, reserve=0, kept=frozenset({0} if kept else ()))
    bring_to_host(bench, 0)
    bring_to_host(bench, 1, intent=WRITE)
    held = None if kept else bench.ask(0, lane=Lane.UPDATE)
    large = bench.residency.add(PageKey(9, Kind.PARAM), 30)
    assert not bench.flying
    written = Asked(bench, [large], FRESH, Lane.COMPUTE, DEVICE)
    written.give_back()
    assert bench.moving() == []
    if held is not None:
        held.give_back()
        assert bench.moving() == [(1, SWAP)]


def test_a_leased_page_is_never_evicted() -> None:
    bench = Bench(20)
    held = bench.ask(0)
    bench.settle()
    bench.bring(1, 2, 3)
    assert bench.on(HOST) == {0, 3}
    held.give_back()
    bench.bring(4)
    assert bench.on(HOST) == {3, 4}


def test_what_is_being_written_back_may_be_read_but_not_written() -> None:
    bench = Bench(20)
    bench.bring(0, intent=WRITE)
    bench.residency.start_move(bench.pages[0], SWAP, Priority.WRITE_BACK)
    reader = bench.ask(0)
    assert reader.granted
    writer = bench.ask(0, intent=WRITE)
    assert not writer.granted
    assert bench.flying[0].promoted, "somebody waits for the write now"
    bench.end(0)
    assert not writer.granted, "still read"
    reader.give_back()
    assert writer.granted
    assert bench.pages[0].valid == {HOST}


def test_room_is_not_made_of_a_page_that_is_read_while_it_is_written_back() -> None:
    bench = Bench(10)
    bench.bring(0, intent=WRITE)
    demand = bench.ask(1)
    reader = bench.ask(0)
    assert reader.granted
    bench.end(0)
    assert not demand.granted
    assert bench.on(HOST) == {0}
    reader.give_back()
    bench.settle()
    assert demand.granted


def test_who_asks_on_the_loop_does_not_overtake_who_has_asked_before() -> None:
    """Both have asked since the last pump; the first has the only lease then."""
    bench, served = Bench(20), list[str]()
    bench.bring(0)
    for intent in (WRITE, READ):
        request = LeaseRequest(
            bench.pages[:1], intent, Lane.UPDATE, HOST, lambda _, intent=intent: served.append(intent)
        )
        bench.service.submit(request)
    bench.service.serve_at_once()
    bench.pump()
    assert served == [WRITE]


def test_an_exclusive_lease_waits_for_all_readers_and_readers_for_it() -> None:
    bench = Bench(20)
    bench.bring(0)
    readers = [bench.ask(0), bench.ask(0)]
    writer = bench.ask(0, intent=WRITE)
    for reader in readers:
        assert not writer.granted
        reader.give_back()
    assert writer.granted
    late = bench.ask(0)
    assert not late.granted
    writer.give_back()
    assert late.granted


def test_a_page_discarded_while_it_moves_is_forgotten_afterwards() -> None:
    bench = Bench(20)
    bench.ask(0)
    bench.residency.discard(bench.pages[0])
    fresh = bench.ask(0, intent=FRESH)
    assert bench.pages[0].doomed
    bench.end(0)
    assert not bench.pages[0].doomed
    assert fresh.granted
    assert bench.pages[0].valid == {HOST}


@pytest.mark.parametrize("drive", [False, True])
def test_contents_that_were_spoilt_are_forgotten_and_a_fault_of_the_drive_is_not(drive: bool) -> None:
    bench = Bench(20)
    page = bench.pages[0]
    if drive:
        bench.ask(0)
        bench.end(0, LOST)
    else:
        bench.bring(0, intent=WRITE)
        bench.residency.fail(page, LOST)
    assert bench.ask(0).error is LOST
    bench.residency.discard(page)
    fresh = bench.ask(0, intent=FRESH)
    assert fresh.error is (LOST if drive else None)
    assert fresh.granted is not drive
    assert page.valid == (set() if drive else {HOST})


def test_what_is_counted_as_discarded_had_contents() -> None:
    bench = Bench(20)
    bench.bring(0)
    for _ in range(2):
        bench.residency.discard(bench.pages[0])
    assert bench.counters.snapshot().total.discards == 1


def test_a_read_of_a_page_discarded_under_way_is_told_so() -> None:
    bench = Bench(20)
    reader = bench.ask(0)
    bench.residency.discard(bench.pages[0])
    bench.end(0)
    assert isinstance(reader.error, InvariantError)
    assert bench.chain.arenas[HOST].reserved == 0


def test_a_failed_read_is_raised_to_whoever_asked_and_others_go_on() -> None:
    bench = Bench(20)
    asked, other = bench.ask(0), bench.ask(1)
    bench.end(0, LOST)
    assert asked.error is LOST
    assert bench.pages[0].valid == {SWAP}
    bench.end(1)
    assert other.granted
    assert bench.ask(0).error is LOST, "and to whoever asks later"
    assert bench.chain.arenas[HOST].reserved == 10, "the frame of the failed read is free again"


def test_a_lease_on_several_pages_gives_all_back_when_one_fails() -> None:
    bench = Bench(20)
    asked = bench.ask(0, 1)
    bench.end(1)
    bench.end(0, LOST)
    assert asked.error is LOST
    assert not bench.pages[1].is_leased


def test_a_failed_write_back_keeps_the_bytes_and_fails_that_page_only() -> None:
    bench = Bench(20, reserve=0)
    bench.bring(0, 1, intent=WRITE)
    demand = bench.ask(2)
    bench.end(0, LOST)
    assert bench.pages[0].valid == {HOST}
    assert bench.pages[0].error is LOST
    bench.settle()
    assert demand.granted
    assert bench.on(HOST) == {0, 2}, "the bytes that could not be saved are not given up"
    demand.give_back()
    second = bench.ask(3, 4)
    bench.settle()
    while bench.service.resolve_standstill():
        bench.settle()
    assert second.error is LOST, "what kept the room from being made"


def test_a_refused_start_is_an_error_of_the_page() -> None:
    bench = Bench(20)
    bench.chain.edges[SWAP, HOST].refuse = LOST  # type: ignore[attr-defined]
    assert bench.ask(0).error is LOST
    assert bench.residency.moves == 0
    assert bench.chain.arenas[HOST].reserved == 0


def test_read_ahead_takes_the_place_of_the_only_one_that_may_go() -> None:
    bench = Bench(20, look_ahead=10, reserve=0)
    bench.bring(2)
    bench.ask(1)
    bench.settle()
    bench.order(0, 2)
    assert bench.moving() == [(0, HOST)]


def test_of_memory_in_one_piece_read_ahead_drops_only_what_lies_in_its_place() -> None:
    bench = Bench(60, arena=SteppedSlab, look_ahead=20, reserve=0)
    large = bench.residency.add(PageKey(9, Kind.PARAM), 20, saved=True)
    bench.store[large.key] = 9
    bench.bring(0, 1, 2, 3, 4, 5)  # side by side
    order = [large, *(bench.pages[number] for number in (1, 5, 3, 4, 2, 0))]  # 0, 2 and 4 do not lie side by side
    bench.forecast.set_schedule(schedule_of((Lane.COMPUTE, page.key) for page in order))
    bench.residency.reclassify()
    bench.pump()
    assert bench.moving() == [(9, HOST)]
    assert len(bench.on(HOST)) == 4


def test_what_is_announced_is_not_dropped_for_what_was_announced_with_it() -> None:
    bench = Bench(20, look_ahead=10, reserve=0)
    bench.bring(1, 2)
    bench.forecast.set_agenda([[page.key for page in bench.pages[:3]]])
    bench.order(3)
    assert bench.moving() == []
    assert bench.on(HOST) == {1, 2}


def test_read_ahead_leaves_the_reserve() -> None:
    bench = Bench(40, look_ahead=100, reserve=20)
    bench.order(0, 1, 2, 3, 4, 5)
    assert bench.moving() == [(0, HOST), (1, HOST)]
    bench.settle()
    assert bench.on(HOST) == {0, 1}


def test_read_ahead_stays_within_the_look_ahead_and_moves_with_the_cursor() -> None:
    bench = Bench(60, look_ahead=20)
    bench.order(0, 1, 2, 3, 4, 5)
    bench.settle()
    assert bench.on(HOST) == {0, 1}
    bench.bring(0)
    assert bench.on(HOST) == {0, 1, 2}
    assert bench.counters.snapshot().total.cache_misses == 0


def test_read_ahead_takes_no_room_while_a_demand_lacks_it() -> None:
    bench = Bench(20, look_ahead=20, reserve=0)
    held = bench.ask(5)
    bench.settle()
    demand = bench.ask(3, 4)
    bench.order(0, 1, 2, 3, 4, 5)
    bench.settle()
    assert bench.on(HOST).isdisjoint({0, 1, 2})
    held.give_back()
    bench.settle()
    assert demand.granted


def test_a_demand_promotes_what_was_fetched_ahead() -> None:
    bench = Bench(40, look_ahead=20)
    bench.order(0, 1, 2)
    ahead = next(transfer for transfer in bench.flying if transfer.page is bench.pages[1])
    assert ahead.priority is Priority.READ_AHEAD
    asked = bench.ask(1)
    assert ahead.promoted
    bench.settle()
    assert asked.granted
    assert bench.counters.snapshot().total.cache_misses == 1


def test_a_tier_that_holds_everything_writes_nothing_early() -> None:
    bench = Bench(60, look_ahead=60)
    bench.order(0, 1, 2, 3, 4, 5)
    bench.settle()
    bench.bring(0, 1, 2, 3, 4, 5, intent=WRITE)
    assert bench.counters.snapshot().total.bytes_written == 0


def test_what_ranks_exchange_is_not_among_what_has_to_leave_host() -> None:
    bench = Bench(30, device=40, count=3, look_ahead=30)
    exchanged = bench.residency.add(PageKey(0, Kind.TRANSIT), 10)
    for number in range(3):
        update = bench.ask(number, intent=WRITE, lane=Lane.UPDATE)
        bench.settle()
        update.give_back()
    assert bench.on(HOST) == {0, 1, 2}
    assert not bench.flying, "all that is ever in HOST fits there"
    assert bench.residency.remove(exchanged)
    assert bench.residency.total == 30


def test_what_ranks_exchange_stays_on_the_device_until_its_place_is_wanted() -> None:
    """Buckets that wait for the end of a step went to HOST at once, and from there to SWAP."""
    bench = Bench(20, device=20, count=1)
    bench.forecast.set_schedule(schedule_of((Lane.COMPUTE, PageKey(number, Kind.TRANSIT)) for number in (1, 2, 1, 2)))
    for number in (1, 2):
        bucket = bench.residency.add(PageKey(number, Kind.TRANSIT), 10)
        Asked(bench, [bucket], FRESH, Lane.COMPUTE, DEVICE).give_back()
    assert not bench.flying
    wanted = bench.ask(0)
    bench.settle()
    assert wanted.granted


def test_dirty_pages_leave_before_their_room_is_asked_for() -> None:
    bench = Bench(30, look_ahead=20)
    bench.order(0, 1, 2, 3, 4, 5)
    bench.settle()
    first = bench.ask(0, intent=WRITE)
    first.give_back()
    assert (0, SWAP) in bench.moving()


def test_a_capacity_error_names_tier_bytes_budget_mark_and_holders() -> None:
    bench = Bench(30)
    held = bench.ask(0, 1, intent=WRITE)
    bench.settle()
    demand = bench.ask(2, 3)
    bench.settle()
    assert not demand.granted
    assert not demand.refused, "waiting, as long as a lease may be given back"
    assert bench.service.resolve_standstill()
    assert isinstance(demand.error, CapacityError)
    for part in ("HOST has no room for 20 bytes", "budget 30", "high-water mark 30", "unit 0 param tile 0: 10"):
        assert part in str(demand.error)
    held.give_back()
    assert bench.residency.census.held(HOST) == 0


@pytest.mark.parametrize("between", [True, False])
def test_a_capacity_error_says_whether_there_is_room_in_bytes_but_not_in_one_piece(between: bool) -> None:
    bench = Bench(30, arena=SteppedSlab, reserve=0)
    large = bench.residency.add(PageKey(9, Kind.PARAM), 20, saved=True)
    bench.bring(0, 1, 2)  # side by side
    bench.ask(*([1] if between else [0, 2]))
    demand = Asked(bench, [large], READ, Lane.COMPUTE, HOST)
    bench.settle()
    assert bench.service.resolve_standstill()
    assert "HOST has no room for 20 bytes" in str(demand.error)
    assert ("There is room in bytes, but not in one piece" in str(demand.error)) == between


def test_a_capacity_error_does_not_take_addresses_that_are_denied_for_a_budget_that_is_too_small() -> None:
    class Scattered(SteppedArena):
        """The system denies addresses for another piece of 20 bytes, as `ulimit -v` has it do."""

        def allocate(self, nbytes: int) -> Any:
            return None if nbytes == 20 else super().allocate(nbytes)

    bench = Bench(30, arena=Scattered, reserve=0)
    large = bench.residency.add(PageKey(9, Kind.PARAM), 20, saved=True)
    demand = Asked(bench, [large], READ, Lane.COMPUTE, HOST)
    bench.settle()
    assert bench.service.resolve_standstill()
    assert isinstance(demand.error, CapacityError)
    assert "HOST has no room for 20 bytes" in str(demand.error)
    assert str(demand.error).endswith("denied addresses: raise `ulimit -v`, or lower the budget")


def test_a_page_that_never_fits_is_refused_when_it_is_made_known() -> None:
    bench = Bench(30, device=20)
    with pytest.raises(CapacityError, match="25 bytes on DEVICE"):
        bench.residency.add(PageKey(9, Kind.PARAM), 25)
    with pytest.raises(InvariantError):
        bench.residency.add(PageKey(0, Kind.PARAM), 10)
    with pytest.raises(InvariantError):
        bench.residency.add(PageKey(9, Kind.PARAM), 0)


def test_at_a_standstill_a_later_demand_may_pass_an_earlier_one() -> None:
    bench = Bench(30)
    held = bench.ask(0, 1)
    bench.settle()
    large = bench.ask(2, 3)
    bench.settle()
    small = bench.ask(4)
    assert not small.granted, "in order, as long as something may still happen"
    assert bench.service.resolve_standstill()
    bench.settle()
    assert small.granted
    assert not large.refused
    small.give_back()
    held.give_back()
    bench.settle()
    assert large.granted


def test_who_waits_for_a_lease_is_not_the_one_who_is_refused_for_want_of_room() -> None:
    bench = Bench(30)
    bench.ask(0, 1)
    bench.settle()
    barred, lacking = bench.ask(0, 2, 3, intent=WRITE), bench.ask(4, 5)
    bench.settle()
    assert bench.service.resolve_standstill()
    assert isinstance(lacking.error, CapacityError)
    assert not barred.refused


def test_at_a_standstill_what_is_written_anew_on_the_device_needs_no_room_below() -> None:
    bench = Bench(20, device=20, reserve=0)
    below = bench.ask(0, 1, lane=Lane.UPDATE)
    bench.settle()
    assert below.granted
    assert bench.ask(5, intent=FRESH).granted
    large, small = bench.ask(2, 3, intent=FRESH), bench.ask(4, intent=FRESH)
    assert not small.granted, "in order, as long as something may still happen"
    assert bench.service.resolve_standstill()
    assert small.granted
    assert not large.refused


def test_what_has_no_room_above_is_not_brought_below() -> None:
    bench = Bench(40, device=20, reserve=0)
    large = bench.residency.add(PageKey(9, Kind.PARAM), 20)
    assert bench.ask(5, intent=FRESH).granted
    earlier, later = Asked(bench, [large], FRESH, Lane.COMPUTE, DEVICE), bench.ask(4)
    assert not earlier.granted
    assert not later.granted
    assert bench.moving() == []


def test_two_demands_that_hold_half_of_what_both_need_are_untangled() -> None:
    bench = Bench(40)
    bench.bring(0, 1)
    blockers = [bench.ask(0), bench.ask(1)]
    one = bench.ask(2, 1, intent=WRITE)
    two = bench.ask(3, 0, intent=WRITE)
    bench.settle()
    third = bench.ask(3, 2, intent=WRITE)
    for blocker in blockers:
        blocker.give_back()
    assert one.granted
    assert two.granted
    one.give_back()
    two.give_back()
    assert third.granted


def test_leases_in_a_circle_are_untangled() -> None:
    bench = Bench(60)
    bench.bring(0, 1, 2)
    reader_of_1 = bench.ask(1)
    one = bench.ask(0, 1, intent=WRITE)  # holds 0, waits for the reader of 1
    two = bench.ask(1, 0, intent=READ)  # holds 1 as well, waits for 0
    reader_of_1.give_back()
    assert not one.granted
    assert not two.granted
    assert bench.service.resolve_standstill()
    bench.pump()
    assert one.granted
    one.give_back()
    assert two.granted


def test_a_refused_fresh_lease_costs_no_contents() -> None:
    bench = Bench(20)
    held = bench.ask(0)
    bench.settle()
    fresh = bench.ask(1, 2, intent=FRESH)
    assert bench.pages[1].is_leased
    assert bench.service.resolve_standstill()
    assert isinstance(fresh.error, CapacityError)
    assert bench.pages[1].valid == {SWAP}
    held.give_back()
    reader = bench.ask(1)
    bench.settle()
    assert reader.frame().contents == 1


def test_without_anybody_waiting_there_is_no_capacity_error() -> None:
    bench = Bench(20)

    class Later:
        awaited = False

    held = bench.ask(0)
    bench.settle()
    early = bench.ask(1, 2)
    early.request.waiter = Later()
    assert not bench.service.resolve_standstill()
    assert not early.refused
    held.give_back()
    bench.settle()
    assert early.granted


@pytest.mark.parametrize(("first", "then"), [(READ, WRITE), (WRITE, READ)])
def test_to_wait_for_a_lease_is_no_lack_of_room(first: Intent, then: Intent) -> None:
    bench = Bench(20)
    bench.bring(0, 1)
    holder = bench.ask(0, intent=first)
    waiting = bench.ask(0, 1, intent=then)
    assert not bench.service.resolve_standstill()
    assert not waiting.refused
    holder.give_back()
    assert waiting.granted


def test_what_is_dirty_is_saved_leased_for_reading_or_not() -> None:
    bench = Bench(40)
    bench.bring(0, 1, intent=WRITE)
    reader = bench.ask(1)
    writer = bench.ask(2, intent=FRESH)
    save_all(bench)
    assert sorted(bench.moving()) == [(0, SWAP), (1, SWAP)]
    bench.settle()
    assert bench.pages[2].valid == {HOST}, "the page that is being written to"
    writer.give_back()
    save_all(bench)
    bench.settle()
    assert [bench.pages[number].valid for number in range(3)] == [{HOST, SWAP}] * 3
    reader.give_back()
    assert bench.on(HOST) == {0, 1, 2}, "saving evicts nothing"


def save_all(bench: Bench) -> None:
    for page in bench.pages:
        bench.service.save(page)


def test_a_page_goes_up_both_edges_and_comes_down_dirty() -> None:
    bench = Bench(20, device=10)
    asked = bench.ask(0, intent=WRITE)
    assert bench.moving() == [(0, HOST)]
    bench.end(0)
    assert bench.moving() == [(0, DEVICE)]
    bench.end(0)
    assert asked.granted
    assert bench.pages[0].valid == {DEVICE}
    assert bench.chain.arenas[HOST].reserved == 0, "the outdated copy below is given up at once"
    asked.frame().contents = 77
    asked.give_back()
    other = bench.ask(1)
    bench.settle()
    assert other.granted
    assert DEVICE not in bench.pages[0].valid
    other.give_back()
    again = bench.ask(0)
    bench.settle()
    assert again.frame().contents == 77


def test_the_update_gets_in_host_what_is_dirty_on_the_device() -> None:
    bench = Bench(20, device=20)
    bench.bring(0, intent=WRITE)
    update = bench.ask(0, intent=WRITE, lane=Lane.UPDATE)
    assert bench.moving() == [(0, HOST)]
    bench.end(0)
    assert update.granted
    assert bench.pages[0].valid == {HOST}
    assert bench.chain.arenas[DEVICE].reserved == 0


def test_a_page_in_use_on_the_device_does_not_keep_its_clean_copy_in_host() -> None:
    bench = Bench(10, device=30)
    held = bench.ask(0)
    bench.settle()
    assert held.granted
    second = bench.ask(1)
    bench.settle()
    assert second.granted
    assert bench.on(DEVICE) == {0, 1}


def test_two_that_must_pass_each_other_in_host_do_not_change_places_for_ever() -> None:
    bench = Bench(10, device=10)
    bench.bring(0, intent=WRITE)
    asked = bench.ask(1)
    for _ in range(20):
        bench.settle()
    assert asked.granted
    assert bench.pages[0].valid == {SWAP}


def test_what_has_to_leave_the_device_leaves_before_anything_comes_that_it_would_meet_in_host() -> None:
    bench = Bench(10, device=10, reserve=0, settled=frozenset({0}))
    bench.bring(0, intent=WRITE)
    assert bench.pages[0].valid == {DEVICE}, "its update works there"
    asked = bench.ask(1)
    moved = []
    while bench.flying:
        moved += bench.moving()
        bench.end(bench.flying[0].page.key.unit)
    assert asked.granted
    assert moved == [(0, HOST), (0, SWAP), (1, HOST), (1, DEVICE)], "nothing is read twice"


def test_read_ahead_goes_up_both_edges() -> None:
    bench = Bench(40, device=30, look_ahead=20)
    bench.order(0, 1, 2, 3)
    bench.settle()
    bench.settle()
    assert {0, 1} <= bench.on(DEVICE)
    asked = bench.ask(0)
    assert asked.granted


def at_home(bench: Bench, *numbers: int) -> None:
    """By the plan these stay on the DEVICE; their updates have been done, and they have gone up."""
    for number in numbers:
        update = bench.ask(number, intent=WRITE, lane=Lane.UPDATE)
        bench.settle()
        update.frame().contents = 100 + number
        update.give_back()
        bench.pages[number].home = DEVICE
    bench.residency.reclassify()
    bench.bring(*numbers)


def test_what_is_at_home_on_the_device_leaves_host_without_being_written() -> None:
    bench = Bench(20, device=40)
    at_home(bench, 0)
    assert bench.pages[0].valid == {HOST, DEVICE}
    others = bench.ask(1, 2, lane=Lane.UPDATE)
    assert bench.moving() == [(1, HOST), (2, HOST)]
    bench.settle()
    others.give_back()
    assert bench.pages[0].valid == {DEVICE}
    assert bench.moving() == [], "nor is it sent down ahead of time"
    update = bench.ask(0, intent=WRITE, lane=Lane.UPDATE)
    bench.settle()
    assert update.frame().contents == 100
    assert bench.pages[0].valid == {HOST}


def test_without_a_home_it_is_written_before_it_leaves() -> None:
    bench = Bench(20, device=40)
    at_home(bench, 0)
    bench.pages[0].home = None
    bench.residency.reclassify()
    bench.ask(1, 2, lane=Lane.UPDATE)
    assert (0, SWAP) in bench.moving()


def test_what_is_at_home_on_the_device_is_saved_when_somebody_wants_that() -> None:
    bench = Bench(30, device=40, reserve=0)
    at_home(bench, 0, 1, 2)
    other = bench.ask(3, lane=Lane.UPDATE)
    bench.settle()
    assert sorted(len(page.valid) for page in bench.pages[:3]) == [1, 2, 2]
    assert not any(SWAP in page.valid for page in bench.pages[:3])
    for _ in range(4):  # down to HOST, which has room for two of them at a time, and from there
        save_all(bench)
        bench.settle()
    assert all(SWAP in page.valid for page in bench.pages[:3])
    assert [bench.store[page.key] for page in bench.pages[:3]] == [100, 101, 102]
    other.give_back()


def test_what_is_at_home_on_the_device_comes_down_for_want_of_room_there() -> None:
    bench = Bench(10, device=20, reserve=0)
    at_home(bench, 0)
    update = bench.ask(1, lane=Lane.UPDATE)
    bench.settle()
    update.give_back()
    assert bench.pages[0].valid == {DEVICE}
    asked = bench.ask(2, 3)
    bench.settle()
    assert asked.granted
    assert DEVICE not in bench.pages[0].valid
    asked.give_back()
    again = bench.ask(0)
    bench.settle()
    assert again.frame().contents == 100


def at_home_there(bench: Bench) -> set[int]:
    return {page.key.unit for page in bench.pages if page.home is DEVICE}


def test_what_had_to_leave_the_device_is_at_home_there_again_in_the_next_step() -> None:
    bench = Bench(30, device=40, kept=frozenset({5}), settled=frozenset({4}))
    homes = bench.service.homes
    homes.follow(at_home=True)
    assert at_home_there(bench) == {0, 1, 2, 3}, "but for what is kept below, or settled"
    homes.displace(bench.pages[1])
    assert at_home_there(bench) == {0, 2, 3}
    homes.begin_step()
    assert at_home_there(bench) == {0, 1, 2, 3}
    homes.displace(bench.pages[1])
    homes.follow(at_home=False)
    assert not at_home_there(bench)
    homes.begin_step()
    assert not at_home_there(bench)


def test_behind_a_step_with_protected_updates_nothing_is_at_home_on_the_device() -> None:
    """They write down what the device has in any case."""
    bench = Bench(30, device=40)
    homes = bench.service.homes
    homes.follow(at_home=True)
    protection_of(bench)
    homes.begin_step()
    assert not at_home_there(bench)
    homes.begin_step()
    assert at_home_there(bench) == set(range(6)), "nothing was protected in that one"
    protection_of(bench)
    homes.follow(at_home=True)
    assert not at_home_there(bench), "another plan changes nothing about that"


def test_what_is_at_home_on_the_device_makes_no_room_for_what_is_fetched_ahead() -> None:
    bench = Bench(20, device=20, reserve=0)
    at_home(bench, 0, 1)
    update = bench.ask(2, 3, lane=Lane.UPDATE)
    bench.settle()
    update.give_back()
    bench.service.ahead._appetite = dict.fromkeys(bench.chain.arenas, Appetite(20, 0))
    assert [bench.pages[number].valid for number in (0, 1)] == [{DEVICE}, {DEVICE}]
    bench.order(2, 3, 0, 1)
    assert bench.on(DEVICE) == {0, 1}
    assert bench.moving() == []
    asked = bench.ask(2)
    bench.settle()
    assert asked.granted


@pytest.mark.parametrize("used_up", [True, False])
def test_a_gradient_is_fetched_ahead_only_to_be_added_to(used_up: bool) -> None:
    """Until its update is done it has contents; what is written anew behind that must not be moved for it."""
    bench, gradient = Bench(40, device=30, look_ahead=20), PageKey(0, Kind.GRAD)
    bench.pages[0] = bench.residency.add(gradient, 10, saved=True)
    bench.store[gradient] = 0
    update, written = (Lane.UPDATE, gradient), (Lane.COMPUTE, gradient)
    other = (Lane.COMPUTE, bench.pages[1].key)
    bench.service.ahead.follow(
        schedule_of([other, update, written] if used_up else [other, written, written, update]), None
    )
    bench.forecast.note(*other)
    if not used_up:
        bench.forecast.note(*written)
    bench.pump()
    bench.settle()
    assert (0 in bench.on(DEVICE)) == (not used_up)
    bench.service.ahead.follow(schedule_of([written]), None)
    bench.pump()
    bench.settle()
    assert 0 in bench.on(DEVICE), "it goes by the schedule of now"


@given(st.lists(st.tuples(st.sampled_from(Lane), st.integers(0, 2), st.sampled_from((Kind.GRAD, Kind.STATE)))))
def test_renewed_is_what_the_update_has_used_since_the_computation_did(
    accesses: list[tuple[Lane, int, Kind]],
) -> None:
    schedule = schedule_of((lane, PageKey(unit, kind)) for lane, unit, kind in accesses)
    expected = set()
    for position, (lane, unit, kind) in enumerate(accesses):
        before = [*accesses[position:], *accesses[:position]][::-1]  # what came before it, the latest first
        users = [whose for whose, *page in before if page == [unit, kind]]
        if lane is Lane.COMPUTE and kind is Kind.GRAD and users[0] is Lane.UPDATE:
            expected.add(position)
    assert renewed_gradients(schedule) == expected


def test_what_the_computation_has_written_leaves_the_device_by_itself() -> None:
    bench = Bench(20, device=30)
    held = bench.ask(0, intent=FRESH)
    assert held.granted
    assert not bench.flying
    held.give_back()
    assert bench.moving() == [(0, HOST)]
    bench.end(0)
    assert bench.pages[0].valid == {DEVICE, HOST}, "its frame may be had by anybody now"
    bench.bring(1, 2, 3)
    assert bench.on(DEVICE) == {1, 2, 3}


def test_it_does_not_take_the_room_that_a_demand_lacks_in_host() -> None:
    bench = Bench(10, device=30)
    update = bench.ask(1, lane=Lane.UPDATE)
    bench.settle()
    waiting = bench.ask(2)
    assert waiting.request.short == (HOST, 10)
    written = bench.ask(0, intent=FRESH)
    written.give_back()
    assert not bench.flying
    update.give_back()
    bench.settle()
    assert waiting.granted
    assert bench.on(HOST) == {0}, "and then it goes"


def test_what_is_sent_down_may_have_a_page_written_that_was_about_to_be_dropped() -> None:
    """Page 0 could go from the device; then page 1 is sent down for want of more, and page 0 makes room for it."""
    bench = Bench(20, device=30, reserve=0)
    bench.pages.append(bench.residency.add(PageKey(6, Kind.PARAM), 20))
    bench.bring(2)
    bench.ask(0, intent=FRESH, lane=Lane.UPDATE).give_back()
    bench.bring(0)
    update = bench.ask(3, intent=FRESH, lane=Lane.UPDATE)
    written = bench.ask(1, intent=FRESH)
    bench.bring(2)
    assert [bench.pages[number].valid for number in (0, 1, 2)] == [{HOST, DEVICE}, {DEVICE}, {SWAP, DEVICE}]
    bench.service.release(written.request.pages, DEVICE)
    large = bench.ask(6, intent=FRESH)  # what was used longest ago goes first: 0, then 1, then 2
    assert bench.moving() == [(0, SWAP)]
    assert not large.granted
    bench.settle()
    assert large.granted
    assert bench.pages[0].valid == {SWAP}
    update.give_back()


def test_the_update_takes_the_devices_copy_and_reads_nothing_from_disk() -> None:
    bench = Bench(10, device=30)
    bench.bring(0, 1)  # host has room for one: page 0 is left on the device and in swap
    assert bench.pages[0].valid == {SWAP, DEVICE}
    update = bench.ask(0, intent=WRITE, lane=Lane.UPDATE)
    transfer = bench.end(0)
    assert (transfer.source, transfer.target) == (DEVICE, HOST)
    assert update.granted
    assert bench.pages[0].valid == {HOST}


def test_a_page_that_only_the_update_wants_is_not_kept_on_the_device() -> None:
    bench = Bench(60, device=20)
    bench.bring(0, 1)
    accesses = [(Lane.UPDATE, 0), (Lane.COMPUTE, 1), (Lane.COMPUTE, 2), (Lane.COMPUTE, 0)]
    bench.forecast.set_schedule(schedule_of((lane, bench.pages[number].key) for lane, number in accesses))
    bench.residency.reclassify()
    bench.bring(2)
    assert bench.on(DEVICE) == {1, 2}


def test_what_the_holder_asked_of_the_device_stays_with_the_frame() -> None:
    class Fence:
        def passed(self) -> bool:
            return False

        def hold(self) -> None:
            return None

    bench = Bench(20, device=20)
    asked = bench.ask(0)
    bench.settle()
    fence = Fence()
    frame = asked.frame()
    bench.service.release(asked.request.pages, DEVICE, fence)
    assert frame.fences == (fence,)


KEPT = frozenset({0, 1})


def test_what_is_kept_by_choice_is_not_evicted_clean_or_dirty():
    bench = Bench(40, kept=KEPT)
    bench.bring(0)
    bench.bring(1, intent=WRITE)
    bench.bring(2, 3, 4, 5, 2, 3)
    assert [bench.pages[number].valid for number in KEPT] == [{HOST, SWAP}, {HOST}]
    assert bench.residency.census.fixed(HOST) == 20
    bench.bring(1)
    assert bench.moving() == []


def test_no_room_is_said_to_be_kept_by_choice():
    bench = Bench(40, kept=KEPT)
    bench.bring(0, 1)
    asked = bench.ask(2, 3, 4)
    bench.pump()
    bench.service.resolve_standstill()
    with pytest.raises(CapacityError, match="20 bytes kept there by choice \\(keep fewer\\)"):
        raise asked.error


def test_what_is_kept_is_saved_and_stays():
    bench = Bench(40, kept=KEPT)
    bench.bring(1, intent=WRITE)
    save_all(bench)
    assert bench.moving() == [(1, SWAP)]
    assert bench.residency.census.leaving(HOST) == 0, "its room is not about to be free"
    bench.settle()
    assert bench.pages[1].valid == {HOST, SWAP}
    bench.bring(2, 3, 4, 5)
    assert bench.pages[1].valid == {HOST, SWAP}


def test_on_a_device_what_is_kept_comes_and_goes():
    bench = Bench(40, 20, kept=KEPT)
    bench.bring(0, 1)
    assert all(bench.pages[number].valid == {HOST, DEVICE, SWAP} for number in KEPT)
    bench.bring(2, 3)
    assert all(bench.pages[number].valid == {HOST, SWAP} for number in KEPT)


def test_read_ahead_goes_on_beside_what_is_kept():
    """Forty bytes, twenty of them kept: of those coming one is fetched beside the reserve, not more."""
    bench = Bench(40, look_ahead=100, reserve=10, kept=KEPT)
    bench.bring(0, 1)
    bench.forecast.set_schedule(schedule_of([(Lane.COMPUTE, bench.pages[number].key) for number in (2, 0, 3, 1, 4)]))
    bench.pump()
    assert bench.moving() == [(2, HOST)]


LEAVES_HOST: dict[str, tuple[str, set[int], list[bool] | None, list[tuple[str, int]], set[int]]] = {
    "a settled page's is wanted by nobody": ("settled", {1}, None, [("u", 1), ("u", 2), ("u", 0)], {1, 2}),
    "that of a page at home above comes down for its update": (
        "home",
        {1},
        None,
        [("u", 1), ("u", 2), ("u", 0)],
        {1, 2},
    ),
    "the computation has its own": ("", {1}, None, [("u", 1), ("u", 2), ("c", 0), ("u", 3)], {1, 2}),
    "an update wants it here": ("", {1}, None, [("u", 1), ("u", 2), ("u", 0), ("c", 0)], {0, 2}),
    "the plan has it come from here": ("", {1}, [True] * 3, [("u", 1), ("u", 2), ("c", 0)], {0, 2}),
    "the plan has it stay above": ("", {1}, [True, True, False], [("u", 1), ("u", 2), ("c", 0)], {1, 2}),
}


@pytest.mark.parametrize(("sort", "used", "reaches", "accesses", "left"), LEAVES_HOST.values(), ids=LEAVES_HOST)
def test_which_copy_leaves_host_where_the_device_has_another(
    sort: str, used: set[int], reaches: list[bool] | None, accesses: list[tuple[str, int]], left: set[int]
) -> None:
    """Page 0 is on both, 1 in HOST only, 2 wants room there."""
    lanes = {"u": Lane.UPDATE, "c": Lane.COMPUTE}
    bench = Bench(20, device=20, reserve=0, settled=frozenset({0} if sort == "settled" else ()))
    bench.bring(0)
    bench.pages[0].home = DEVICE if sort == "home" else None
    schedule = schedule_of((lanes[lane], bench.pages[number].key) for lane, number in accesses)
    bench.forecast.set_schedule(schedule, None if reaches is None else [True] * len(accesses), reaches)
    bench.residency.reclassify()
    for number in (*used, 2):
        update = bench.ask(number, lane=Lane.UPDATE)
        bench.settle()
        update.give_back()
    assert bench.on(HOST) == left


@pytest.mark.parametrize(
    ("sort", "left"),
    [("", {0, 2}), ("copied", {1, 2}), ("copied, not kept", {1, 2}), ("unplanned", {1, 2}), ("settled", {0, 2})],
)
def test_which_page_leaves_the_device(sort: str, left: set[int]) -> None:
    """Page 1 is used there sooner than page 0, which its update, sooner still, takes from there unless HOST has it.

    What the plan keeps it keeps in HOST.
    """
    bench = Bench(20, device=20, reserve=0, settled=frozenset({0} if sort == "settled" else ()))
    compute, update = Lane.COMPUTE, Lane.UPDATE
    accesses = [(compute, 0), (compute, 1), (compute, 2), (update, 0), (compute, 1), (compute, 3)]
    schedule = schedule_of((lane, bench.pages[number].key) for lane, number in accesses)
    stays = [sort != "copied, not kept" or position != 4 for position in range(len(accesses))]
    bench.forecast.set_schedule(schedule, None if sort == "unplanned" else stays)
    bench.residency.reclassify()
    bench.bring(0, 1)
    if not sort.startswith("copied"):
        bench.residency.drop(bench.pages[0], HOST)
    bench.bring(2)
    assert bench.on(DEVICE) == left


@pytest.mark.parametrize("what", ["a lease is given back", "somebody asks"])
def test_out_of_order_only_until_things_have_changed(what: str) -> None:
    bench = Bench(30)
    held = bench.ask(0, 1)
    bench.settle()
    first, second = bench.ask(2, 3), bench.ask(4)
    bench.settle()
    assert bench.service.resolve_standstill()
    assert bench.moving() == [(4, HOST)], "the second alone"
    if what == "somebody asks":
        assert bench.ask(0).granted, "at once: it is there"
    else:
        held.give_back()
        assert (3, HOST) in bench.moving()
        bench.settle()
        second.give_back()
        bench.settle()
        assert first.granted


def test_what_is_not_yet_enough_for_a_demand_is_left_free() -> None:
    bench = Bench(30, look_ahead=20, reserve=0)
    large = bench.residency.add(PageKey(6, Kind.PARAM), 20, saved=True)
    bench.pages.append(large)
    bench.store[large.key] = 6
    held = bench.ask(0, 1)
    bench.settle()
    demand = bench.ask(6)
    later = bench.ask(3)
    bench.order(2, 6)
    assert not bench.flying, "neither for a guess nor for who came later"
    held.give_back()
    assert (6, HOST) in bench.moving()
    bench.settle()
    assert demand.granted
    assert later.granted


def test_who_has_lacked_room_and_has_it_now_is_in_nobodys_way() -> None:
    bench = Bench(40)
    held = bench.ask(0, 1, 5)
    bench.settle()
    first = bench.ask(2, 3)
    bench.settle()
    assert first.request.short == (HOST, 10)
    held.give_back()
    assert bench.moving() == [(3, HOST)]
    bench.ask(4)
    assert bench.moving() == [(3, HOST), (4, HOST)]


def test_a_page_that_is_to_be_discarded_is_read_by_nobody_more() -> None:
    bench = Bench(30)
    held = bench.ask(0)
    bench.settle()
    bench.residency.discard(bench.pages[0])
    later = bench.ask(0)
    assert not later.granted
    held.give_back()
    assert later.refused
    assert isinstance(later.error, InvariantError)


def test_a_demand_goes_before_what_the_drive_does_ahead_of_time() -> None:
    bench = Bench(30)
    bench.ask(0)
    assert bench.flying[0].priority is Priority.DEMAND


def test_of_what_has_to_leave_no_more_is_written_early_than_is_wanted() -> None:
    bench = Bench(30, look_ahead=10, reserve=0)
    held = bench.ask(0, 1, 2, intent=WRITE)
    bench.settle()
    held.give_back()
    assert bench.moving() == [(0, SWAP)]


def test_no_more_is_written_early_than_what_is_not_there_could_want() -> None:
    bench = Bench(30, count=4, look_ahead=30, reserve=0)
    held = bench.ask(0, 1, 2, intent=WRITE)
    bench.settle()
    held.give_back()
    assert bench.moving() == [(0, SWAP)]


def test_what_was_used_last_is_not_written_early_as_long_as_nobody_knows_what_comes() -> None:
    """Each gradient of a tile leases it anew."""
    bench = Bench(20, look_ahead=20)
    for _ in range(3):
        bench.ask(0, intent=FRESH).give_back()
        assert bench.moving() == []
    bench.ask(1, intent=FRESH).give_back()
    assert bench.moving() == [(0, SWAP)]


@pytest.mark.parametrize(("look_ahead", "fetched"), [(40, {0, 1}), (10, {0})])
def test_an_evaluation_reads_half_as_far_ahead_but_a_page_at_least(look_ahead: int, fetched: set[int]) -> None:
    bench = Bench(60, look_ahead=look_ahead)
    bench.service.ahead.evaluate(schedule_of((Lane.COMPUTE, page.key) for page in bench.pages))
    bench.pump()
    assert {number for number, _ in bench.moving()} == fetched


@pytest.mark.parametrize(
    ("order", "planned", "written"),
    [((0, 1, 2, 3, 4, 5), False, True), ((0, 1, 0, 2, 3, 4, 5), False, False), ((0, 1, 2, 3, 4, 5), True, False)],
    ids=["used last of all", "used before what is fetched ahead", "kept by the plan"],
)
def test_what_is_written_early_is_what_goes(order: tuple[int, ...], planned: bool, written: bool) -> None:
    bench = Bench(30, look_ahead=20)
    schedule = schedule_of((Lane.COMPUTE, bench.pages[number].key) for number in order)
    bench.forecast.set_schedule(schedule, [True] * len(order) if planned else None)
    bench.residency.reclassify()
    bench.pump()
    bench.settle()
    bench.ask(0, intent=WRITE).give_back()
    assert ((0, SWAP) in bench.moving()) == written


@pytest.mark.parametrize("planned", [True, False])
def test_what_is_written_while_the_step_rests_is_written_down_when_it_begins(planned: bool) -> None:
    bench = Bench(30, look_ahead=20)
    schedule = schedule_of((Lane.COMPUTE, page.key) for page in bench.pages)
    bench.forecast.set_schedule(schedule, [False] * 6 if planned else None)
    ahead = bench.service.ahead
    ahead.evaluate(Step.RESTS)
    for _ in range(3):
        bench.ask(5, intent=FRESH).give_back()
        assert (5, SWAP) not in bench.moving()
    ahead.evaluate(Step.BEGINS)
    bench.pump()
    assert (5, SWAP) in bench.moving()


def test_what_is_written_while_the_step_rests_leaves_for_whoever_wants_its_room() -> None:
    bench = Bench(20)
    bench.service.ahead.evaluate(Step.RESTS)
    bench.ask(0, 1, intent=FRESH).give_back()
    assert bench.moving() == []
    held = bench.ask(2)
    bench.settle()
    assert held.granted


def test_beside_what_the_plan_does_not_keep_nothing_is_written() -> None:
    bench = Bench(30, look_ahead=10)
    schedule = schedule_of((Lane.COMPUTE, page.key) for page in bench.pages)
    bench.forecast.set_schedule(schedule, [False, True, True, True, True, True])
    bench.residency.reclassify()
    held = bench.ask(0, 1, intent=WRITE)
    bench.settle()
    held.give_back()
    assert [number for number, tier in bench.moving() if tier is SWAP] == [0]


def test_what_is_settled_on_the_device_is_not_sent_down_with_the_rest() -> None:
    bench = Bench(20, device=30, settled=frozenset({0}))
    bench.ask(0, 1, intent=FRESH).give_back()
    assert bench.moving() == [(1, HOST)]
    bench.settle()
    assert bench.pages[0].valid == {DEVICE}


def test_behind_a_step_that_was_cut_short_the_order_of_who_goes_is_made_anew() -> None:
    bench = Bench(20)
    bench.order(0, 1, 2, 1)
    bench.bring(0, 1)
    with closing(bench.residency.census.victims(HOST)) as victims:
        assert next(victims)[1] is bench.pages[0], "in this step 1 would come again before it"
    bench.service.begin_step()
    bench.bring(3)
    assert bench.on(HOST) == {0, 3}


def test_another_schedule_is_looked_at_at_once() -> None:
    bench = Bench(200, count=30, look_ahead=160)
    bench.order(*range(30))
    bench.settle()
    bench.order(*reversed(range(30)))
    assert (29, HOST) in bench.moving()


def test_another_schedule_ends_an_evaluation() -> None:
    bench = Bench(60)
    ahead, step, later, evaluated = (
        bench.service.ahead,
        *(schedule_of([(Lane.COMPUTE, page.key)]) for page in bench.pages[:3]),
    )
    ahead.follow(step, None)
    ahead.evaluate(evaluated)
    ahead.follow(later, None)
    ahead.evaluate(Step.BEGINS)
    assert [key for _, _, key in bench.residency.forecast.upcoming(1)] == [bench.pages[1].key]


def test_with_a_device_all_that_is_given_back_is_looked_at() -> None:
    """It may have to go down, though HOST has everything."""
    assert Bench(60, count=0).service.ahead.has_everything
    assert not Bench(60, device=60, count=0).service.ahead.has_everything


@pytest.mark.parametrize(("lane", "settled", "tier"), [("u", False, HOST), ("u", True, DEVICE), ("c", False, DEVICE)])
def test_read_ahead_brings_a_page_to_where_it_is_worked_on(lane: str, settled: bool, tier: Tier) -> None:
    bench = Bench(40, device=40, look_ahead=20, settled=frozenset({0} if settled else ()))
    lanes = {"u": Lane.UPDATE, "c": Lane.COMPUTE}
    bench.forecast.set_schedule(schedule_of([(lanes[lane], bench.pages[0].key)]))
    bench.residency.reclassify()
    bench.pump()
    bench.settle()
    assert max(bench.pages[0].valid) is tier


def test_read_ahead_leaves_alone_what_has_failed() -> None:
    bench = Bench(60, look_ahead=60)
    bench.residency.fail(bench.pages[1], LOST)
    bench.order(0, 1, 2, 3)
    assert [number for number, _ in bench.moving()] == [0, 2, 3]


@pytest.mark.parametrize(
    "become",
    [
        lambda bench: bench.residency.fail(bench.pages[0], LOST),
        lambda bench: bench.residency.remove(bench.pages[0]),
        lambda bench: bench.residency.discard(bench.pages[0]),
        lambda bench: bench.ask(0),
        lambda bench: bench.ask(0, intent=FRESH),
    ],
    ids=["failed", "removed", "discarded", "read by somebody", "written anew by somebody"],
)
def test_what_was_to_be_fetched_is_passed_over_if_it_need_not_be_any_more(become: Any) -> None:
    bench = Bench(100, count=24, look_ahead=100, reserve=0)
    held = bench.ask(*range(14, 24), intent=WRITE)
    bench.settle()
    held.give_back()
    bench.order(*range(24))
    assert not [number for number, tier in bench.moving() if tier is HOST], "all frames are on their way down"
    become(bench)
    bench.end(14)
    bench.end(15)
    bench.settle()
    assert 1 in bench.on(HOST)
    assert bench.pages[0].error is None or not bench.pages[0].frames


def protection_of(bench: Bench) -> Protection:
    def post(function: Any) -> bool:
        function()
        return True

    copies: Any = SteppedCopies(bench.store)
    next_event: Any = NextEvent
    return Protection(bench.residency, bench.service, copies, post, next_event)


@pytest.mark.parametrize("confirmed", [False, True])
def test_nothing_is_written_to_protect_what_needs_no_protection_any_more(confirmed: bool) -> None:
    bench = Bench(30)
    bench.bring(0, intent=WRITE)
    protection = protection_of(bench)
    if confirmed:
        protection.confirm()
    protection.prepare([bench.pages[0].key])
    assert bench.moving() == ([] if confirmed else [(0, SWAP)])


def test_behind_a_revert_nothing_is_announced_any_more() -> None:
    bench = Bench(20)
    bench.bring(0, 1)
    bench.forecast.set_agenda([[bench.pages[1].key]])
    bench.order(2, 0, 1)
    with closing(bench.residency.census.victims(HOST)) as victims:
        assert next(victims)[1] is bench.pages[0]
    with pytest.raises(StopIteration):
        protection_of(bench).revert().send(None)
    bench.bring(3)
    assert bench.on(HOST) == {0, 3}, "page 1 was announced, and is used last now"
