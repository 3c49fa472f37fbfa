"""A close that is refused, or fails before anything is closed, leaves the model to others."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tiermem.process import HomeProcess
from tiermem.runtime.closing import begin_to_close
from tiermem.zero3.calls import CallStack, Turn


class Busy(nn.Module):
    """Whatever else the thread is at: one that is in nothing of torch's has no turn any more, whatever it has taken."""

    def forward(self, ask: Any) -> None:
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join()


def test_values_that_cannot_be_had_leave_the_model_to_other_threads() -> None:
    def fail() -> None:
        raise OSError(5, "injected")

    stack, told = CallStack(HomeProcess(), Turn()), list[str | None]()
    scheduler = SimpleNamespace(stack=stack, backwards=set(), saved=SimpleNamespace(any_outstanding=False))
    house: Any = SimpleNamespace(scheduler=scheduler, coordinator=SimpleNamespace(wait_updates=fail))

    def ask() -> None:
        told.append(stack.try_take())
        if told[-1] is None:
            stack.leave()

    with pytest.raises(OSError, match="injected"):
        begin_to_close(house, restore_model=True)
    for refused in (False, True):
        if refused:
            assert begin_to_close(house, restore_model=False) == []
        Busy()(ask)
        assert (told[-1] is not None) == refused
