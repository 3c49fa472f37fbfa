"""How Ctrl-C, SIGTERM and a terminal that goes away (SIGHUP) end a command.

Owns the handlers of these signals. Does not know what a command has to close. Guarantees that the first signal raises
KeyboardInterrupt in the command, and that those which come while it is being handled are ignored: whoever presses
Ctrl-C twice, or is told twice by torchrun, would otherwise cut the closing and removing of swap files short. An
interrupt that somebody has swallowed is handled, so that the next signal raises again.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

INTERRUPTED = 130
AGAIN_SECONDS = 0.01


def take_signals() -> None:
    """Have signals interrupt from now on.

    A Ctrl-C that the caller ignores, as of a job in the background, stays so, and what `nohup` ignores.
    """
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, interrupt)
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    sys.unraisablehook = interrupt_again


def leave_signals(code: int) -> None:
    """All is closed, and the interpreter about to end with `code`: what comes now has nothing to interrupt."""
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is interrupt:
            signal.signal(number, signal.SIG_IGN if code == INTERRUPTED else signal.SIG_DFL)


def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
    """Let a signal end a command, unless one is just ending it."""
    handled = sys.exc_info()[1]
    while handled is not None and not isinstance(handled, KeyboardInterrupt):
        handled = handled.__context__
    if handled is None:
        raise KeyboardInterrupt


def interrupt_again(dropped: sys.UnraisableHookArgs) -> None:
    """Repeat soon an interrupt that came where Python drops exceptions, as in a `__del__`; say all others as ever."""
    if dropped.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(dropped)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether `error` is what someone made of an interrupt, as Python does while a class is being made."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None
