"""The module calls in progress, on each thread, and what watches them.

Owns the stack of calls with the units each of them holds. Does not gather or let go of anything. Guarantees that the
watch over operations (`borrow.py`) begins with the outermost call of a thread and ends with it, or when what an
interrupt left behind is cleared away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

from torch import nn
from torch.overrides import TorchFunctionMode

from tiermem.process import HomeProcess


class Call:
    """A module call in progress, or an operation that is treated as one: then there is no module."""

    __slots__ = ("module", "pushed", "units")

    def __init__(self, module: nn.Module | None) -> None:
        self.module = module
        self.units: list[int] = []
        self.pushed = False


class CallStack(threading.local):
    """The calls in progress on this thread."""

    def __init__(self, home: HomeProcess, watch: Callable[[], TorchFunctionMode | None]) -> None:
        """`home`: the process whose threads these are. `watch()`: what to enter around an outermost call, or None."""
        self.home = home
        self.calls: list[Call] = []
        self._watch = watch
        self._watching = ExitStack()

    def begin(self, module: nn.Module | None) -> Call:
        """A call begins."""
        call = Call(module)
        if not self.calls:
            watching = self._watch()
            if watching is not None:
                self._watching.enter_context(watching)
        self.calls.append(call)
        return call

    def end(self) -> Call:
        """The innermost call has ended."""
        call = self.calls.pop()
        if not self.calls:
            self._watching.close()
        return call
