"""Stalls on hand-made timelines are put down to what caused them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.overlap import Cause, EdgeUse, Wait, explain_stalls
from tiermem.timeline import COMPUTE_LANE, RANKS_LANE, STALL, STEP_LANE, UPDATE_LANE, Event

PAGE = "unit 3 param tile 0"
READ, WRITE = "swap->host", "host->swap"


def step(start: float, end: float) -> Event:
    return Event("step", STEP_LANE, start, end, {})


def stall(start: float, end: float, *pages: str) -> Event:
    return Event(STALL, COMPUTE_LANE, start, end, {"waits": pages})


def unit(name: str, start: float, end: float) -> Event:
    return Event(name, COMPUTE_LANE, start, end, {})


def move(lane: str, start: float, end: float, name: str = "another page") -> Event:
    return Event(name, lane, start, end, {})


def only_wait(*events: Event) -> Wait:
    (wait,) = explain_stalls([step(0.0, 10.0), unit("forward layers.3", 4.0, 9.0), *events]).waits
    return wait


def test_an_edge_that_had_been_idle_could_have_looked_ahead() -> None:
    wait = only_wait(stall(5.0, 6.0, PAGE), move(READ, 5.0, 6.0, PAGE))
    assert wait == Wait("forward layers.3", READ, Cause.LOOK_AHEAD, 1.0, 1)


def test_an_edge_that_was_busy_all_along_lacks_bandwidth() -> None:
    wait = only_wait(stall(5.0, 6.0, PAGE), move(READ, 3.0, 5.5), move(READ, 4.0, 6.0, PAGE))
    assert (wait.edge, wait.cause) == (READ, Cause.BANDWIDTH)


def test_a_move_that_waited_for_write_back_lacked_room() -> None:
    wait = only_wait(stall(5.0, 6.0, PAGE), move(WRITE, 4.9, 5.6), move(READ, 5.6, 6.0, PAGE))
    assert (wait.edge, wait.cause) == (READ, Cause.BUDGET)


def test_a_late_move_without_write_back_before_it_is_not_the_budgets_fault() -> None:
    wait = only_wait(stall(5.0, 6.0, PAGE), move(WRITE, 5.8, 6.0), move(READ, 5.6, 6.0, PAGE))
    assert wait.cause is Cause.LOOK_AHEAD


def test_waiting_while_the_update_computes_is_put_down_to_it() -> None:
    wait = only_wait(stall(5.0, 6.0), move(UPDATE_LANE, 4.0, 5.3), move(UPDATE_LANE, 5.4, 6.0), move(READ, 5.0, 6.0))
    assert (wait.edge, wait.cause) == ("", Cause.UPDATE)


def test_waiting_for_an_update_that_waits_for_its_tiles_lacks_bandwidth() -> None:
    wait = only_wait(stall(5.0, 6.0), move(UPDATE_LANE, 5.0, 5.1), move(READ, 5.0, 5.9))
    assert (wait.edge, wait.cause) == (READ, Cause.BANDWIDTH)


def rank_stall(start: float, end: float) -> Event:
    return Event(STALL, COMPUTE_LANE, start, end, {"waits": (), "for": RANKS_LANE})


def test_ranks_that_were_waited_for_are_put_down_to_them() -> None:
    wait = only_wait(rank_stall(5.0, 6.0), move(RANKS_LANE, 5.2, 6.0, "gather a"), move(READ, 5.0, 6.0))
    assert (wait.edge, wait.cause) == (RANKS_LANE, Cause.RANKS)
    assert only_wait(rank_stall(5.0, 6.0)).cause is Cause.RANKS


def test_ranks_that_were_waited_for_because_of_this_ranks_own_disk_are_not() -> None:
    wait = only_wait(rank_stall(5.0, 6.0), move(RANKS_LANE, 5.9, 6.0, "gather a"), move(READ, 5.0, 5.9))
    assert (wait.edge, wait.cause) == (READ, Cause.BANDWIDTH)


def test_a_page_that_was_waited_for_while_ranks_exchanged_is_not_put_down_to_them() -> None:
    assert only_wait(stall(5.0, 6.0, PAGE), move(RANKS_LANE, 5.0, 6.0, "reduce a")).cause is Cause.OTHER


def test_what_nothing_explains_is_said_to_be_unexplained() -> None:
    assert only_wait(stall(5.0, 6.0, PAGE)).cause is Cause.OTHER
    assert only_wait(stall(5.0, 5.0, PAGE)).cause is Cause.OTHER


def test_stalls_of_one_kind_are_one_line_and_the_longest_comes_first() -> None:
    report = explain_stalls(
        [
            step(0.0, 10.0),
            step(10.0, 20.0),
            unit("forward a", 0.0, 2.0),
            unit("backward a", 5.0, 9.0),
            stall(0.0, 0.5, PAGE),
            move(READ, 0.0, 0.5, PAGE),
            stall(1.0, 1.5, PAGE),
            move(READ, 1.0, 1.5, PAGE),
            stall(6.0, 9.0, PAGE),
            move(READ, 6.0, 9.0, PAGE),
            stall(9.5, 9.75, PAGE),
        ]
    )
    assert [(wait.during, wait.seconds, wait.stalls) for wait in report.waits] == [
        ("backward a", 3.0, 1),
        ("forward a", 1.0, 2),
        ("the rest of the step", 0.25, 1),
    ]
    assert (report.steps, report.seconds, report.stall_seconds) == (2, 20.0, 4.25)
    assert list(report.by_cause()) == [Cause.LOOK_AHEAD, Cause.OTHER]
    assert "2 steps, 20 s; the computation waited 4.25 s (21 %)" in report.to_lines()[0]
    assert any("in 1 wait during " in line for line in report.to_lines())
    assert any("s that looking further ahead" in line for line in report.to_lines())


def test_what_lies_outside_the_steps_is_left_out() -> None:
    report = explain_stalls([stall(0.0, 1.0, PAGE), move(READ, 0.0, 3.0, PAGE), step(2.0, 4.0), stall(4.5, 5.0)])
    assert report.waits == ()
    assert report.edges == (EdgeUse(READ, 1.0, 1.0),)
    assert explain_stalls([stall(0.0, 1.0)]).to_lines() == ["the timeline holds no whole step"]


def test_what_lies_in_the_first_step_before_anything_was_computed_is_left_out() -> None:
    """The first step is counted from the beginning of the run: the pages are made in it."""
    first, second = step(0.0, 10.0), step(10.0, 14.0)
    computed = [unit("forward layers.0", 8.0, 9.0), unit("forward layers.0", 11.0, 12.0)]
    making = [move(WRITE, 1.0, 7.0), stall(2.0, 3.0)]
    report = explain_stalls([*making, *computed, first, second, stall(8.0, 8.5, PAGE), move(WRITE, 8.5, 9.5)])
    assert (report.steps, report.seconds, report.stall_seconds) == (2, 6.0, 0.5)
    assert report.edges == (EdgeUse(WRITE, 1.0, 1.0),)
    later = explain_stalls([unit("forward layers.0", 0.0, 1.0), step(0.5, 10.0), unit("forward layers.0", 8.0, 9.0)])
    assert later.seconds == 9.5, "the record begins in the middle: nothing is known of a making"


def test_the_hidden_part_of_an_edge_is_what_nobody_waited_for() -> None:
    report = explain_stalls([step(0.0, 10.0), move(READ, 1.0, 3.0), move(READ, 2.0, 5.0), stall(4.0, 6.0)])
    (use,) = report.edges
    assert (use.busy_seconds, use.hidden_seconds, use.hidden_share) == (4.0, 3.0, 0.75)
    assert json.loads(json.dumps(report.to_dict()))["edges"] == [
        {"name": READ, "busy_seconds": 4.0, "hidden_seconds": 3.0}
    ]


_spans = st.tuples(st.integers(0, 40), st.integers(1, 6))


@given(
    st.lists(_spans, max_size=6),
    st.lists(st.tuples(st.sampled_from([READ, WRITE, UPDATE_LANE]), _spans, st.booleans()), max_size=12),
)
def test_the_causes_add_up_to_the_stalls(
    stalls: list[tuple[int, int]], moves: list[tuple[str, tuple[int, int], bool]]
) -> None:
    events = [step(0.0, 30.0)]
    events += [stall(start, start + length, PAGE) for start, length in stalls]
    events += [move(lane, start, start + length, PAGE if own else "x") for lane, (start, length), own in moves]
    report = explain_stalls(events)
    expected = sum(length for start, length in stalls if start < 30)
    assert sum(report.by_cause().values()) == pytest.approx(report.stall_seconds) == pytest.approx(expected)
    assert sum(wait.stalls for wait in report.waits) == sum(start < 30 for start, _ in stalls)
    for use in report.edges:
        assert 0.0 <= use.hidden_seconds <= use.busy_seconds <= 30.0
