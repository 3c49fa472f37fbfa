"""Signals at every place where Python runs their handlers: between two instructions of its own, behind a call."""

from __future__ import annotations

import dis
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# Behind these the interpreter looks for signals.
_LOOKS = {code for name, code in dis.opmap.items() if name in ("RESUME", "JUMP_BACKWARD") or name.startswith("CALL")}
MODULES = ("tiermem", "swap", "threading", "concurrent", "queue", "contextlib")


class Signals:
    """A trace function that calls `handle(place)` at the place of this number, on the thread that sets it.

    Places are counted in these modules only.
    """

    def __init__(self, number: int, handle: Callable[[str], None], modules: tuple[str, ...] = MODULES) -> None:
        self.left = number
        self._handle, self._modules = handle, modules
        self._before: dict[int, int] = {}  # of each frame, the instruction before

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith(self._modules):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        before = self._before.pop(id(frame), None)
        if event == "opcode":
            self._before[id(frame)] = frame.f_code.co_code[frame.f_lasti]
            if before in _LOOKS:
                self.left -= 1
                if self.left == 0:
                    sys.settrace(None)
                    self._handle(f"{frame.f_globals['__name__']}:{frame.f_lineno}")
        return self


def interrupt(place: str) -> None:
    """What Ctrl-C does."""
    raise KeyboardInterrupt(place)


def interrupted(function: Callable[[], object], number: int, modules: tuple[str, ...] = MODULES) -> bool:
    """Call the function, with an interrupt at the place of this number; False if it ends before that."""
    signals = Signals(number, interrupt, modules)
    sys._getframe().f_trace_opcodes = True  # Python 3.12 asks as tracing begins whether any frame wants them
    try:
        sys.settrace(signals)
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return signals.left <= 0


def interrupted_everywhere(make: Callable[[], Callable[[], object]], stride: int = 1) -> Iterator[int]:
    """Interrupt what `make` gives at one place after the other; yields the place behind each."""
    for number in itertools.count(1, stride):
        if not interrupted(make(), number):
            break
        yield number


def has_ended(thread: threading.Thread) -> bool:
    """Whether a thread ends, within a minute, whose beginning was interrupted; one that never began has none to come.

    Between getting its number and being "started", for `join`, it may lose its turn.
    """
    until = time.monotonic() + 60
    while thread.ident is not None and time.monotonic() < until:
        try:
            thread.join(60)
        except RuntimeError:
            time.sleep(0.001)
        else:
            return not thread.is_alive()
    return thread.ident is None
