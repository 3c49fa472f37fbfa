"""What an interrupt (Ctrl-C), or an error amid borrowed bytes, takes along.

Owns the look at a traceback. Does not know who was interrupted, or what failed. Guarantees that frames which an
interrupt has ended hold nothing any more, whoever keeps the error; those of an error only where its frames are told to,
and that of a function which had not begun once somebody misses what it was given, if the interpreter keeps the error,
or it is being handled.

Why: the interactive interpreter and notebooks keep the last error (`sys.last_value`) until the next one, so its
traceback, so the frames in it and whatever these had: a lease of the pager's that had not been stored yet, or a view of
gathered parameters. Nobody could give that back, and the next update would wait for it for ever.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator

_OURS = ("tiermem", "swap")


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
            if frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
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
