"""When "auto" updates under backward: how soon it stops, how long it waits, and that it asks for calm."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from tiermem.optim.choice import Choice


def course(kept: Callable[[Choice], bool], steps: int) -> list[bool]:
    """Whether each step updates early."""
    choice, seen = Choice(), []
    for _ in range(steps):
        seen.append(choice.early)
        choice = choice.after(kept=kept(choice))
    return seen


def waits(early: list[bool]) -> list[int]:
    """How many steps in a row were not early, each time but the last."""
    runs = [(now, len(list(run))) for now, run in itertools.groupby(early)]
    return [length for now, length in runs[:-1] if not now]


def test_one_step_in_eight_may_be_redone() -> None:
    kept = (number % 8 != 0 for number in itertools.count())
    assert all(course(lambda _: next(kept), 500))
    kept = (number % 7 != 0 for number in itertools.count())
    assert sum(course(lambda _: next(kept), 500)) < 250


def test_whoever_always_clips_is_asked_twice_and_no_more() -> None:
    assert course(lambda _: False, 5000) == [True] * 2 + [False] * 4998


def test_it_waits_longer_each_time_that_trying_fails_at_once_up_to_a_limit() -> None:
    assert waits(course(lambda choice: not choice.early, 6000)) == [16, 32, 64, 128, 256, 512, 1024, 1024, 1024, 1024]


def test_what_was_kept_for_long_is_tried_again_soon() -> None:
    numbers = itertools.count()

    def kept(choice: Choice) -> bool:
        number = next(numbers)
        return not choice.early if number < 300 else number not in (1100, 1101)

    assert waits(course(kept, 1300)) == [16, 32, 64, 128, 256, 16]


def test_calm_is_steps_in_a_row() -> None:
    kept = iter([False, False, *([True] * 15 + [False]) * 20])
    assert course(lambda _: next(kept), 322) == [True] * 2 + [False] * 320
