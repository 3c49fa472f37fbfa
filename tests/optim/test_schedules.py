"""When units are started, and what is learned from how that went."""

from __future__ import annotations

import pytest

from tiermem.errors import ConfigError
from tiermem.optim.schedules import ForwardSchedule, make_schedule

NAMES = ("step", "forward", "backward", "auto")


@pytest.mark.parametrize("room", [True, False])
def test_backward_starts_at_once_what_can_be_started(room: bool) -> None:
    asked: dict[str, list[int]] = {name: [] for name in NAMES}

    def complete(name: str, unit: int) -> bool:
        return make_schedule(name).gradients_complete(unit, lambda given: asked[name].append(given) or room)

    began = {name: [unit for unit in (2, 1) if complete(name, unit)] for name in NAMES}
    early = [2, 1] if room else []
    assert began == {"step": [], "forward": [], "backward": early, "auto": early}
    assert asked == {"step": [], "forward": [], "backward": [2, 1], "auto": [2, 1]}


def test_the_step_waits_in_one_schedule_only() -> None:
    assert [name for name in NAMES if make_schedule(name).waits] == ["step"]


@pytest.mark.parametrize("name", ["backward", "auto"])
def test_a_step_in_which_one_unit_could_be_started_early_is_no_forward(name: str) -> None:
    """Whichever it was; one that another rank is against, so that nobody was asked to start it, could not."""
    schedule = make_schedule(name)
    seen = []
    for rooms in ((True, False), (False, True), (), (False, False)):
        for room in rooms:
            schedule.gradients_complete(1, lambda _, room=room: room)
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
            schedule.gradients_complete(1, lambda _, room=room: room)
        schedule.stepped(kept=True)
        seen.append(schedule.acts_as)
    assert seen == ["backward", "forward", "backward", "backward"]


def test_auto_is_backward_until_too_much_has_to_be_taken_back() -> None:
    schedule = make_schedule("auto")
    for kept in (False, True, False):
        assert schedule.acts_as == "backward"
        assert schedule.gradients_complete(1, lambda _: True)
        schedule.stepped(kept=kept)
    assert schedule.acts_as == "forward"
    assert not schedule.gradients_complete(1, lambda _: True)
    assert schedule.keeps_gradients


def test_names() -> None:
    assert type(make_schedule("auto", worthwhile=False)) is ForwardSchedule
    assert make_schedule("auto").name == "auto"
    with pytest.raises(ConfigError, match="sideways"):
        make_schedule("sideways")
