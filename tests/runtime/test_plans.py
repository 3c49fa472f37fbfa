"""What is planned behind a step, also where an interrupt comes amid that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiermem.look_ahead import LookAhead
from tiermem.runtime.ledger import Steps
from tiermem.runtime.plans import StepPlans
from tiermem.zero3.order import Access, Phase, StepOrder

ORDER = StepOrder((Access(0, Phase.FORWARD),))


class Neighbours:
    """Pager, planner, counters and look-ahead in one; whoever `interrupted` names is interrupted, once."""

    def __init__(self, interrupted: str | None = None) -> None:
        self.interrupted = interrupted
        self.look_ahead = LookAhead(7, 7, "given")
        self.acts_as = "forward"
        self.followed: list[tuple[Any, int]] = []
        self.begun = self.steps = self.waited_in = 0
        self.waits = SimpleNamespace(begin_step=self._begin_waits)

    def _begin_waits(self) -> None:
        self.waited_in += 1

    def _come_to(self, place: str) -> None:
        if place == self.interrupted:
            self.interrupted = None
            raise KeyboardInterrupt

    def arrivals(self, _: StepOrder) -> dict[int, Any]:
        return {}

    def plan(self, order: StepOrder, *_: Any) -> Any:
        self._come_to("plan")
        return order

    def set_schedule(self, schedule: Any, *, look_ahead: int) -> None:
        self._come_to("set_schedule")
        self.followed.append((schedule, look_ahead))
        self._come_to("behind")

    def begin_anew(self, *_: Any) -> None:
        self._come_to("begin_anew")

    def begin_step(self) -> None:
        self.begun += 1

    def step_closed(self, seconds: float) -> None:
        assert seconds == 0.5

    def step(self) -> Any:
        self.steps += 1
        return SimpleNamespace(seconds=0.5)


def plans_with(neighbours: Any) -> StepPlans:
    return StepPlans(*[neighbours] * 5)


def test_a_step_is_planned_once_and_again_where_the_look_ahead_changes() -> None:
    neighbours = Neighbours()
    plans = plans_with(neighbours)
    for _ in range(3):
        plans.close_step(ORDER)
    assert neighbours.followed == [(ORDER, 7)]
    neighbours.look_ahead = LookAhead(9, 7, "tried")
    plans.close_step(ORDER)
    assert neighbours.followed == [(ORDER, 7), (ORDER, 9)]
    assert (neighbours.begun, neighbours.steps) == (3, 4)
    assert neighbours.waited_in == 5  # the first step begins when there are plans at all


@pytest.mark.parametrize("interrupted", ["begin_anew", "plan", "set_schedule"])
def test_what_was_interrupted_is_planned_behind_the_next_step(interrupted: str) -> None:
    neighbours = Neighbours(interrupted)
    plans = plans_with(neighbours)
    with pytest.raises(KeyboardInterrupt):
        plans.close_step(ORDER)
    plans.close_step(ORDER)
    assert neighbours.followed == [(ORDER, 7)]


def test_behind_a_plan_whose_making_was_interrupted_the_one_before_is_made_again() -> None:
    neighbours, other = Neighbours(), StepOrder((Access(1, Phase.FORWARD),))
    plans = plans_with(neighbours)
    plans.close_step(ORDER)
    neighbours.interrupted = "behind"
    with pytest.raises(KeyboardInterrupt):
        plans.close_step(other)
    plans.close_step(ORDER)
    assert neighbours.followed == [(ORDER, 7), (other, 7), (ORDER, 7)]


def test_a_look_ahead_whose_trial_was_interrupted_is_tried_behind_the_next_step() -> None:
    neighbours = Neighbours()
    plans = plans_with(neighbours)
    plans.close_step(ORDER)
    neighbours.look_ahead, neighbours.interrupted = LookAhead(9, 7, "tried"), "set_schedule"
    with pytest.raises(KeyboardInterrupt):
        plans.close_step(ORDER)
    plans.close_step(ORDER)
    assert neighbours.followed == [(ORDER, 7), (ORDER, 9)]


def test_a_step_counts_whose_planning_was_interrupted() -> None:
    scheduler = SimpleNamespace(order=SimpleNamespace(expected=ORDER))
    ledger: Any = SimpleNamespace(
        scheduler=scheduler,
        line_up=lambda *_: None,
        require_free=lambda: None,
        close_step=lambda *_, **__: True,
    )
    done = SimpleNamespace(skipped=False)
    coordinator: Any = SimpleNamespace(owned={0}, step=lambda *_, **__: done)
    queue: Any = SimpleNamespace(pending=lambda _: False)
    steps = Steps(coordinator, ledger, queue, plans_with(Neighbours("plan")))
    source: Any = None
    with pytest.raises(KeyboardInterrupt):
        steps.step(source)
    assert steps.number == 1
    assert steps.step(source) is done
    assert steps.number == 2


def test_updates_that_are_left_are_hurried_so_that_forward_finds_them_in_its_order() -> None:
    order = StepOrder(tuple(Access(unit, Phase.FORWARD) for unit in (0, 1, 2, 1, 3)))
    ledger: Any = SimpleNamespace(
        scheduler=SimpleNamespace(order=SimpleNamespace(expected=order)),
        line_up=lambda *_: None,
        require_free=lambda: None,
        close_step=lambda *_, **__: True,
    )
    coordinator: Any = SimpleNamespace(owned={0}, step=lambda *_, **__: SimpleNamespace(skipped=False))
    hurried: list[int] = []
    queue: Any = SimpleNamespace(pending=lambda unit: unit != 2, hurry=hurried.append)
    source: Any = None
    Steps(coordinator, ledger, queue, plans_with(Neighbours())).step(source)
    assert hurried == [3, 1, 0], "whoever was hurried last is next"
