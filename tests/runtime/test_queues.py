"""Updates that are kept until somebody waits for them."""

from __future__ import annotations

from typing import Any

import pytest

from tiermem.runtime.queues import GatedQueue, LazyQueue


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
