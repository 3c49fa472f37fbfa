"""The forecast: where each lane stands, and what follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from doubles_combinations import number_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tiermem.pager.agenda import _FIRST
from tiermem.pager.forecast import LATER, Forecast
from tiermem.pager.page import Kind, Lane, PageKey
from tiermem.pager.schedule import Access, schedule_of

KEYS = [PageKey(unit, Kind.PARAM) for unit in range(8)]
ACCESSES = st.lists(st.tuples(st.sampled_from(Lane), st.sampled_from(KEYS)), min_size=1, max_size=30)


def forecast_of(*accesses: tuple[Lane, PageKey], hasty: int | None = None) -> Forecast:
    forecast = Forecast()
    forecast.set_schedule(schedule_of(accesses, hasty=hasty))
    return forecast


def compute(*units: int) -> list[tuple[Lane, PageKey]]:
    return [(Lane.COMPUTE, KEYS[unit]) for unit in units]


def test_without_a_schedule_the_page_used_longest_ago_is_needed_last() -> None:
    forecast = Forecast()
    assert not forecast.has_schedule
    assert forecast.next_use(KEYS[0], last_use=1) > forecast.next_use(KEYS[1], last_use=2)
    assert list(forecast.upcoming(10)) == []
    forecast.note(Lane.COMPUTE, KEYS[0])
    assert forecast.begin_step()
    assert forecast.surprises == 0


def test_a_page_the_schedule_does_not_hold_is_needed_after_all_it_holds() -> None:
    forecast = forecast_of(*compute(0, 1))
    assert forecast.next_use(KEYS[5], last_use=10**9) > forecast.next_use(KEYS[1], last_use=0) + 10**9


def test_the_cursor_follows_and_the_next_step_is_a_period_later() -> None:
    forecast = forecast_of(*compute(0, 1, 2, 1))
    assert [forecast.next_use(KEYS[unit], 0) for unit in range(3)] == [0, 1, 2]
    forecast.note(Lane.COMPUTE, KEYS[0])
    forecast.note(Lane.COMPUTE, KEYS[1])
    assert [forecast.next_use(KEYS[unit], 0) for unit in range(3)] == [4, 3, 2]
    forecast.note(Lane.COMPUTE, KEYS[2])
    forecast.note(Lane.COMPUTE, KEYS[1])
    assert forecast.begin_step()
    assert [forecast.next_use(KEYS[unit], 0) for unit in range(3)] == [4, 5, 6]


def test_the_update_lags_and_is_answered_with_what_it_has_still_to_do() -> None:
    forecast = forecast_of((Lane.COMPUTE, KEYS[0]), (Lane.UPDATE, KEYS[1]), (Lane.UPDATE, KEYS[2]))
    forecast.note(Lane.COMPUTE, KEYS[0])
    forecast.note(Lane.UPDATE, KEYS[1])
    assert forecast.begin_step()
    assert forecast.next_use(KEYS[2], 0) == 2, "not done yet, so needed before anything of the new step"
    assert [key for _, _, key in forecast.upcoming(2)] == [KEYS[2], KEYS[0]]
    forecast.note(Lane.UPDATE, KEYS[2])
    assert forecast.next_use(KEYS[2], 0) == 5


def test_an_update_that_does_not_come_is_given_up_after_a_step() -> None:
    forecast = forecast_of((Lane.COMPUTE, KEYS[0]), (Lane.UPDATE, KEYS[1]))
    for _ in range(3):
        forecast.note(Lane.COMPUTE, KEYS[0])
        forecast.begin_step()
    assert forecast.next_use(KEYS[1], 0) == 5


def test_one_extra_access_does_not_throw_the_forecast_off() -> None:
    order = compute(*range(8), *reversed(range(8))) * 4
    forecast = forecast_of(*order)
    for lane, key in order[:20]:
        forecast.note(lane, key)
    before = forecast.next_use(KEYS[5], 0)
    schedule = [(lane, PageKey(key.unit + 100, Kind.STATE)) for lane, key in order]
    far = forecast_of(*schedule, *order)  # KEYS are 64 accesses away
    far.note(Lane.COMPUTE, KEYS[0])
    assert far.surprises == 1
    assert next(far.upcoming(1))[0] == 0
    far.note(*schedule[0])
    assert next(far.upcoming(1))[0] == 1
    assert before == forecast.next_use(KEYS[5], 0)


def test_a_gap_is_believed_at_the_second_access_behind_it() -> None:
    skipped = [(Lane.COMPUTE, PageKey(unit, Kind.STATE)) for unit in range(50)]
    forecast = forecast_of(*skipped, *compute(0, 1, 2))
    forecast.note(Lane.COMPUTE, KEYS[0])
    assert next(forecast.upcoming(1))[0] == 0
    forecast.note(Lane.COMPUTE, KEYS[1])
    assert next(forecast.upcoming(1))[2] == KEYS[2]
    forecast.note(Lane.COMPUTE, KEYS[2])
    assert not forecast.begin_step(), "a step with a gap was not as recorded"
    for lane, key in [*skipped, *compute(0, 1, 2)]:
        forecast.note(lane, key)
    assert forecast.begin_step()


def test_a_gradient_that_is_added_to_once_more_does_not_lead_into_the_next_step() -> None:
    gradients = [(Lane.COMPUTE, PageKey(9, Kind.GRAD, tile)) for tile in range(20)]
    step = [*compute(*range(8)), *gradients, *compute(*reversed(range(8)))]
    forecast = forecast_of(*step)
    for lane, key in step[:28]:
        forecast.note(lane, key)
    for lane, key in gradients:  # all of it again, in order
        forecast.note(lane, key)
        assert next(forecast.upcoming(1)) == (28, Lane.COMPUTE, KEYS[7]), "it is where it was"
    assert forecast.surprises == 20
    for lane, key in step[28:]:
        forecast.note(lane, key)
    assert forecast.begin_step(), "and the step was as recorded"


def test_a_step_that_ends_early_was_not_as_recorded() -> None:
    forecast = forecast_of(*compute(0, 1, 2, 3))
    forecast.note(Lane.COMPUTE, KEYS[0])
    assert not forecast.begin_step()
    assert next(forecast.upcoming(1)) == (4, Lane.COMPUTE, KEYS[0])


def test_an_empty_schedule_knows_nothing() -> None:
    forecast = forecast_of()
    assert list(forecast.upcoming(5)) == []
    forecast.note(Lane.COMPUTE, KEYS[0])
    forecast.begin_step()


@given(accesses=ACCESSES, steps=st.integers(1, 3), stop=st.integers(0, 29))
@settings(max_examples=number_of(80, 200))
def test_next_use_and_upcoming_against_the_written_out_sequence(
    accesses: list[tuple[Lane, PageKey]], steps: int, stop: int
) -> None:
    """Both lanes on schedule: everything can be read off the sequence written out for several steps."""
    forecast = forecast_of(*accesses)
    for step in range(steps):
        if step:
            assert forecast.begin_step()
        for lane, key in accesses if step < steps - 1 else accesses[: stop % len(accesses)]:
            forecast.note(lane, key)
    assert forecast.surprises == 0
    done = (steps - 1) * len(accesses) + stop % len(accesses)
    written_out = accesses * (steps + 2)
    for key in KEYS:
        uses = [position for position in range(done, len(written_out)) if written_out[position][1] == key]
        if uses:
            assert forecast.next_use(key, 0) == uses[0]
    coming = list(forecast.upcoming(1000))
    assert coming == [(done + index, *access) for index, access in enumerate(written_out[done : done + len(accesses)])]
    assert list(forecast.upcoming(3)) == coming[:3]


@pytest.mark.parametrize("lag", [0, 1, 3])
@given(accesses=ACCESSES)
@settings(max_examples=number_of(20, 50))
def test_a_lagging_lane_is_merged_by_position(lag: int, accesses: list[tuple[Lane, PageKey]]) -> None:
    forecast = forecast_of(*accesses)
    updates = [access for access in accesses if access[0] is Lane.UPDATE]
    for lane, key in accesses:
        if lane is Lane.COMPUTE:
            forecast.note(lane, key)
    for lane, key in updates[: max(0, len(updates) - lag)]:
        forecast.note(lane, key)
    forecast.begin_step()
    coming = list(forecast.upcoming(1000))
    positions = [position for position, _, _ in coming]
    assert positions == sorted(positions)
    behind = [key for position, _, key in coming if position < len(accesses)]
    assert behind == [key for _, key in updates[max(0, len(updates) - lag) :]]


class WrittenOutAgenda:
    """The agenda as the list of groups that it is: what `Forecast` answers from indexes."""

    def __init__(self, hasty: int | None) -> None:
        self.groups: list[list[PageKey]] = []
        self.hasty = hasty

    def done(self, key: PageKey) -> None:
        for group in self.groups:
            if key in group:
                group.remove(key)
                break
        while self.groups and not self.groups[0]:
            del self.groups[0]

    def upcoming(
        self, recorded: list[tuple[int, Lane, PageKey]], step: list[tuple[int, Lane, PageKey]], cursor: int
    ) -> list[tuple[int, Lane, PageKey]]:
        known = {key for group in self.groups for key in group}
        groups = [*([self.groups[0][:_FIRST], self.groups[0][_FIRST:]] if self.groups else []), *self.groups[1:]]
        coming: list[tuple[int, Lane, PageKey]] = []
        updates: list[tuple[int, Lane, PageKey]] = []  # recorded since the last parameters
        (_, next_lane, next_key), (_, last_lane, last_key) = step[0], step[-1]
        entered = (next_lane, next_key.kind) == (Lane.COMPUTE, Kind.GRAD)
        left = (last_lane, last_key.kind) == (Lane.COMPUTE, Kind.GRAD) and last_key in known
        if self.hasty is not None and (entered or left):
            groups[:2] = [[key for group in groups[:2] for key in group]]  # all of it behind the first gradients
        elif groups:
            coming = [(cursor, Lane.UPDATE, key) for key in groups.pop(0)]
        due = self.hasty is not None and entered
        updated = None  # the unit of the last update, if no parameters have come since
        for position, lane, key in recorded:
            if due and (self.hasty is None or key.kind is not Kind.GRAD):
                coming += [(cursor, Lane.UPDATE, late) for late in (groups.pop(0) if groups else [])]
                coming += updates[self.hasty :] if self.hasty is not None else []
                updates, due = [], False
            if lane is Lane.UPDATE and self.hasty is None:
                if updated not in (None, key.unit):
                    coming += [(cursor, Lane.UPDATE, late) for late in (groups.pop(0) if groups else [])]
                updated = key.unit
            if lane is Lane.UPDATE and key in known:
                continue
            if lane is Lane.UPDATE:
                updates.append((position, lane, key))
                coming += updates[-1:] if self.hasty is None or len(updates) <= self.hasty else []
                continue
            coming.append((position, lane, key))
            if key.kind is Kind.PARAM:
                due, updated = True, None
        coming += [(cursor, Lane.UPDATE, late) for group in groups for late in group]
        return coming + (updates[self.hasty :] if self.hasty is not None else [])


# Of other units than those that are updated: these the computation brings about by their parameters here.
GRADIENTS = [PageKey(unit, Kind.GRAD, tile) for unit in (8, 9) for tile in range(2)]
MIXED = [*KEYS[:4], *GRADIENTS]
MIXED_ACCESSES = st.lists(
    st.tuples(st.sampled_from(Lane), st.sampled_from(KEYS[:4]))
    | st.tuples(st.just(Lane.COMPUTE), st.sampled_from(GRADIENTS)),
    min_size=1,
    max_size=30,
)
GROUPS = st.lists(st.lists(st.sampled_from(MIXED), max_size=6, unique=True), max_size=5)
DEEDS = st.one_of(
    st.tuples(st.just("set"), GROUPS),
    st.tuples(st.just("extend"), st.lists(st.sampled_from(MIXED), max_size=6, unique=True)),
    st.tuples(st.just("done"), st.sampled_from(MIXED)),
    st.tuples(st.just("compute"), st.none()),
)


@given(accesses=MIXED_ACCESSES, deeds=st.lists(DEEDS, max_size=20), hasty=st.none() | st.integers(0, 3))
@settings(max_examples=number_of(120, 300))
def test_the_agenda_is_answered_as_if_it_were_searched_from_end_to_end(
    accesses: list[tuple[Lane, PageKey]], deeds: list[tuple[str, Any]], hasty: int | None
) -> None:
    # An update recorded before any computation belongs to the step before; the list below does not know of that.
    lanes = [lane for lane, _ in accesses]
    assume(Lane.COMPUTE not in lanes or Lane.UPDATE not in lanes[: lanes.index(Lane.COMPUTE)])
    forecast, agenda = forecast_of(*accesses, hasty=hasty), WrittenOutAgenda(hasty)
    forecast.set_agenda([])
    walk = [(at, key) for at, (lane, key) in enumerate(accesses) if lane is Lane.COMPUTE]
    cursor, turn = 0, 0
    finished: dict[PageKey, int] = {}
    for deed, about in deeds:
        before = {key for group in agenda.groups for key in group}
        if deed == "set":
            agenda.groups = [list(group) for group in about]
            changed = forecast.set_agenda(about)
            assert changed == before ^ {key for group in agenda.groups for key in group}
        elif deed == "extend":
            agenda.groups.append(list(about))
            assert forecast.extend_agenda(about) == set(about)
        elif deed == "done":
            agenda.done(about)
            forecast.note(Lane.UPDATE, about)
            places = [at for at, access in enumerate(accesses) if access == (Lane.UPDATE, about)]
            if places:  # the computation brings an update about by coming to its place
                finished[about] = places[-1] + 1 - (len(accesses) if places[-1] > cursor else 0)
        elif turn < len(walk):
            forecast.note(Lane.COMPUTE, walk[turn][1])
            cursor, turn = walk[turn][0] + 1, turn + 1
        written_out = [(at, *access) for at, access in enumerate(accesses * 2)]
        step = written_out[cursor : cursor + len(accesses)]
        recorded = [(at, lane, key) for at, lane, key in step if lane is Lane.COMPUTE or at >= finished.get(key, 0)]
        assert list(forecast.upcoming(10**6)) == agenda.upcoming(recorded, step, cursor)
        listed = {key for group in agenda.groups for key in group}
        assert all(forecast.next_use(key, 0, (Lane.UPDATE,)) == cursor for key in listed)


def test_parameters_come_before_what_an_update_need_not_have_at_once() -> None:
    states = [PageKey(7, Kind.STATE, tile) for tile in range(4)]
    accesses = [*compute(0), *((Lane.UPDATE, key) for key in states), *compute(1, 2)]
    for hasty, expected in ((None, [*states, KEYS[1], KEYS[2]]), (1, [states[0], KEYS[1], *states[1:], KEYS[2]])):
        forecast = forecast_of(*accesses, hasty=hasty)
        forecast.set_agenda([])
        assert [key for _, _, key in forecast.upcoming(10)] == [KEYS[0], *expected]


def test_room_for_gradients_comes_before_the_update_that_runs_beside_them() -> None:
    """Backward goes from unit 2 to unit 1 with several micro-batches together; unit 0 comes after it."""
    gradients = {unit: [PageKey(unit, Kind.GRAD, tile) for tile in range(2)] for unit in (1, 2)}
    states = {unit: [PageKey(unit, Kind.STATE, tile) for tile in range(2)] for unit in (1, 2)}
    accesses = [
        step
        for unit in (2, 1)
        for step in (
            (Lane.COMPUTE, KEYS[unit]),
            *((Lane.COMPUTE, key) for key in gradients[unit]),
            *((Lane.UPDATE, key) for key in states[unit]),
        )
    ]
    forecast = forecast_of(*accesses, *compute(0), hasty=1)
    forecast.set_agenda([])
    for key in (KEYS[2], *gradients[2]):
        forecast.note(Lane.COMPUTE, key)

    def coming(count: int) -> list[PageKey]:
        return [key for _, _, key in forecast.upcoming(count)]

    # Micro-batches are still going back through unit 2: one tile of its own, then all that unit 1 needs at once.
    assert coming(5) == [states[2][0], KEYS[1], *gradients[1], states[2][1]]
    forecast.set_agenda([[KEYS[2], *(key for tile in (0, 1) for key in (gradients[2][tile], states[2][tile]))]])
    assert coming(4) == [KEYS[1], *gradients[1], KEYS[2]]
    forecast.note(Lane.COMPUTE, KEYS[1])
    assert coming(4) == [*gradients[1], KEYS[2], gradients[2][0]]
    for key in gradients[1]:
        forecast.note(Lane.COMPUTE, key)
    assert coming(5) == [KEYS[2], gradients[2][0], states[2][0], gradients[2][1], states[2][1]]


class Counted(tuple[Access, ...]):
    """Accesses that count how often one of them is looked at."""

    __slots__ = ()
    looks = 0

    def __getitem__(self, index: Any) -> Any:
        Counted.looks += 1
        return super().__getitem__(index)


def test_a_look_does_not_cross_the_updates_that_are_done() -> None:
    """All updates come behind the last gradient: a look costs the same however many of them went before."""

    def looks(count: int) -> int:
        groups = [[PageKey(unit, Kind.STATE, tile) for tile in range(4)] for unit in range(count)]
        gradients = [(Lane.COMPUTE, PageKey(unit, Kind.GRAD)) for unit in range(count)]
        schedule = schedule_of([*gradients, *((Lane.UPDATE, key) for group in groups for key in group)])
        forecast = Forecast()
        forecast.set_schedule(replace(schedule, accesses=Counted(schedule.accesses)))
        for lane, key in gradients:
            forecast.note(lane, key)
        Counted.looks = 0
        for unit, pages in enumerate(groups):
            forecast.set_agenda(groups[unit : unit + 2])
            for at, key in enumerate(pages):
                expected = [later for group in groups[unit:] for later in group][at : at + 4]
                coming = [later for _, _, later in forecast.upcoming(4)]
                assert coming[: len(expected)] == expected or unit >= count - 2
                forecast.note(Lane.UPDATE, key)
        return Counted.looks

    assert looks(100) < 1.2 * 10 * looks(10)


EVENTS = st.lists(
    st.one_of(st.none(), st.tuples(st.sampled_from(["note", "fetched"]), st.sampled_from(Lane), st.sampled_from(KEYS))),
    max_size=40,
)


@given(before=ACCESSES, events=EVENTS, after=ACCESSES, announces=st.booleans(), data=st.data())
@settings(max_examples=number_of(80, 200))
def test_of_a_schedule_before_nothing_is_left(
    before: list[tuple[Lane, PageKey]], events: Any, after: list[tuple[Lane, PageKey]], announces: bool, data: Any
) -> None:
    """A forecast that has followed another schedule, well or badly, answers like a new one, and goes on like it."""
    used, new = forecast_of(*before), Forecast()
    if announces:
        used.set_agenda([])
        new.set_agenda([])
    for event in events:
        if event is None:
            used.begin_step()
        else:
            what, lane, key = event
            used.note(lane, key) if what == "note" else used.fetched(key)
    schedule = schedule_of(after)
    stays = data.draw(st.lists(st.booleans(), min_size=len(after), max_size=len(after)))
    reaches = data.draw(st.lists(st.booleans(), min_size=len(after), max_size=len(after)))
    version = used.version
    for forecast in (used, new):
        forecast.set_schedule(schedule, stays, reaches)
    assert used.version != version, "whoever has looked has to look again"
    for lane, key in [(None, None), *after]:
        if lane is not None:
            used.note(lane, key)
            new.note(lane, key)
        for asked in KEYS:
            assert used.next_use(asked, 1) == new.next_use(asked, 1)
            for above in (False, True):
                assert used.next_use_below(asked, 1, above=above) == new.next_use_below(asked, 1, above=above)
        assert list(used.upcoming(100)) == list(new.upcoming(100))
    assert used.begin_step() == new.begin_step()
    assert list(used.upcoming(100)) == list(new.upcoming(100))


def test_whatever_may_come_otherwise_than_was_said_has_another_version() -> None:
    forecast = forecast_of(*compute(0, 1, 2))
    versions = [forecast.version]
    for change in (
        forecast.begin_step,
        lambda: forecast.set_agenda([[KEYS[0]]]),
        lambda: forecast.extend_agenda([KEYS[1]]),
    ):
        change()
        versions.append(forecast.version)
    assert len(set(versions)) == 4


def test_a_gradient_that_is_added_to_once_more_behind_the_last_access_begins_no_step() -> None:
    gradient = PageKey(0, Kind.GRAD)
    accesses = [*compute(0, 1), (Lane.COMPUTE, gradient)]
    forecast = forecast_of(*accesses)
    for lane, key in [*accesses, accesses[-1]]:
        forecast.note(lane, key)
    assert forecast.surprises == 1
    assert [forecast.next_use(KEYS[unit], 0) for unit in (0, 1)] == [3, 4]
    assert forecast.begin_step()


def test_a_step_that_leaves_out_an_access_was_not_as_recorded() -> None:
    forecast = forecast_of(*compute(*range(8)))
    for lane, key in compute(0, 1, 3, 4, 5, 6, 7):
        forecast.note(lane, key)
    assert not forecast.begin_step()
    assert forecast.surprises == 0


def test_what_is_announced_is_needed_now_by_the_update_only() -> None:
    forecast = forecast_of(*compute(0, 1, 2))
    forecast.set_agenda([[KEYS[2]]])
    assert forecast.next_use(KEYS[2], 0) == 0
    assert forecast.next_use(KEYS[2], 0, (Lane.COMPUTE,)) == 2


def test_what_the_plan_does_not_keep_stays_for_the_access_it_was_fetched_for() -> None:
    key, accesses = KEYS[0], [*compute(0, 1, 0), (Lane.UPDATE, KEYS[0])]
    forecast = Forecast()
    forecast.set_schedule(schedule_of(accesses), [False] * 4)
    assert forecast.next_use(key, 0) == LATER
    assert forecast.next_use(key, 0, planned=False) == 0
    assert forecast.next_use_below(key, 0, above=False) == LATER
    forecast.fetched(key)
    assert forecast.next_use(key, 0) == 0
    assert forecast.next_use_below(key, 0, above=False) == 0
    forecast.note(Lane.COMPUTE, key)
    assert forecast.next_use(key, 0) == LATER + 2


def test_what_the_computation_has_above_was_fetched_for_its_next_access() -> None:
    key, accesses = KEYS[0], [*compute(0, 1, 0), (Lane.UPDATE, KEYS[0])]
    forecast = Forecast()
    forecast.set_schedule(schedule_of(accesses), [True] * 4)
    assert forecast.next_use_below(key, 0, above=True) == 0
    forecast.fetched(key)
    assert forecast.next_use_below(key, 0, above=True) == 2, "the first it has there already"
    assert forecast.next_use_below(key, 0, above=False) == 0
    forecast.set_schedule(schedule_of(accesses), [True, True, True, False], [False] * 4)
    assert forecast.next_use_below(key, 0, above=True) == LATER + 3, "the update's, since the rest is served above"
    forecast.fetched(key)
    assert forecast.next_use_below(key, 0, above=True) == 3


def test_an_update_that_is_done_before_its_turn_does_not_come_again() -> None:
    early, late = PageKey(0, Kind.STATE), PageKey(1, Kind.STATE)
    gradients = [(Lane.COMPUTE, PageKey(unit, Kind.GRAD)) for unit in (0, 1)]
    forecast = forecast_of(*gradients, (Lane.UPDATE, early), (Lane.UPDATE, late))
    forecast.set_agenda([])
    for lane, key in [*gradients, (Lane.UPDATE, late)]:
        forecast.note(lane, key)
    assert [key for _, lane, key in forecast.upcoming(10) if lane is Lane.UPDATE] == [early]


def test_an_update_belongs_to_the_gradient_that_was_written_last() -> None:
    gradient, state = PageKey(0, Kind.GRAD), PageKey(0, Kind.STATE)
    forecast = forecast_of(*compute(0), (Lane.COMPUTE, gradient), (Lane.UPDATE, state))
    forecast.set_agenda([])
    for lane, key in [*compute(0), (Lane.COMPUTE, gradient), (Lane.UPDATE, state)]:
        forecast.note(lane, key)
    assert forecast.next_use(state, 0) == 5, "done for this step, though the computation has gone no further"
    for _ in range(2):
        forecast.begin_step()
        forecast.note(Lane.COMPUTE, KEYS[0])
        forecast.note(Lane.UPDATE, state)  # of the gradient before: the next one is still to come
        forecast.note(Lane.COMPUTE, gradient)
    assert forecast.next_use(state, 0) == 8


def test_from_the_beginning_again_everything_comes_though_updates_had_been_passed_over() -> None:
    gradient, state = PageKey(0, Kind.GRAD), PageKey(0, Kind.STATE)
    accesses = [*compute(0), (Lane.COMPUTE, gradient), (Lane.UPDATE, state), *compute(1)]
    forecast = forecast_of(*accesses)
    forecast.set_agenda([])
    for lane, key in accesses[:3]:
        forecast.note(lane, key)
    assert [key for _, _, key in forecast.upcoming(1)] == [KEYS[1]]
    forecast.rewind()
    assert [key for _, _, key in forecast.upcoming(3)] == [KEYS[0], gradient, KEYS[1]]


def test_what_is_updated_beside_an_evaluation_is_done_in_the_step() -> None:
    gradient, state = PageKey(0, Kind.GRAD), PageKey(0, Kind.STATE)
    forecast = forecast_of(*compute(0), (Lane.COMPUTE, gradient), (Lane.UPDATE, state))
    forecast.set_agenda([])
    for lane, key in [*compute(0), (Lane.COMPUTE, gradient)]:
        forecast.note(lane, key)
    forecast.beside(schedule_of(compute(1, 2))).note(Lane.UPDATE, state)
    assert forecast.next_use(state, 0) == 5
