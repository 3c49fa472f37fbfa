"""What an interrupt (Ctrl-C), or an error amid borrowed bytes, takes along.

Owns the look at a traceback. Does not know who was interrupted, or what failed. Guarantees that frames which an
interrupt has ended hold nothing any more, whoever keeps the error; those of an error only where its frames are told to,
and that of a function which had not begun once somebody misses what it was given, if the interpreter keeps the error.

Why: the interactive interpreter and notebooks keep the last error (`sys.last_value`) until the next one, so its
traceback, so the frames in it and whatever these had: a lease of the pager's that had not been stored yet, or a view of
gathered parameters. Nobody could give that back, and the next update would wait for it for ever.
"""

from __future__ import annotations

import contextlib
import sys
import traceback

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
    """Clear the local variables of our own frames in an interrupt that the interpreter keeps.

    For one that came as a function of ours began, before that could see to it: what it was given is in its frame.
    """
    kept = getattr(sys, "last_value", None)
    if not isinstance(kept, BaseException) or isinstance(kept, Exception):
        return
    for frame, _ in traceback.walk_tb(kept.__traceback__):
        if frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
            with contextlib.suppress(RuntimeError):  # it still runs: around whoever asks
                frame.clear()
