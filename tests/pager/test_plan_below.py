"""The plan for host memory below a device: it fits, is never worse than LRU, and knows what comes from the device."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import pytest
from doubles_combinations import number_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.pager.below import _stays_above, make_plan_below
from tiermem.pager.course import Limits
from tiermem.pager.forecast import LATER, Forecast
from tiermem.pager.page import Kind, Lane, PageKey
from tiermem.pager.plan import Plan
from tiermem.pager.schedule import Schedule, schedule_of
from tiermem.planner.steps import plan_step
from tiermem.zero3.order import Access, Phase

PARAMS = [PageKey(unit, Kind.PARAM) for unit in range(6)]
UPDATES = ("step", "forward", "backward")
NBYTES = {Kind.PARAM: 6, Kind.GRAD: 2, Kind.STATE: 10}
TRAINING = {
    "update": st.sampled_from(UPDATES),
    "units": st.integers(1, 6),
    "tiles": st.integers(1, 4),
    "batches": st.integers(1, 2),
    "above": st.integers(12, 60),
}


def training(units: int, tiles: int, update: str, batches: int = 1) -> Schedule:
    """There and back for each batch, with the update where `update` puts it."""
    forward = [Access(unit, Phase.FORWARD) for unit in range(units)]
    back = [Access(unit, phase) for unit in reversed(range(units)) for phase in (Phase.BACKWARD, Phase.GRADIENT)]
    return plan_step([*forward, *back] * batches, dict.fromkeys(range(units), tiles), update)


def rooms_of(schedule: Schedule) -> dict[PageKey, int]:
    return {access.key: NBYTES[access.key.kind] for access in schedule.accesses}


def below(schedule: Schedule, plan: Plan) -> tuple[list[PageKey], list[bool], list[int]]:
    """Of the accesses that reach host memory: keys, whether the page stays, positions."""
    assert plan.reaches is not None
    positions = [position for position, reached in enumerate(plan.reaches) if reached]
    keys = [schedule.accesses[position].key for position in positions]
    return keys, [plan.stays[position] for position in positions], positions


def held(keys: Sequence[PageKey], stays: Sequence[bool], position: int) -> set[PageKey]:
    """The pages in host memory at an access that reaches it, by the meaning of a plan."""
    count, found = len(keys), {keys[position]}
    for later, key in enumerate(keys):
        if stays[later] and key not in found:
            before = next(step for step in range(1, count + 1) if keys[(later - step) % count] == key)
            if (later - position) % count <= before:
                found.add(key)
    return found


def lru_bytes(schedule: Schedule, plan: Plan, above: set[int], nbytes: int, capacity: int) -> int:
    """What demand paging with LRU moves, given what comes from the device; all pages of one size."""
    keys, _, positions = below(schedule, plan)
    resident: OrderedDict[PageKey, bool] = OrderedDict()  # whether it was changed
    saved = {key for key in keys if key.kind is not Kind.GRAD}
    moved = 0
    for _ in range(4):
        moved = 0
        for key, position in zip(keys, positions, strict=True):
            lane = schedule.accesses[position].lane
            if key not in resident:
                moved += nbytes if key in saved and position not in above else 0
                while (len(resident) + 1) * nbytes > capacity:
                    victim, changed = resident.popitem(last=False)
                    moved += nbytes if changed else 0
                    saved.add(victim)
                resident[key] = False
            resident.move_to_end(key)
            if lane is Lane.UPDATE and key.kind is Kind.GRAD:
                del resident[key]
                saved.discard(key)
            elif lane is Lane.UPDATE or key.kind is Kind.GRAD:
                resident[key] = True
    return moved


@given(share=st.floats(0.05, 1.2), ahead=st.integers(0, 60), lead=st.integers(0, 30), **TRAINING)
@settings(max_examples=number_of(32, 80))
def test_what_is_kept_and_what_is_needed_fit_together(
    update: str, units: int, tiles: int, batches: int, above: int, share: float, ahead: int, lead: int
) -> None:
    schedule = training(units, tiles, update, batches)
    rooms = rooms_of(schedule)
    capacity = max(ahead + lead + 12 + sum(NBYTES.values()), int(share * sum(rooms.values())))
    plan = make_plan_below(schedule, rooms, Limits(capacity, ahead, lead, behind=12), Limits(above))
    keys, stays, _ = below(schedule, plan)
    for position in range(len(keys)):
        assert sum(rooms[key] for key in held(keys, stays, position)) <= capacity


@given(share=st.floats(0.2, 1.1), **TRAINING)
@settings(max_examples=number_of(32, 80))
def test_never_more_bytes_than_demand_paging_with_lru(
    update: str, units: int, tiles: int, batches: int, above: int, share: float
) -> None:
    schedule = training(units, tiles, update, batches)
    rooms = dict.fromkeys(rooms_of(schedule), 4)
    capacity = max(40, int(share * sum(rooms.values())) // 4 * 4)
    plan = make_plan_below(schedule, rooms, Limits(capacity), Limits(above))
    supplied = _stays_above(schedule.accesses, rooms, Limits(above), ())
    assert plan.moved <= lru_bytes(schedule, plan, supplied, 4, capacity)


@given(keys=st.lists(st.sampled_from(PARAMS), min_size=1, max_size=7), capacity=st.integers(1, 4))
@settings(max_examples=number_of(40, 100))
def test_what_only_passes_through_is_read_as_seldom_as_any_plan_could(keys: list[PageKey], capacity: int) -> None:
    """A device that holds a page and no more."""
    schedule = schedule_of((Lane.COMPUTE, key) for key in keys)
    plan = make_plan_below(schedule, dict.fromkeys(PARAMS, 1), Limits(capacity), Limits(1))
    here, stays, _ = below(schedule, plan)
    possible = [
        tried
        for tried in itertools.product((True, False), repeat=len(here))
        if all(len(held(here, tried, position)) <= capacity for position in range(len(here)))
    ]
    if here:
        assert tuple(stays) in possible, "never above the budget"
        assert plan.read == min(tried.count(False) for tried in possible)
    assert plan.written == 0


@pytest.mark.parametrize("update", UPDATES)
def test_a_large_device_asks_for_parameters_once_a_step_and_gives_them_back_for_the_update(update: str) -> None:
    schedule = training(4, 2, update)
    rooms = rooms_of(schedule)
    plan = make_plan_below(schedule, rooms, Limits(1), Limits(1000))
    keys, stays, positions = below(schedule, plan)
    computed = [key for key, at in zip(keys, positions, strict=True) if schedule.accesses[at].lane is Lane.COMPUTE]
    assert [key for key in computed if key.kind is Kind.PARAM] == PARAMS[:4]
    kept = {key.kind for key, there in zip(keys, stays, strict=True) if there}
    assert kept <= {Kind.PARAM}, "there is no room"
    state = sum(nbytes for key, nbytes in rooms.items() if key.kind is Kind.STATE)
    grad = sum(nbytes for key, nbytes in rooms.items() if key.kind is Kind.GRAD)
    # Some are still there from their update: all in "forward", the first unit's in "backward".
    parameters = {"forward": 0, "backward": 18, "step": 24}[update]
    assert plan.read == parameters + state + grad, "the update's own come from the device"
    assert plan.written == 24 + state + grad


@pytest.mark.parametrize("update", UPDATES)
def test_parameters_are_at_home_on_a_device_with_room_to_spare(update: str) -> None:
    """Host memory sees them for their update only, and no byte of them goes to disk."""
    schedule = training(4, 2, update)
    rooms = rooms_of(schedule)
    plan = make_plan_below(schedule, rooms, Limits(96), Limits(1000))
    assert plan.at_home
    keys, _, positions = below(schedule, plan)
    parameters = [at for key, at in zip(keys, positions, strict=True) if key.kind is Kind.PARAM]
    assert [schedule.accesses[at].lane for at in parameters] == [Lane.UPDATE] * 4
    assert not any(plan.stays[at] for at in parameters)
    # Gradients and states are all there is, and have all the room.
    state = sum(nbytes for key, nbytes in rooms.items() if key.kind is Kind.STATE)
    assert plan.moved <= 2 * (state - 96 + NBYTES[Kind.PARAM] + 2 * (NBYTES[Kind.STATE] + NBYTES[Kind.GRAD])) + 2 * 16


@pytest.mark.parametrize(("host", "device", "at_home"), [(96, 80, True), (95, 80, False), (96, 33, False)])
def test_they_are_not_where_the_device_or_host_memory_is_tight(host: int, device: int, at_home: bool) -> None:
    """A sixteenth of host memory for the largest of them, and a quarter of the device beside all that is there."""
    schedule = training(4, 1, "step")
    assert make_plan_below(schedule, rooms_of(schedule), Limits(host), Limits(device)).at_home is at_home


def test_units_settled_on_the_device_are_taken_off_its_room() -> None:
    schedule = training(3, 2, "backward")
    rooms = rooms_of(schedule)
    assert make_plan_below(schedule, rooms, Limits(96), Limits(200), {0}).at_home
    assert not make_plan_below(schedule, rooms, Limits(96), Limits(50), {0}).at_home


def test_nothing_of_a_settled_unit_reaches_host_memory() -> None:
    schedule = training(3, 2, "backward")
    plan = make_plan_below(schedule, rooms_of(schedule), Limits(60), Limits(100), {0, 2})
    assert {key.unit for key in below(schedule, plan)[0]} == {1}
    assert make_plan_below(schedule, rooms_of(schedule), Limits(60), Limits(100), {0, 1, 2}).moved == 0


def test_a_copy_below_is_wanted_when_the_copy_above_will_have_gone() -> None:
    """Read for forward, used from the device, gone from there before backward: it stays here in between, or not."""
    accesses = [
        (Lane.COMPUTE, PARAMS[0]),
        (Lane.COMPUTE, PARAMS[1]),
        (Lane.COMPUTE, PARAMS[0]),
        (Lane.UPDATE, PARAMS[0]),
    ]
    forecast = Forecast()
    for kept in (True, False):
        forecast.set_schedule(schedule_of(accesses), (False, False, kept, False), (True, True, True, True))
        forecast.fetched(PARAMS[0])
        assert forecast.next_use_below(PARAMS[0], 0, above=False) == 0, "it was brought for that access"
        later = 2 if kept else LATER + 2
        assert forecast.next_use_below(PARAMS[0], 0, above=True) == later, "which the copy above serves"
        forecast.note(Lane.COMPUTE, PARAMS[0])
        assert forecast.next_use_below(PARAMS[0], 0, above=True) == later
    forecast.set_schedule(schedule_of(accesses), (False, False, True, False), (True, True, False, True))
    forecast.note(Lane.COMPUTE, PARAMS[0])
    assert forecast.next_use_below(PARAMS[0], 0, above=True) == LATER + 3, "the device still has it in backward"
    assert forecast.next_use_below(PARAMS[0], 0, above=False) == 2, "or should have had it"
    forecast.set_agenda([[PARAMS[0]]])
    assert forecast.next_use_below(PARAMS[0], 0, above=True) == 1, "announced, whatever the plan says"
