"""Which gradients an update has, and how a step ends: with a scheduler that only counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tiermem.errors import InvariantError, TiermemError
from tiermem.process import HomeProcess
from tiermem.runtime.ledger import GradientLedger
from tiermem.zero3.calls import Call, CallStack, Turn
from tiermem.zero3.conductor import Act
from tiermem.zero3.layout import Slot

# The trainable parameters of each unit; unit 1 has none.
UNITS = {0: (0, 1), 1: (), 2: (2, 3, 4)}
NUMBERS = [number for numbers in UNITS.values() for number in numbers]


class FakeScheduler:
    """The scheduler, its gradients and the gatherer in one: what there is, and what was asked for, in order."""

    def __init__(self) -> None:
        self.arrived: set[int] = set()
        self.asked: list[tuple[Any, ...]] = []
        self.kept_views: set[int] = set()
        self.gradients = self
        self.order = SimpleNamespace(has_begun=False, forget_contributions=lambda: self.asked.append(("cut short",)))
        self.stack = CallStack(HomeProcess(), Turn())
        self.lockstep: object = None
        self.saved = SimpleNamespace(leave_rest=lambda: self.asked.append(("leave rest",)))

    def numbers(self, unit: int) -> Sequence[int]:
        return [number for number in UNITS[unit] if number in self.arrived]

    def settle(self) -> None:
        self.asked.append(("settle",))

    def line_up(self, act: Act, alike: Callable[[], str]) -> None:
        self.asked.append(("line up", act, alike()))

    def forget_calls(self) -> None:
        self.asked.append(("forget calls",))

    def take_back(self, units: Iterable[int]) -> None:
        self.asked.append(("take back", *units))

    def require_free(self, unit: int) -> None:
        if unit in self.kept_views:
            raise TiermemError(f"unit {unit} cannot be updated")

    def forget(self, parameters: Sequence[int], *, updated: bool = False) -> None:
        self.asked.append(("forget", updated, *sorted(parameters)))
        self.arrived.difference_update(parameters)

    def drop_gradients(self) -> None:
        self.asked.append(("drop all",))
        self.arrived.clear()

    def finish_step(self, *, updated: bool) -> None:
        self.asked.append(("finish", updated))
        self.arrived.clear()
        self.order.has_begun = False


def begin(arrived: Iterable[int] = (), **marks: Sequence[int]) -> tuple[GradientLedger, FakeScheduler]:
    """In the middle of a step, with these gradients, `claimed` or `borrowed` (in this order) by updates."""
    scheduler: Any = FakeScheduler()
    ledger = GradientLedger(list(UNITS), scheduler)
    ledger.connect(scheduler)
    scheduler.arrived.update(arrived)
    scheduler.order.has_begun = bool(scheduler.arrived)
    for verb, numbers in marks.items():
        getattr(ledger, verb)(numbers)
    return ledger, scheduler


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["arrive", "borrow", "claim", "give back", "drop", "close"]),
            st.sets(st.sampled_from(NUMBERS)),
        ),
        max_size=12,
    )
)
def test_a_gradient_is_there_or_lent_or_gone_whatever_comes_in_whatever_order(
    deeds: list[tuple[str, set[int]]],
) -> None:
    ledger, scheduler = begin()
    state: dict[int, str] = {}
    scheduler.order.has_begun = True
    for deed, chosen in deeds:
        there, lent = ([number for number in chosen if state.get(number) == each] for each in ("there", "lent"))
        if deed == "arrive":
            scheduler.arrived |= chosen
            state |= {number: "there" for number in chosen if number not in state}
        elif deed == "borrow":
            ledger.borrowed(there)
            state |= dict.fromkeys(there, "lent")
        elif deed == "claim":
            ledger.claimed([*there, *lent])
            state |= dict.fromkeys([*there, *lent], "gone")
        elif deed == "give back":
            ledger.given_back([0], lent)
            state |= dict.fromkeys(lent, "there")
        elif deed == "drop" and there and "lent" not in state.values():
            ledger.drop(there)
            state = {number: each for number, each in state.items() if number not in there}
        elif deed == "close":
            left = {number: each for number, each in state.items() if each != "gone"}
            over = ledger.close_step(chosen, updated=True)
            assert over == chosen.isdisjoint(left)
            state = {} if over else left
            if over:  # an update that borrowed what no optimizer has is none
                ledger.given_back([0], NUMBERS)
                scheduler.order.has_begun = True
        check(ledger, state)


def slot_of(number: int) -> Slot:
    return Slot(number, (f"p{number}",), (1,), (1,), torch.float32, trainable=True, offset=0)


def check(ledger: GradientLedger, state: dict[int, str]) -> None:
    def are(*wanted: str) -> list[int]:
        return [number for number in NUMBERS if state.get(number) in wanted]

    assert [number for unit in UNITS for number in ledger.present(unit)] == are("there")
    assert ledger.unclaimed() == set(are("there", "lent"))
    places = [(unit, slot_of(number)) for unit, numbers in UNITS.items() for number in numbers]
    readable = [slot.parameter for unit, slot in places if ledger.is_readable(unit, slot, spent=False)]
    assert readable == are("there", "lent")
    for unit, slot in places:  # where updates are for good one that is used up is not said to be none
        refused = state.get(slot.parameter) == "gone"
        with pytest.raises(TiermemError, match="is used up") if refused else nullcontext():
            assert ledger.is_readable(unit, slot, spent=True) == (slot.parameter in readable)
    assert [unit for unit in UNITS if ledger.present(unit)] == [
        unit for unit, numbers in UNITS.items() if set(numbers) & set(are("there"))
    ]
    assert ledger.is_mid_step == bool(are("lent", "gone"))
    assert ledger.is_ending == bool(are("gone") and not are("there", "lent"))


def test_before_ranks_line_up_nothing_is_held_any_more() -> None:
    ledger, scheduler = begin()
    ledger.line_up(Act.STEP, lambda: "lr=1")
    ledger.line_up()
    lined_up = [[("settle",), ("line up", Act.STEP, "lr=1")], [("settle",), ("line up", Act.SETTLE, "")]]
    assert scheduler.asked == [*lined_up[0], *lined_up[1]]


def test_a_view_of_any_unit_that_is_about_to_change_is_an_error() -> None:
    ledger, scheduler = begin()
    scheduler.kept_views = {2}
    ledger.require_free([0, 1])
    with pytest.raises(TiermemError, match="unit 2 cannot"):
        ledger.require_free([0, 2])


def test_what_is_given_back_may_grow_again() -> None:
    ledger, scheduler = begin([0, 2], borrowed=[0, 2])
    ledger.given_back([0, 2], [0])
    assert scheduler.asked == [("take back", 0, 2)]
    assert ledger.unclaimed() == {0, 2}
    assert [unit for unit in UNITS if ledger.present(unit)] == [0]


@pytest.mark.parametrize(
    ("marks", "dropped", "asked"),
    [
        ({}, [0, 2], [("drop all",)]),
        ({}, [0], [("forget", False, 0)]),
        ({"borrowed": [2]}, [0], [("forget", False, 0)]),
        # Cut short, this step is no example of how many gradients one brings.
        ({"claimed": [2]}, [0], [("forget", False, 0), ("cut short",)]),
    ],
)
def test_others_keep_what_they_have_when_gradients_are_dropped(
    marks: dict[str, list[int]], dropped: list[int], asked: list[tuple[Any, ...]]
) -> None:
    ledger, scheduler = begin([0, 2], **marks)
    ledger.drop(dropped)
    assert scheduler.asked == asked


@pytest.mark.parametrize("updated", [False, True])
def test_a_step_ends_once_and_nobody_waits_for_what_no_optimizer_has(updated: bool) -> None:
    ledger, scheduler = begin([0, 2], claimed=[0])
    assert ledger.close_step({0, 1}, updated=updated)
    assert not ledger.close_step({0, 1}, updated=updated), "another optimizer's call has ended it"
    assert scheduler.asked == [("finish", updated)]
    assert not ledger.is_mid_step


@pytest.mark.parametrize("marks", [{}, {"borrowed": [2]}])
def test_a_step_waits_for_another_optimizers_share(marks: dict[str, list[int]]) -> None:
    ledger, scheduler = begin([1, 0, 2], **marks, claimed=[1, 0])
    assert not ledger.close_step({0, 1, 2}, updated=False)
    assert scheduler.asked == [("forget", True, 0, 1)], "their values have changed, whatever becomes of the others"
    assert ledger.unclaimed() == {2}
    scheduler.arrived.add(0)
    assert ledger.present(0) == [0], "the next one is nobody's yet"


def test_a_step_goes_on_behind_a_turn_of_one_optimizer_though_what_is_left_is_dropped() -> None:
    """What was computed for that turn is part of the step, but not if nothing but such turns ever comes."""
    ledger, scheduler = begin()
    scheduler.order.has_begun = True
    for _ in range(17):
        scheduler.asked.clear()
        scheduler.arrived |= {0, 2}
        ledger.claimed([0])
        assert not ledger.close_step({0, 2}, updated=True)
        ledger.drop([2])
        assert scheduler.asked[0] == ("forget", True, 0)
        if scheduler.asked[1] == ("drop all",):
            break
        assert scheduler.asked[1:] == [("forget", False, 2)]
    assert scheduler.asked[1] == ("drop all",)
    scheduler.arrived |= {0, 2}
    ledger.claimed([0, 2])
    assert ledger.close_step({0, 2}, updated=True)
    scheduler.order.has_begun, scheduler.arrived = True, {2}
    ledger.drop([2])
    assert scheduler.asked[-1] == ("drop all",), "nobody has had a turn in this one"


def test_a_call_that_has_used_nothing_is_no_turn() -> None:
    ledger, scheduler = begin([0, 2])
    assert not ledger.close_step({0, 2}, updated=True)
    ledger.drop([0, 2])
    assert scheduler.asked[-1] == ("drop all",), "the step begins again"


def test_what_was_claimed_in_a_step_whose_end_was_interrupted_is_not_so_in_the_next() -> None:
    ledger, scheduler = begin([0], claimed=[0])
    scheduler.order.has_begun = False
    assert not ledger.close_step({0}, updated=True)
    assert not ledger.is_mid_step


class Inside(nn.Module):
    """Calls something from inside its forward, or from a method that is no call of the module."""

    def forward(self, call: Callable[[], None]) -> None:
        call()

    def fit(self, call: Callable[[], None]) -> None:
        call()


@contextmanager
def calls(scheduler: FakeScheduler, *modules: nn.Module | None) -> Iterator[None]:
    scheduler.stack.calls = [Call(module) for module in modules]
    yield
    scheduler.stack.calls = []


def test_what_an_interrupt_left_is_let_go_of_but_for_a_call_that_goes_on() -> None:
    ledger, scheduler = begin()
    ledger.end_interrupted()
    assert scheduler.asked == [("leave rest",), ("forget calls",)]
    scheduler.asked.clear()
    outer, other = Inside(), Inside()
    with calls(scheduler, outer, None, other):
        outer(ledger.end_interrupted)
        other(ledger.end_interrupted)
        assert scheduler.asked == [], "it comes from inside of one of them"
        ledger.end_interrupted()
        Inside()(ledger.end_interrupted)
        outer.fit(ledger.end_interrupted)
    assert scheduler.asked == [("settle",)] * 3, "they are over, though nobody said so"


def test_what_several_computations_hold_together_is_not_what_an_interrupt_left() -> None:
    ledger, scheduler = begin()
    scheduler.lockstep = object()
    ledger.end_interrupted()
    with calls(scheduler, Inside()):
        ledger.end_interrupted()
    assert scheduler.asked == []


def test_norms_are_asked_for_one_by_one_or_together() -> None:
    ledger, scheduler = begin()
    several: Any = scheduler
    several.norm = torch.tensor
    several.are_known = lambda numbers: numbers == [3]
    several.read_norms = lambda numbers: [torch.tensor(-number) for number in numbers]
    assert [each.item() for each in ledger.norms([4, 2])] == [4, 2]
    assert [each.item() for each in ledger.read_norms([4, 2])] == [-4, -2]
    assert ledger.are_known([3])
    assert not ledger.are_known([2])


def test_without_a_scheduler_it_says_so() -> None:
    gatherer: Any = None
    with pytest.raises(InvariantError, match="before its scheduler was connected"):
        GradientLedger([0], gatherer).present(0)
