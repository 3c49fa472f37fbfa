"""The plan of a step: it fits, is never worse than LRU, is as good as can be, and what the forecast makes of it."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from doubles_combinations import number_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.pager import sweep as sweep_module
from tiermem.pager.course import Limits
from tiermem.pager.forecast import LATER, Forecast
from tiermem.pager.page import Kind, Lane, PageKey
from tiermem.pager.plan import Plan, make_plan
from tiermem.pager.schedule import Schedule, schedule_of
from tiermem.planner.steps import plan_step
from tiermem.zero3.order import Access, Phase

PARAMS = [PageKey(unit, Kind.PARAM) for unit in range(6)]
READS = st.lists(st.sampled_from(PARAMS), min_size=1, max_size=7)
UPDATES = ("step", "forward", "backward")
NBYTES = {Kind.PARAM: 6, Kind.GRAD: 2, Kind.STATE: 10}


def reads(keys: Sequence[PageKey]) -> Schedule:
    return schedule_of((Lane.COMPUTE, key) for key in keys)


def training(units: int, tiles: int, update: str) -> Schedule:
    """There and back, with the update where `update` puts it."""
    forward = [Access(unit, Phase.FORWARD) for unit in range(units)]
    back = [Access(unit, phase) for unit in reversed(range(units)) for phase in (Phase.BACKWARD, Phase.GRADIENT)]
    return plan_step([*forward, *back], dict.fromkeys(range(units), tiles), update)


def test_gradient_tiles_are_accessed_in_the_order_in_which_gradients_arrive() -> None:
    accesses = [Access(unit, Phase.GRADIENT) for unit in (1, 0)]
    schedule = plan_step(accesses, {0: 2, 1: 3}, "step", arrivals={1: (2, 0, 1, 2, 0)})
    tiles = [access.key[::2] for access in schedule.accesses if access.lane is Lane.COMPUTE]
    assert tiles == [(1, 2), (1, 0), (1, 1), (1, 2), (1, 0), (0, 0), (0, 1)], "of the other unit all at once"
    updated = [access.key for access in schedule.accesses if access.lane is Lane.UPDATE]
    assert len(set(updated)) == len(updated) == 2 + 2 * (2 + 3), "each tile once"


def rooms_of(schedule: Schedule) -> dict[PageKey, int]:
    return {access.key: NBYTES[access.key.kind] for access in schedule.accesses}


def held(keys: Sequence[PageKey], stays: Sequence[bool], position: int) -> set[PageKey]:
    """The pages in memory at an access, by the meaning of a plan: the one accessed, and those that stay over it."""
    count, found = len(keys), {keys[position]}
    for later, key in enumerate(keys):
        if not stays[later] or key in found:
            continue
        before = next(step for step in range(1, count + 1) if keys[(later - step) % count] == key)
        if (later - position) % count <= before:
            found.add(key)
    return found


def lru_bytes(schedule: Schedule, rooms: dict[PageKey, int], capacity: int) -> int:
    """Bytes that demand paging with LRU reads and writes in a steady step."""
    resident: OrderedDict[PageKey, bool] = OrderedDict()  # whether it was changed
    saved: set[PageKey] = {key for key in rooms if key.kind is not Kind.GRAD}
    moved = 0
    for _ in range(4):
        moved = 0
        for access in schedule.accesses:
            key = access.key
            if key not in resident:
                moved += rooms[key] if key in saved else 0
                while resident and sum(rooms[other] for other in resident) + rooms[key] > capacity:
                    victim, changed = resident.popitem(last=False)
                    moved += rooms[victim] if changed else 0
                    saved.add(victim)
                resident[key] = False
            resident.move_to_end(key)
            if access.lane is Lane.UPDATE and key.kind is Kind.GRAD:
                del resident[key]
                saved.discard(key)
            elif access.lane is Lane.UPDATE or key.kind is Kind.GRAD:
                resident[key] = True
    return moved


@given(keys=READS, capacity=st.integers(1, 4))
@settings(max_examples=number_of(60, 150))
def test_pages_of_one_size_are_read_as_seldom_as_any_plan_could(keys: list[PageKey], capacity: int) -> None:
    plan = make_plan(reads(keys), dict.fromkeys(PARAMS, 1), Limits(capacity))
    possible = [
        stays
        for stays in itertools.product((True, False), repeat=len(keys))
        if all(len(held(keys, stays, position)) <= capacity for position in range(len(keys)))
    ]
    assert plan.stays in possible, "never above the budget"
    assert plan.read == min(stays.count(False) for stays in possible)
    assert plan.written == 0


@given(
    update=st.sampled_from(UPDATES),
    units=st.integers(1, 6),
    tiles=st.integers(1, 4),
    share=st.floats(0.05, 1.2),
    ahead=st.integers(0, 60),
    lead=st.integers(0, 30),
)
@settings(max_examples=number_of(25, 60))
def test_what_is_kept_and_what_is_needed_fit_together(
    update: str, units: int, tiles: int, share: float, ahead: int, lead: int
) -> None:
    schedule = training(units, tiles, update)
    rooms = rooms_of(schedule)
    capacity = max(ahead + lead + 12 + sum(NBYTES.values()), int(share * sum(rooms.values())))
    plan = make_plan(schedule, rooms, Limits(capacity, ahead, lead, behind=12))
    keys = [access.key for access in schedule.accesses]
    for position in range(len(keys)):
        assert sum(rooms[key] for key in held(keys, plan.stays, position)) <= capacity
    # A page that is accessed again while it is still in use has not gone in between.
    params = [index for index, key in enumerate(keys) if key.kind is Kind.PARAM]
    assert all(plan.stays[later] for before, later in itertools.pairwise(params) if keys[before] == keys[later])


@given(update=st.sampled_from(UPDATES), units=st.integers(2, 6), tiles=st.integers(1, 4), share=st.floats(0.2, 1.1))
@settings(max_examples=number_of(25, 60))
def test_never_more_bytes_than_demand_paging_with_lru(update: str, units: int, tiles: int, share: float) -> None:
    schedule = training(units, tiles, update)
    rooms = dict.fromkeys(rooms_of(schedule), 4)
    capacity = max(40, int(share * sum(rooms.values())) // 4 * 4)
    plan = make_plan(schedule, rooms, Limits(capacity))
    assert plan.moved <= lru_bytes(schedule, rooms, capacity)


@pytest.mark.parametrize("update", UPDATES)
def test_a_part_of_the_state_stays_for_good_instead_of_passing_through(update: str) -> None:
    schedule = training(8, 4, update)
    rooms = rooms_of(schedule)
    state = sum(nbytes for key, nbytes in rooms.items() if key.kind is not Kind.GRAD)
    plan = make_plan(schedule, rooms, Limits(state // 2))
    assert lru_bytes(schedule, rooms, state // 2) > 1.8 * state, "a cycle longer than the memory gives LRU no hits"
    assert plan.moved < 1.5 * state
    tiles = [plan.stays[index] for index, access in enumerate(schedule.accesses) if access.key.kind is Kind.STATE]
    assert 0.25 < sum(tiles) / len(tiles) < 0.55


def longest_run(schedule: Schedule, stays: Sequence[bool]) -> int:
    """How many tiles of state one after the other do not stay, round the step."""
    tiles = [stays[index] for index, access in enumerate(schedule.accesses) if access.key.kind is Kind.STATE]
    runs = [len(list(run)) for kept, run in itertools.groupby(tiles * 2) if not kept]
    return max(runs, default=0)


@pytest.mark.parametrize(("units", "tiles", "share"), [(12, 6, 0.3), (12, 6, 0.5), (24, 3, 0.6), (12, 6, 0.7)])
def test_what_goes_is_spread_over_the_step_for_hardly_more_bytes(units: int, tiles: int, share: float) -> None:
    schedule = training(units, tiles, "backward")
    rooms = rooms_of(schedule)
    limits = Limits(int(share * sum(rooms.values())), ahead=30, behind=12)
    plan, together = make_plan(schedule, rooms, limits), make_plan(replace(schedule, rests=True), rooms, limits)
    assert 0 < plan.moved <= 1.05 * together.moved
    assert longest_run(schedule, plan.stays) <= 8 < 15 <= longest_run(schedule, together.stays)


@pytest.mark.parametrize("update", UPDATES)
def test_where_everything_fits_nothing_moves(update: str) -> None:
    schedule = training(3, 2, update)
    rooms = rooms_of(schedule)
    plan = make_plan(schedule, rooms, Limits(sum(rooms.values()), ahead=20, lead=10, behind=12))
    assert plan.moved == 0


def test_without_accesses_there_is_nothing_to_plan() -> None:
    assert make_plan(schedule_of([]), {}, Limits(10)) == Plan((), 0, 0)


def test_what_the_plan_does_not_keep_goes_before_what_it_keeps() -> None:
    forecast = Forecast()
    forecast.set_schedule(reads(PARAMS[:3]), (True, False, True))
    assert [forecast.next_use(key, 0) for key in PARAMS[:3]] == [0, LATER + 1, 2]
    forecast.fetched(PARAMS[1])
    assert forecast.next_use(PARAMS[1], 0) == 1, "it was brought for that access"
    for key in PARAMS[:2]:
        forecast.note(Lane.COMPUTE, key)
    assert [forecast.next_use(key, 0) for key in PARAMS[:2]] == [3, LATER + 4], "it has had it"


def test_what_the_update_has_done_ahead_of_the_computation_is_not_done_again() -> None:
    """In "forward" the update of a unit waits for nobody: it may be units ahead of the computation."""
    schedule = training(3, 2, "forward")
    forecast = Forecast()
    forecast.set_schedule(schedule)
    states = [PageKey(unit, Kind.STATE, tile) for unit in range(3) for tile in range(2)]
    forecast.set_agenda([states])
    for key in states[:4]:
        forecast.note(Lane.UPDATE, key)
    coming = [key for _, lane, key in forecast.upcoming(1000) if lane is Lane.UPDATE and key.kind is Kind.STATE]
    assert coming == states[4:], "the others had their turn in this step"
    period = schedule.period
    assert all(forecast.next_use(key, 0) >= period for key in states[:4])


def test_an_update_that_lags_into_the_next_step_still_has_that_steps_turn_to_come() -> None:
    schedule = training(2, 1, "backward")
    forecast = Forecast()
    forecast.set_schedule(schedule)
    forecast.set_agenda([])
    for access in schedule.accesses:
        if access.lane is Lane.COMPUTE:
            forecast.note(access.lane, access.key)
    state = PageKey(0, Kind.STATE)
    forecast.set_agenda([[state]])
    forecast.begin_step()
    forecast.note(Lane.UPDATE, state)
    own = next(index for index, access in enumerate(schedule.accesses) if access.key == state)
    assert forecast.next_use(state, 0) == schedule.period + own


def test_a_plan_looks_at_a_gap_so_many_times_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where far more is needed than there is room for every position is too full: a walk over all gaps at each of them
    # took minutes for a step of 40,000 accesses.
    looks = 0
    left = sweep_module._Gap.left

    def counted(self: sweep_module._Gap, position: int, count: int) -> int:
        nonlocal looks
        looks += 1
        return left(self, position, count)

    monkeypatch.setattr(sweep_module._Gap, "left", counted)

    def looks_for_each_access(tiles: int) -> float:
        nonlocal looks
        looks, schedule = 0, training(2, tiles, "step")
        make_plan(schedule, rooms_of(schedule), Limits(12))
        return looks / len(schedule.accesses)

    assert looks_for_each_access(1600) <= looks_for_each_access(100) + 1
