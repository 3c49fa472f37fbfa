"""How far updates may lag; those that are kept until somebody waits for them, or that a commit holds back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiermem.runtime.queues import BackwardThrottle, GatedQueue, LazyQueue


class Update:
    def __init__(self, unit: int, protection: object = None) -> None:
        self.unit = unit
        self.protection = protection


class Queue:
    """Carries updates out at once."""

    def __init__(self) -> None:
        self.done: list[Update] = []

    def prepare(self) -> None: ...

    def start(self, update: Any) -> None:
        self.done.append(update)

    def wait(self, unit: int) -> None: ...

    def wait_all(self) -> None: ...

    def pending(self, unit: int) -> bool:
        return False

    hurry = raise_failed = withdraw = wait


@pytest.mark.parametrize("error", [OSError("the commit failed: no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("wait", ["wait", "wait_all"])
def test_an_update_that_could_not_begin_is_done_the_next_time_somebody_waits(error: BaseException, wait: str) -> None:
    errors: list[BaseException] = []

    def wait_open() -> None:
        if errors:
            raise errors.pop()

    carried = Queue()
    lazy = LazyQueue(GatedQueue(carried, wait_open, lambda _: None), lambda: None)  # type: ignore[arg-type]
    updates = [Update(3), Update(3), Update(5)]
    for update in updates:
        lazy.start(update)  # type: ignore[arg-type]
    assert carried.done == []
    errors.append(error)
    arguments = (3,) if wait == "wait" else ()
    with pytest.raises(type(error)):
        getattr(lazy, wait)(*arguments)
    assert carried.done == []
    assert lazy.pending(3)
    lazy.wait_all()
    assert carried.done == updates, "each once, in their order"
    assert not lazy.pending(3)


def test_kept_updates_under_a_protection_are_forgotten_with_it() -> None:
    """As when what they waited for had failed, and the step is given up."""
    carried, withdrawn = Queue(), []
    carried.withdraw = withdrawn.append  # type: ignore[method-assign]
    lazy = LazyQueue(carried, lambda: None)  # type: ignore[arg-type]
    protection = object()
    counting = Update(3)
    for update in (counting, Update(3, protection), Update(5, protection)):
        lazy.start(update)  # type: ignore[arg-type]
    lazy.withdraw(protection)  # type: ignore[arg-type]
    assert withdrawn == [protection]
    assert lazy.pending(3)
    assert not lazy.pending(5)
    lazy.wait_all()
    assert carried.done == [counting]


def test_what_the_computation_need_not_hold_is_let_go_before_a_kept_update_begins() -> None:
    order: list[Any] = []
    carried: Any = Queue()
    carried.start = order.append
    lazy, update = LazyQueue(carried, lambda: order.append("let go")), Update(3)
    lazy.start(update)  # type: ignore[arg-type]
    lazy.wait(3)
    assert order == ["let go", update]


def test_an_update_is_told_of_when_no_commit_is_under_way_and_before_it_begins() -> None:
    order: list[Any] = []
    carried: Any = Queue()
    carried.start = order.append
    update: Any = Update(3)
    GatedQueue(carried, lambda: order.append("open"), order.append).start(update)
    assert order == ["open", 3, update]


class Lagging(Queue):
    """Carries an update out when somebody waits for it, or by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.left: set[int] = set()
        self.waited: list[int] = []

    def wait(self, unit: int) -> None:
        self.waited.append(unit)
        self.left.discard(unit)

    def pending(self, unit: int) -> bool:
        return unit in self.left


def throttle(queue: Any, *, agreed: bool = False) -> BackwardThrottle:
    """Of units of ten bytes each; two of them may lag, and each second one's update begins early."""
    coordinator: Any = SimpleNamespace(
        unit_needed=None,
        late=SimpleNamespace(known_since=None),
        may_start_early=lambda unit: unit % 2 == 0,
        gradients_complete=lambda unit: unit % 2 == 0,
    )
    return BackwardThrottle(coordinator, queue, dict.fromkeys(range(6), 10), limit=20, agreed=agreed)


def test_backward_waits_for_the_update_that_lags_longest_and_for_no_more_than_it_must() -> None:
    queue = Lagging()
    held = throttle(queue)

    def complete(unit: int) -> bool:
        queue.left.add(unit)
        return held.gradients_complete(unit)

    assert [complete(unit) for unit in (5, 4)] == [False, True]
    complete(5)
    assert queue.waited == [], "it counts once, however often it is complete"
    complete(3)
    assert queue.waited == [5]
    queue.left.remove(3)
    complete(2)
    assert queue.waited == [5], "one has ended meanwhile"
    complete(1)
    assert queue.waited == [5, 4]


def test_ranks_that_update_as_they_can_ask_nobody() -> None:
    for agreed, expected in ((True, [True, False]), (False, [True, True])):
        assert [throttle(Lagging(), agreed=agreed).may_update(unit) for unit in (0, 1)] == expected
