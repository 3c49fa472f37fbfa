"""The order of a step: what it expects next, and what of the past it forgets."""

from __future__ import annotations

import pytest

from tiermem.pager.page import Kind, PageKey
from tiermem.pager.schedule import Step
from tiermem.zero3.order import Access, OrderRecorder, Phase
from tiermem.zero3.turns import Turns

FORWARD, BACKWARD, GRADIENT = Phase.FORWARD, Phase.BACKWARD, Phase.GRADIENT
STEP = ((0, FORWARD), (1, FORWARD), (1, BACKWARD), (1, GRADIENT), (2, GRADIENT), (0, BACKWARD), (0, GRADIENT))


def after(*done: tuple[int, Phase], apart: tuple[int, ...] = ()) -> OrderRecorder:
    """A second step that has done so much of what the first one did."""
    order = OrderRecorder(apart)
    for unit, phase in STEP:
        order.access(unit, phase)
    order.finish()
    for unit, phase in done:
        order.access(unit, phase)
    return order


def accesses(order: OrderRecorder) -> list[tuple[int, Phase]]:
    return [(access.unit, access.phase) for access in order.finish().accesses]


def evaluate(order: OrderRecorder, *units: int) -> None:
    for unit in units:
        order.access(unit, FORWARD, gradless=True)


def test_the_next_unit_is_that_of_the_next_access_that_gathers():
    assert [after(*STEP[:done]).upcoming() for done in range(8)] == [0, 1, 1, 0, 0, 0, None, None]


def test_the_next_gradients_are_announced_where_nothing_is_gathered_before():
    found = [after(*STEP[:done]).upcoming_gradients() for done in range(8)]
    assert found == [None, None, None, 1, 2, None, 0, None]
    found = [after(*STEP[:done], apart=(2,)).upcoming_gradients() for done in range(8)]
    assert found == [None, None, None, 1, None, None, 0, None]
    found = [after(*STEP[:done], apart=(0, 1)).upcoming_gradients() for done in range(8)]
    assert found == [2, 2, 2, 2, 2, None, None, None]


def test_nothing_is_expected_behind_a_surprise_until_the_next_step():
    for wrong in ((1, BACKWARD), (0, FORWARD)):
        order = after(STEP[0], wrong, STEP[2])
        assert order.upcoming() is None
        assert order.upcoming_gradients() is None
        order.finish()
        assert order.upcoming() == 0


def test_gradients_that_stay_away_or_come_besides_lead_nobody_off_the_course():
    """Which come may depend on the data, and then on the rank; what is gathered next has to be the same on all."""
    order = after(*STEP[:3], (2, GRADIENT), (1, GRADIENT))
    assert order.upcoming_gradients() is None, "nobody expects what comes out of turn"
    assert order.upcoming() == 0
    order = after(*STEP[:3], (3, GRADIENT), STEP[5])
    assert (order.upcoming(), order.upcoming_gradients()) == (None, 0)
    order.access(0, FORWARD)
    assert (order.upcoming(), order.upcoming_gradients()) == (None, None)


def test_ranks_of_which_some_have_no_gradients_expect_the_same_turn():
    ranks = OrderRecorder(), OrderRecorder()
    for number in range(12):
        for rank, order in enumerate(ranks):
            for unit in (0, 1 + number % 2):
                order.access(unit, FORWARD)
                assert number < 4 or order.upcoming() == (1 + number % 2 if unit == 0 else None)
            if rank == 0 or number % 3:
                order.access(0, GRADIENT)
            order.finish()
    kinds = [[access.unit for access in order.expected.accesses if access.phase is FORWARD] for order in ranks]
    assert kinds == [[0, 1], [0, 1]]


def test_steps_of_one_process_that_differ_in_their_gradients_take_turns():
    """As those in which one part of the model is frozen, and then another: each was expected to be like the other."""
    order = OrderRecorder(alone=True)
    for number in range(12):
        for unit in (0, 1):
            order.access(unit, FORWARD)
        if number >= 4:
            assert order.upcoming_gradients() == number % 2
        order.gradient(number % 2, number % 2)
        order.contribution(number % 2)
        assert number < 4 or order.all_arrived((number % 2,))
        order.finish()


def test_what_belongs_to_the_step_is_expected_at_its_place_whatever_gradients_came():
    order = OrderRecorder()
    for gradients in (1, 1, 0, 2):
        order.access(0, FORWARD)
        for unit in range(gradients):
            order.access(unit, GRADIENT)
        evaluate(order, 2, 3)
        if gradients != 1:
            evaluate(order, 2, 3)
        order.access(1, FORWARD)
        assert [access.unit for access in order.finish().accesses if access.phase is FORWARD] == [0, 2, 3, 1]


def test_steps_that_take_turns_are_expected_in_theirs():
    """As those of a discriminator and a generator: what had just been was expected, and planned for, each time."""
    order, found = OrderRecorder(), []
    for number in range(10):
        unit = 1 if number % 3 else 0
        found.append(order.upcoming() == unit)
        for phase in Phase:
            order.access(unit, phase)
        order.contribution(number)
        assert order.finish() is order.expected
    assert found == [False, False, True, False, False, True, True, True, True, True]
    assert dict(order.expected.contributions) == {8: 1}, "those of the last step of the kind"


@pytest.mark.parametrize(("count", "shorter"), [(5, (4,)), (12, (5, 11)), (40, (9, 19, 29, 39))])
def test_a_shorter_step_now_and_then_is_no_turn_unless_it_comes_twice_in_its_place(count, shorter):
    """The last one before all data have been seen has fewer micro-batches: where that is rare nothing is foreseen."""
    turns, foreseen = Turns[str](str), []
    for number in range(count):
        kind = "short" if number in shorter else "full"
        foreseen.append(turns.expected == kind)
        turns.end(kind)
    wrong = {0} | {number + behind for number in shorter for behind in (0, 1)}
    assert [number for number, right in enumerate(foreseen) if not right] == sorted(wrong & set(range(count)))


def test_no_more_is_kept_than_examples_of_the_last_steps():
    turns = Turns[int](int)
    for number in range(100):
        turns.end(number)
        assert turns.expected == number
    assert len(turns._latest) == len(turns._numbers) == 16
    for _ in range(16):
        turns.end(7)
    assert turns._latest == {max(turns._numbers): (7, 7)}


def test_an_evaluation_may_use_other_units_in_every_batch():
    order = after(*STEP[:2])
    evaluate(order, 0, 1, 0, 3, 1)
    assert order.upcoming() is None
    for unit, phase in STEP[2:]:
        order.access(unit, phase)
    assert accesses(order) == list(STEP)


def test_nothing_is_expected_as_long_as_an_evaluation_goes_on():
    order = after()
    evaluate(order, 0, 1)
    assert order.upcoming() == 1, "so the step begins, too"
    evaluate(order, 0)
    assert order.upcoming() is None
    order.access(0, FORWARD)
    assert order.upcoming() == 1


def test_who_wants_to_know_is_told_what_an_evaluation_uses_over_and_over_and_its_end():
    order, told = after(*STEP[:2]), []
    order.evaluates = told.append
    evaluate(order, 0, 1, 2)
    assert told == [Step.PAUSES], "once each they may belong to the step"
    evaluate(order, 1, 2, 0, 1)
    assert told[1:] == [[Access(1, FORWARD), Access(2, FORWARD)]], "from the first that is used again on"
    order.access(2, FORWARD)
    order.access(1, BACKWARD)
    assert told[2:] == [Step.GOES_ON]
    evaluate(order, 0, 0)
    assert told[3:] == [Step.PAUSES, [Access(0, FORWARD)]]
    order.finish()
    assert told[5:] == [Step.GOES_ON], "whoever evaluates between backward and step begins the next step behind it"
    evaluate(order, 0)
    assert told[6:] == [Step.BEGINS], "with this it may have begun"
    evaluate(order, 0)
    order.access(0, FORWARD)
    assert told[7:] == [[Access(0, FORWARD)], Step.BEGINS, Step.BEGINS]


def test_who_wants_to_know_is_told_of_rest_where_no_step_has_begun():
    order, told = after(), []
    order.evaluates = told.append
    order.rest()
    order.access(0, FORWARD)
    order.rest()
    assert told == [Step.RESTS, Step.BEGINS]


def test_a_batch_evaluated_between_steps_has_begun_none_so_that_it_rests():
    """As where averaged parameters are written, a batch is evaluated with them, and the others are written again."""
    order, told = after(), []
    order.evaluates = told.append
    evaluate(order, 0, 1)
    order.rest()
    assert told == [Step.BEGINS, Step.RESTS]
    order.access(0, FORWARD)
    assert told[2:] == [Step.PAUSES, Step.BEGINS, Step.BEGINS]
    order.rest()
    assert len(told) == 5, "now one has"


def test_who_was_told_of_rest_is_told_of_its_end_whatever_comes_next():
    """Also where a teacher is used in each step as expected, and where others are evaluated, over and over."""
    order, told = OrderRecorder(), []
    for _ in range(3):
        told.clear()
        order.evaluates = told.append
        evaluate(order, 3, 4)
        order.rest()
        order.access(0, FORWARD)
        order.finish()
    assert told == [Step.BEGINS, Step.RESTS, Step.PAUSES]
    evaluate(order, 3, 3)
    told.clear()
    for _ in range(2):
        order.rest()
        evaluate(order, 3, 3)
    assert told == [Step.RESTS, Step.PAUSES] * 2


def test_an_evaluation_goes_round_in_what_it_uses_now():
    """Text is encoded twice, an image denoised fifty times; with a decoder, what encodes is used once for each text."""
    order, told = after(*STEP[:2]), []
    order.evaluates = told.append
    evaluate(order, 0, 0, 1, 2, 1, 2, 1, 2)
    assert told == [Step.PAUSES, [Access(0, FORWARD)], [Access(1, FORWARD), Access(2, FORWARD)]]
    evaluate(order, 0, 1, 2, 1, 2, 0, 1, 2)
    assert len(told) == 3, "once between others it is no round of its own"
    evaluate(order, 0, 0)
    assert told[3:] == [[Access(0, FORWARD)]]
    order.access(1, BACKWARD)
    assert told[4:] == [Step.GOES_ON]
    evaluate(order, 0)
    assert told[5:] == [Step.PAUSES], "of what went round before nothing is known any more"


def test_behind_an_evaluation_units_used_without_gradients_belong_to_the_step_again():
    order = OrderRecorder()
    evaluate(order, 0, 0)
    order.access(1, FORWARD)
    evaluate(order, 0)
    assert accesses(order) == [(1, FORWARD), (0, FORWARD)]
    evaluate(order, 0, 0)
    order.access(1, FORWARD)
    evaluate(order, 0)
    assert accesses(order) == [(1, FORWARD), (0, FORWARD)]


def test_a_batch_evaluated_now_and_then_is_no_part_of_the_step():
    """Wherever it is evaluated, those who are told have the step go on where it was, and so does what is expected."""
    for place in range(len(STEP) + 1):
        order, told = after(*STEP[:place]), []
        order.evaluates = told.append
        evaluate(order, 0, 1, 2)
        for position, (unit, phase) in enumerate(STEP[place:], place):
            order.access(unit, phase)
            assert order.upcoming() == after(*STEP[: position + 1]).upcoming()
        assert accesses(order) == list(STEP)
        expected = [Step.PAUSES, Step.GOES_ON] if place else [Step.BEGINS, Step.BEGINS, Step.BEGINS]
        assert told == expected, place


def test_what_is_used_without_gradients_belongs_to_the_step_from_the_second_in_a_row_on():
    order, told = after(), []
    for number in range(4):
        evaluate(order, 3, 4)
        if number == 3:
            order.evaluates = told.append
        for unit, phase in STEP[:4]:
            order.access(unit, phase)
        evaluate(order, 3, 4)
        for unit, phase in STEP[4:]:
            order.access(unit, phase)
        teacher = [(3, FORWARD), (4, FORWARD)] if number else []
        assert accesses(order) == [*teacher, *STEP[:4], *teacher, *STEP[4:]]
    assert told == [Step.PAUSES], "it was expected, and nothing is to go on from elsewhere behind it"
    for _ in range(2):
        for unit, phase in STEP:
            order.access(unit, phase)
        assert accesses(order) == list(STEP), "what does not come again is forgotten at once"


def test_more_micro_batches_bring_more_of_what_belongs_to_the_step():
    order, batch = OrderRecorder(), [(3, FORWARD), (0, FORWARD), (0, BACKWARD)]
    for count in (1, 3, 2):
        for _ in range(count):
            evaluate(order, 3)
            order.access(0, FORWARD)
            order.access(0, BACKWARD)
        assert accesses(order) == batch * count


def test_what_belongs_to_the_step_is_expected_within_an_evaluation_at_its_place():
    """Of a teacher that comes first, and what is evaluated before it, nothing says where one ends."""
    order, student = OrderRecorder(), [(0, FORWARD), (0, BACKWARD)]
    for evaluated in ((), (0, 1, 0, 1), (), (0, 1), (0, 3, 4, 0), ()):
        evaluate(order, *evaluated, 3, 4)
        order.access(0, FORWARD)
        assert order.upcoming() == (None if order.expected is None else 0)
        order.access(0, BACKWARD)
        assert accesses(order) == [(3, FORWARD), (4, FORWARD), *student]


def test_what_belongs_to_a_step_that_begins_again_stays_in_its_place():
    order = OrderRecorder()
    for begins_again in (False, True, False):
        for last in (not begins_again, True):
            evaluate(order, 3)
            order.access(0, FORWARD)
            assert order.upcoming() == (None if order.expected is None else 0)
            order.access(0, BACKWARD)
            if last:
                break
            order.begin_again()
        assert dict(order.finish().gradless) == {0: (Access(3, FORWARD),)}


def test_what_an_evaluation_keeps_for_backward_ends_it():
    order = OrderRecorder()
    evaluate(order, 0)
    order.touch(PageKey(0, Kind.ACTIVATION))
    evaluate(order, 0)
    assert accesses(order) == [(0, FORWARD)] * 2


def test_a_step_that_begins_again_expects_what_the_last_one_began_with():
    order = after(*STEP[:2], (0, BACKWARD))
    assert order.upcoming() is None
    order.begin_again()
    assert order.upcoming() == 0
    for unit, phase in STEP:
        order.access(unit, phase)
    assert accesses(order) == list(STEP)


def test_a_step_that_begins_again_is_no_evaluation():
    order = OrderRecorder()
    evaluate(order, 0, 0)
    order.begin_again()
    evaluate(order, 0)
    assert accesses(order) == [(0, FORWARD)]


def test_activations_of_what_was_dropped_are_forgotten():
    order = after(STEP[0], STEP[2])
    order.touch(PageKey(0, Kind.ACTIVATION))
    order.begin_again()
    assert order.finish().touches == ()
    order.touch(PageKey(0, Kind.ACTIVATION))
    assert order.finish().touches == ((0, PageKey(0, Kind.ACTIVATION)),)
    assert order.finish().touches == ()


def test_gradients_have_arrived_where_there_are_as_many_as_before_and_one_at_least():
    order = OrderRecorder()
    order.contribution(7)
    order.finish()
    assert not order.all_arrived((8,)), "it has none"
    assert not order.all_arrived((7, 8))
    order.contribution(7)
    assert order.all_arrived((7, 8))
    order.contribution(7)
    assert not order.all_arrived((7, 8)), "this step brings more, and nobody knows how many"


def test_a_step_without_gradients_says_nothing_of_the_next():
    order = OrderRecorder()
    order.contribution(7)
    order.finish()
    assert order.finish().contributions == {7: 1}
    order.contribution(7)
    assert order.all_arrived((7,))


def test_whether_batches_went_together_is_of_one_step():
    order = OrderRecorder()
    for expected in (True, False):
        for _ in range(1 + expected):
            order.gradient(0, 7)
            order.contribution(7)
        step = order.finish()
        assert step.together == expected
        assert step.accesses == (Access(0, GRADIENT),)


def test_what_is_computed_with_gradients_and_never_goes_backward_is_not_recorded_for_ever():
    """A validation without `torch.no_grad`: behind it the step is expected again that came before it."""
    order = after()
    for _ in range(20_000):
        order.access(0, FORWARD)
        order.access(1, FORWARD)
        order.touch(PageKey(0, Kind.ACTIVATION, 0))
    assert order.position < 20_000
    assert order.upcoming() is None
    evaluate(order, 0, 1, 0, 1)
    for unit, phase in STEP:
        order.access(unit, phase)
        if phase is GRADIENT:
            order.contribution(unit)
    step = order.finish()
    assert [(access.unit, access.phase) for access in step.accesses] == list(STEP)
    assert step.touches == ()
    assert step.contributions == {0: 1, 1: 1, 2: 1}, "these are the step's own"
    assert order.upcoming() == 0
    assert accesses(order) == [], "the record has begun anew"


def test_a_step_with_many_more_micro_batches_is_recorded():
    order = after()
    for unit, phase in STEP * 64:
        order.access(unit, phase)
    assert accesses(order) == list(STEP * 64)


def test_a_second_step_that_long_is_what_steps_are_now():
    """A step with few micro-batches, as at the end of an epoch, and from then on ones with very many."""
    order = after()
    for expected in (STEP, STEP * 3000):
        for unit, phase in STEP * 3000:
            order.access(unit, phase)
        step = order.finish()
        assert [(access.unit, access.phase) for access in step.accesses] == list(expected)


def test_where_no_step_ever_ends_the_record_does(monkeypatch):
    """Features of a frozen model, outside of `torch.no_grad`, or a part of it within."""
    monkeypatch.setattr("tiermem.zero3.order._MOST", 100)
    for within in ((), (1,)):
        order = OrderRecorder()
        for _ in range(200):
            evaluate(order, *within)
            order.access(0, FORWARD)
        assert order.position == 100
        assert order.finish() is None
        assert order.expected is None
