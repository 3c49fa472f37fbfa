"""What to fetch and what to evict: properties of the pure parts, and the whole against textbook paging."""

from __future__ import annotations

import functools
from typing import Any

from doubles_chain import stepped_chain
from doubles_combinations import number_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.memory.tiers import Tier
from tiermem.pager.ahead import Appetite
from tiermem.pager.forecast import Forecast
from tiermem.pager.page import Intent, Kind, Lane, Page, PageKey
from tiermem.pager.plan import Plan
from tiermem.pager.policy import FarthestFirst, choose_read_ahead
from tiermem.pager.residency import Residency
from tiermem.pager.schedule import schedule_of
from tiermem.pager.service import LeaseRequest, Service
from tiermem.stats import Counters

Coming = list[tuple[PageKey, int, bool]]
COMING = st.lists(
    st.tuples(st.builds(PageKey, unit=st.integers(0, 12), kind=st.just(Kind.PARAM)), st.integers(1, 20), st.booleans()),
    max_size=20,
    unique_by=lambda access: access[0],
)


@given(coming=COMING, capacity=st.integers(0, 100), held=st.integers(0, 50), reserve=st.integers(0, 30))
@settings(max_examples=number_of(80, 200))
def test_read_ahead_is_a_prefix_that_fits(coming: Coming, capacity: int, held: int, reserve: int) -> None:
    chosen = choose_read_ahead(coming, capacity=capacity, held=held, reserve=reserve, look_ahead=60)
    absent = [key for key, _, present in coming if not present]
    assert chosen == absent[: len(chosen)], "in order of need, none left out"
    if chosen:
        last = next(index for index, access in enumerate(coming) if access[0] == chosen[-1])
        kept = sum(nbytes for _, nbytes, _ in coming[: last + 1])
        assert kept + held + reserve <= capacity
        assert kept <= 60
    if len(chosen) < len(absent):
        end = next(index for index, access in enumerate(coming) if access[0] == absent[len(chosen)])
        kept = sum(nbytes for _, nbytes, _ in coming[: end + 1])
        assert kept + held + reserve > capacity or kept > 60, "stopped although the next one fits"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=60))
@settings(max_examples=number_of(40, 100))
def test_farthest_first_hands_out_what_is_current(pushes: list[tuple[int, int]]) -> None:
    queue, pages = FarthestFirst(), [Page(PageKey(unit, Kind.PARAM), 1, 1) for unit in range(6)]
    current: dict[int, int] = {}
    for use, number in pushes:
        pages[number].stamp += 1
        queue.push(pages[number], next_use=use)
        current[number] = use
    order = []
    while (use := queue.farthest()) is not None:
        assert queue.pop()[0] == use
        order.append(use)
    assert order == sorted(current.values(), reverse=True)


def test_outdated_entries_do_not_pile_up() -> None:
    queue, page = FarthestFirst(), Page(PageKey(0, Kind.PARAM), 1, 1)
    for use in range(10_000):
        page.stamp += 1
        queue.push(page, next_use=use)
    assert len(queue._heap) < 1000
    assert queue.farthest() == 9999


# The service on stepped edges, against LRU demand paging and against the optimum.


class Machine:
    """Reads pages in the order of a schedule, step after step, and counts the moves."""

    def __init__(self, sizes: list[int], capacity: int, look_ahead: int, *, reserve: int | None = None) -> None:
        self.chain, self.flying, _ = stepped_chain(capacity)
        self.ended: list[Any] = []
        self.reads: list[int] = []
        self.forecast = Forecast()
        self.residency = Residency(self.chain, self.forecast, Counters(), ended=lambda *what: self.ended.append(what))
        self.service = Service(
            self.residency, {Tier.HOST: Appetite(look_ahead, max(sizes) if reserve is None else reserve)}
        )
        self.pages = [self.residency.add(PageKey(number, Kind.PARAM), size) for number, size in enumerate(sizes)]
        for page in self.pages:  # everything on SWAP to begin with
            self.use(page, Intent.FRESH)
            self.residency.start_move(page, Tier.SWAP, 0) if page.move is None and Tier.SWAP not in page.valid else None
            self.settle()
            self.residency.drop(page, Tier.HOST)
        self.reads.clear()

    def settle(self) -> None:
        self.service.pump()
        while self.flying or self.ended:
            if self.flying:
                transfer = self.flying.pop(0)
                if transfer.target is Tier.HOST:
                    self.reads.append(transfer.page.key.unit)
                transfer.finish()
            while self.ended:
                self.residency.finish_move(*self.ended.pop(0))
            self.service.pump()
        self.residency.check_invariants()

    def use(self, page: Page, intent: Intent) -> None:
        result: list[BaseException | None] = []
        self.service.submit(LeaseRequest([page], intent, Lane.COMPUTE, Tier.HOST, result.append))
        self.settle()
        assert result == [None]
        self.service.release([page], Tier.HOST)
        self.settle()

    def replay(self, order: list[int], intent: Intent) -> tuple[Plan, int]:
        """The plan for a step, and what is read in one when a few have gone by it."""
        schedule = schedule_of((Lane.COMPUTE, self.pages[number].key) for number in order)
        plan = self.service.ahead.make_plan(schedule, self.service.ahead.rooms())
        assert plan is not None
        self.service.ahead.follow(schedule, plan)
        for step in range(4):
            if step:
                self.forecast.begin_step()
            self.reads.clear()
            for number in order:
                self.use(self.pages[number], intent)
        return plan, len(self.reads)

    def follow(self, order: list[int], steps: int, intent: Intent = Intent.READ) -> int:
        """Reads that were used; what was fetched ahead of a step that never comes is not counted."""
        self.forecast.set_schedule(schedule_of((Lane.COMPUTE, self.pages[number].key) for number in order))
        self.residency.reclassify()
        used = 0
        for step in range(steps):
            if step:
                self.forecast.begin_step()
            for number in order:
                self.use(self.pages[number], intent)
                used += self.reads.count(number)
                self.reads = [read for read in self.reads if read != number]
        return used


def test_a_page_met_twice_is_looked_ahead_to_once() -> None:
    machine = Machine([10] * 3, 30, look_ahead=20, reserve=0)
    machine.forecast.set_schedule(schedule_of((Lane.COMPUTE, machine.pages[number].key) for number in [0, 0, 0, 1, 2]))
    machine.settle()
    assert machine.reads == [0, 1]


def lru_reads(order: list[int], sizes: list[int], capacity: int) -> int:
    resident: list[int] = []
    reads = 0
    for number in order:
        if number in resident:
            resident.remove(number)
        else:
            reads += 1
            while sum(sizes[other] for other in resident) + sizes[number] > capacity:
                resident.pop(0)
        resident.append(number)
    return reads


def fewest_reads(order: list[int], slots: int) -> int:
    """By trying every eviction; pages of one size."""

    @functools.cache
    def best(position: int, resident: frozenset[int]) -> int:
        if position == len(order):
            return 0
        number = order[position]
        if number in resident:
            return best(position + 1, resident)
        if len(resident) < slots:
            return 1 + best(position + 1, resident | {number})
        return 1 + min(best(position + 1, resident - {victim} | {number}) for victim in resident)

    return best(0, frozenset())


ORDERS = st.lists(st.integers(0, 6), min_size=2, max_size=14)


@given(order=ORDERS, slots=st.integers(2, 6), look_ahead=st.sampled_from([0, 2, 100]), write=st.booleans())
@settings(max_examples=number_of(60, 150))
def test_never_more_reads_than_lru(order: list[int], slots: int, look_ahead: int, write: bool) -> None:
    machine = Machine([1] * 7, slots, look_ahead)
    reads = machine.follow(order, 3, Intent.WRITE if write else Intent.READ)
    assert reads <= lru_reads(order * 3, [1] * 7, slots)


@given(order=st.lists(st.integers(0, 4), min_size=2, max_size=8), slots=st.integers(2, 3))
@settings(max_examples=number_of(25, 60))
def test_without_look_ahead_reads_are_the_fewest_possible(order: list[int], slots: int) -> None:
    # The last step cannot know that nothing comes after it, which is no reason to read more.
    assert Machine([1] * 5, slots, look_ahead=0).follow(order, 2) == fewest_reads(order * 2, slots)


@given(order=ORDERS, slots=st.integers(1, 6), write=st.booleans())
@settings(max_examples=number_of(60, 150))
def test_the_pager_reads_what_the_plan_says(order: list[int], slots: int, write: bool) -> None:
    plan, read = Machine([1] * 7, slots, 0, reserve=0).replay(order, Intent.WRITE if write else Intent.READ)
    assert read == plan.read


@given(order=ORDERS, slots=st.integers(3, 6), look_ahead=st.integers(1, 3))
@settings(max_examples=number_of(40, 100))
def test_read_ahead_within_the_plan_costs_no_reads(order: list[int], slots: int, look_ahead: int) -> None:
    plan, read = Machine([1] * 7, slots, look_ahead).replay(order, Intent.READ)
    assert read <= plan.read + look_ahead  # what the last accesses fetch for the next step, the first ones had before


@given(order=ORDERS, other=ORDERS, slots=st.integers(2, 6))
@settings(max_examples=number_of(40, 100))
def test_a_step_that_is_not_as_planned_is_demand_paged(order: list[int], other: list[int], slots: int) -> None:
    machine = Machine([1] * 7, slots, 2)
    machine.replay(order, Intent.WRITE)
    for number in other:  # nobody has said anything of this order
        machine.use(machine.pages[number], Intent.WRITE)
    machine.forecast.begin_step()
    machine.residency.reclassify()
    for number in order:
        machine.use(machine.pages[number], Intent.WRITE)


def test_a_cycle_larger_than_memory_is_where_lru_reads_everything() -> None:
    order = list(range(7))
    assert lru_reads(order * 3, [1] * 7, 6) == 21
    assert Machine([1] * 7, 6, look_ahead=0).follow(order, 3) < 12
