"""When units are started, told by a fake that only writes down."""

from __future__ import annotations

import pytest

from tiermem.errors import ConfigError
from tiermem.optim.schedules import ForwardSchedule, make_schedule


class Diary:
    def __init__(self, *, room: bool = True) -> None:
        self.room = room
        self.entries: list[object] = []

    def start(self, unit: int) -> None:
        self.entries.append(unit)

    def start_early(self, unit: int) -> bool:
        if self.room:
            self.entries.append(unit)
        return self.room

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


@pytest.mark.parametrize("name", ["backward", "auto"])
def test_where_nothing_can_be_started_early_the_step_starts_it(name: str) -> None:
    assert a_step(name, Diary(room=False)) == ["step", 0, 1, 2]


@pytest.mark.parametrize("name", ["backward", "auto"])
def test_a_step_in_which_one_unit_could_be_started_early_is_no_forward(name: str) -> None:
    """Whichever it was; one that another rank is against, so that nobody was asked to start it, could not."""
    schedule = make_schedule(name)
    seen = []
    for rooms in ((True, False), (False, True), (), (False, False)):
        for room in rooms:
            schedule.gradients_complete(1, Diary(room=room))
        if not rooms:
            schedule.refused()
        schedule.stepped(kept=True)
        seen.append(schedule.acts_as)
    assert seen == ["backward", "backward", "forward", "forward"]


@pytest.mark.parametrize("name", ["backward", "auto"])
def test_what_is_planned_is_what_the_last_step_could_do(name: str) -> None:
    schedule = make_schedule(name)
    seen = []
    for room in (None, False, True, None):  # None: the first step, of which nothing is known
        if room is not None:
            schedule.gradients_complete(1, Diary(room=room))
        schedule.stepped(kept=True)
        seen.append(schedule.acts_as)
    assert seen == ["backward", "forward", "backward", "backward"]


def test_auto_is_backward_until_too_much_has_to_be_taken_back() -> None:
    schedule, diary = make_schedule("auto"), Diary()
    for kept in (False, True, False):
        assert schedule.acts_as == "backward"
        assert schedule.gradients_complete(1, diary)
        schedule.stepped(kept=kept)
    assert schedule.acts_as == "forward"
    assert not schedule.gradients_complete(1, diary)
    assert schedule.keeps_gradients


def test_names() -> None:
    assert type(make_schedule("auto", worthwhile=False)) is ForwardSchedule
    assert make_schedule("auto").name == "auto"
    with pytest.raises(ConfigError, match="sideways"):
        make_schedule("sideways")
