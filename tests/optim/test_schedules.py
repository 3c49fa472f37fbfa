"""When units are started, told by a fake that only writes down."""

from __future__ import annotations

import warnings

import pytest

from tiermem.errors import ConfigError
from tiermem.optim.schedules import ForwardSchedule, make_schedule


class Diary:
    def __init__(self, *, clipping: bool = False) -> None:
        self.clipping = clipping
        self.entries: list[object] = []

    def start(self, unit: int) -> None:
        self.entries.append(unit)

    def wait_all(self) -> None:
        self.entries.append("wait")


def a_step(name: str, diary: Diary) -> list[object]:
    schedule = make_schedule(name)
    for unit in (2, 1):
        schedule.gradients_complete(unit, diary)
    diary.entries.append("step")
    schedule.step([unit for unit in (0, 1, 2) if unit not in diary.entries], diary)
    return diary.entries


def test_step_does_everything_inside() -> None:
    assert a_step("step", Diary()) == ["step", 0, 1, 2, "wait"]


def test_forward_starts_in_forward_order_and_returns() -> None:
    assert a_step("forward", Diary()) == ["step", 0, 1, 2]


def test_backward_starts_at_once_and_the_rest_at_the_step() -> None:
    assert a_step("backward", Diary()) == [2, 1, "step", 0]


def test_backward_with_clipping_waits_for_the_norm() -> None:
    with pytest.warns(UserWarning, match="max_grad_norm"):
        assert a_step("backward", Diary(clipping=True)) == ["step", 0, 1, 2]


def test_the_warning_comes_once() -> None:
    schedule, diary = make_schedule("backward"), Diary(clipping=True)
    with pytest.warns(UserWarning, match="max_grad_norm"):
        schedule.gradients_complete(0, diary)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.gradients_complete(1, diary)


def test_backward_twice_in_a_step_is_refused_and_fine_in_the_next() -> None:
    schedule, diary = make_schedule("backward"), Diary()
    schedule.gradients_complete(0, diary)
    with pytest.raises(ConfigError, match="accumulate"):
        schedule.gradients_complete(0, diary)
    schedule.step([], diary)
    schedule.gradients_complete(0, diary)
    assert diary.entries == [0, 0]


def test_names() -> None:
    assert isinstance(make_schedule("auto"), ForwardSchedule)
    with pytest.raises(ConfigError, match="sideways"):
        make_schedule("sideways")
