"""A runtime that nobody closed.

Owns what happens when one is collected, or is still open when the interpreter ends. Does not know why. Guarantees that
its threads end and its files go or stay as `Runtime.close` would have it, with a ResourceWarning, and that in a forked
child nothing is touched.
"""

from __future__ import annotations

import atexit
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType

from tiermem.process import HomeProcess, start_thread
from tiermem.runtime.house import House
from tiermem.runtime.storage import close_all
from tiermem.zero3.guards import ModelGuards


def abandon(house: House, guards: ModelGuards, home: HomeProcess) -> None:
    """Close a house whose runtime is gone. Called by a finalizer: on any thread, also as the interpreter ends."""
    if not home.is_here:
        return
    directories = ", ".join(map(str, house.config.swap_paths))

    def close() -> None:
        try:
            # Where the interpreter ends by an error, this is it: the other ranks are told.
            failure = getattr(sys, "last_value", None)
            leave, close_house = partial(house.conductor.close, failure), partial(house.close, remove=None)
            # Guarded before, too: whoever goes on training the model meanwhile would compute NaN.
            close_all([leave, guards.close, close_house, guards.close])
        except Exception as error:  # noqa: BLE001 - there is nobody to raise it to
            warnings.warn(f"closing the runtime over {directories}: {error}", ResourceWarning, stacklevel=2)

    try:
        warnings.warn(
            f"a tiermem runtime over {directories} was never closed; use `with tiermem.offload(...)` or call close()",
            ResourceWarning,
            stacklevel=2,
        )
    finally:  # also where warnings are errors
        if _is_amid_something(sys._getframe(1)):  # noqa: SLF001 - what `inspect.currentframe` is
            refusal = start_thread("tiermem-close", close)
            if refusal is not None:  # not here either: later, where nothing is going on
                atexit.register(close)
        else:
            close()


def _is_amid_something(frame: FrameType | None) -> bool:
    """Whether closing may need what is going on in `frame` to end first; it was interrupted to collect the garbage.

    That is so on threads that closing waits for: the pager's, the update's, a drive's. And where a lock may be held:
    one of ours (this may even be the model whose runtime is gone, which somebody still trains), or the one that all
    executors of the process share while they are given work.
    """
    if threading.current_thread().name.startswith(("tiermem-", "swap-")):
        return True
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in ("tiermem", "swap") or frame.f_code is ThreadPoolExecutor.submit.__code__:
            return True
        frame = frame.f_back
    return False
