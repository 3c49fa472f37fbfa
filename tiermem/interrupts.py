"""What an interrupt (Ctrl-C), or an error amid borrowed bytes, takes along; and what a signal handler may not ask.

Owns the look at a traceback, and at who is calling. Does not know who was interrupted, or what failed. Guarantees that
frames which an interrupt has ended hold nothing any more, whoever keeps the error; those of an error only where its
frames are told to, and that of a function which had not begun once somebody misses what it was given, if the
interpreter keeps the error, or it is being handled; and that a handler which asks for something in the middle of
something of ours is told so.

Why: the interactive interpreter and notebooks keep the last error (`sys.last_value`) until the next one, so its
traceback, so the frames in it and whatever these had: a lease of the pager's that had not been stored yet, or a view of
gathered parameters. Nobody could give that back, and the next update would wait for it for ever.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import ParamSpec, TypeVar

from tiermem.errors import TiermemError

P = ParamSpec("P")
T = TypeVar("T")

_OURS = ("tiermem", "swap")
# They use the public face as any program does.
_USERS = ("tiermem.cli", "tiermem.integrations")
# Between two functions of ours, where the inner one is none of dynamo's business (`unseen`).
_BETWEEN = "torch._dynamo.eval_frame"


def empty_frames(error: BaseException) -> None:
    """Clear the local variables of the frames below the caller's, if `error` is an interrupt.

    To be called where frames of ours begin. An error proper keeps them, for whoever looks for its cause.
    """
    if not isinstance(error, Exception):
        traceback.clear_frames(error.__traceback__)


def empty_all_frames(error: BaseException) -> None:
    """Clear the local variables of the frames below the caller's, of `error` and of its causes.

    Where these frames are ours and what they hold is lent: after an error of the disk training goes on, also in a
    notebook, which keeps the error.
    """
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__


def empty_kept_frames() -> None:
    """Clear the local variables of our own frames in interrupts that are being handled, or that the interpreter keeps.

    For those that came as a function of ours began, before that could see to it: what it was given is in its frame.
    """
    for error in _kept(sys.exception(), getattr(sys, "last_value", None)):
        if isinstance(error, Exception):
            continue
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if _module(frame).partition(".")[0] in _OURS:
                with contextlib.suppress(RuntimeError):  # it still runs: around whoever asks
                    frame.clear()


def _kept(*errors: object) -> Iterator[BaseException]:
    """Errors and those during whose handling they were raised, each once."""
    seen: set[int] = set()
    for error in errors:
        while isinstance(error, BaseException) and id(error) not in seen:
            seen.add(id(error))
            yield error
            error = error.__context__  # noqa: PLW2901 - the next one


def call_out(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call what belongs to others from the middle of something of ours: what it asks of us is welcome there."""
    return function(*args, **kwargs)


def refuse_amid() -> None:
    """Raise TiermemError if whoever asks has been called in the middle of something of ours, as a signal handler is.

    Python runs a handler between any two lines. Half of something is done there, and a lock may be held for it: who
    waited in the handler would wait for ever, and who changed something would change what is being changed.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the only way to see one's callers
    others = False  # whether the frame before, which this one has called, is theirs
    while frame is not None:
        module = _module(frame)
        if module.partition(".")[0] in _OURS and not module.startswith(_USERS):
            if others and frame.f_code is not call_out.__code__:
                raise TiermemError(
                    f"called in the middle of {module}.{frame.f_code.co_name}, as by a signal handler: half of that is "
                    "done. Have the handler set a flag, and the loop look at it between two steps, where runtime.commit"
                    "() and close() are possible; or have it raise an exception"
                )
            others = False
        elif module != _BETWEEN:
            others = True
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
