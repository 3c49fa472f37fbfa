"""The module calls in progress, on each thread.

Owns the stack of calls with the units each of them holds. Does not gather or let go of anything. Guarantees that a
second thread that calls the model meanwhile is refused, and that who closes it knows whether another one is inside.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

import torch
from torch import nn

from tiermem.errors import TiermemError
from tiermem.process import HomeProcess, frames_of


class Turn:
    """Which thread is inside a call of the model: one at a time. `follow()`: see `Device`."""

    def __init__(self, follow: Callable[[], None] = lambda: None) -> None:
        self.follow = follow
        self._thread: dict[str, int] = {}  # its `setdefault` asks and sets in one

    def try_take(self) -> str | None:
        """Take the turn, unless another thread has it; then that one's name.

        Who is alive may have ended its call by an interrupt that no module saw. It is in nothing of torch then.
        """
        own = threading.get_ident()
        other = self._thread.setdefault("inside", own)
        name = next((thread.name for thread in threading.enumerate() if thread.ident == other != own), None)
        if name is None or not _is_within(other):
            self._thread["inside"] = own
            return None
        return name

    def take(self) -> None:
        """An outermost call begins. Raises TiermemError if another thread is inside one."""
        if (name := self.try_take()) is not None:
            raise TiermemError(
                f"the model was called in thread {threading.current_thread().name!r} while thread {name!r} was inside "
                "a call of it, or of close(); its parameters come and go for one thread at a time: put a lock around "
                "forward and backward"
            )

    def leave(self) -> None:
        """The outermost call of this thread has ended."""
        if self._thread.get("inside") == threading.get_ident():
            del self._thread["inside"]


class Call:
    """A module call in progress, or an operation that is treated as one: then there is no module.

    `gradless`: whether it was begun where no gradients are computed.
    """

    __slots__ = ("gradless", "module", "pushed", "units")

    def __init__(self, module: nn.Module | None) -> None:
        self.module = module
        self.units: list[int] = []
        self.pushed = False
        self.gradless = not torch.is_grad_enabled()


class CallStack(threading.local):
    """The calls in progress on this thread."""

    def __init__(self, home: HomeProcess, turn: Turn) -> None:
        """`home`: the process whose threads these are."""
        self.home = home
        self._turn = turn
        self.follow = turn.follow
        self.calls: list[Call] = []

    def begin(self, module: nn.Module | None, *, shared: bool) -> Call:
        """A call begins. `shared`: others may be in progress on other threads, which take turns."""
        call = Call(module)
        if not self.calls and not shared:
            self._turn.take()
        self.calls.append(call)
        self.follow()
        return call

    @property
    def gradless(self) -> bool:
        """Whether the outermost call in progress computes no gradients."""
        return bool(self.calls) and self.calls[0].gradless

    @property
    def goes_on(self) -> bool:
        """Whether whoever asks does so from inside one of them; those that an interrupt has ended are none."""
        return any(call.module is not None and _is_running(call.module) for call in self.calls)

    def try_take(self) -> str | None:
        """Have others refused, as in a call, until `leave`; or, if another thread is inside one, its name."""
        return self._turn.try_take()

    def leave(self) -> None:
        """Have others come in again, unless a call is in progress on this thread."""
        if not self.calls:
            self._turn.leave()

    def put_aside(self) -> Callable[[], None]:
        """Have no call in progress on this thread; returns what has these in progress again."""
        before, self.calls = self.calls, []

        def put_back() -> None:
            self.calls = before

        return put_back

    def end(self) -> Call:
        """The innermost call has ended."""
        self.follow()
        call = self.calls.pop()
        self.leave()
        return call


def _is_within(thread: int) -> bool:
    """Whether a thread is in something of torch's or ours, as in a call of a module."""
    modules = (str(frame.f_globals.get("__name__")) for frame in frames_of(thread))
    return any(module.partition(".")[0] in ("torch", "tiermem") for module in modules)


def _is_running(module: nn.Module) -> bool:
    """Whether a call of the module is on this thread's stack: what is asked then comes from inside of it."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the only way to see one's callers
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module:  # noqa: SLF001
            return True
        frame = frame.f_back
    return False
