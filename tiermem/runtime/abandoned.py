"""A runtime that nobody closed.

Owns what happens when one is collected, or is still open when the interpreter ends. Does not know why. Guarantees that
its threads end and its files go or stay as `Runtime.close` would have it, with a ResourceWarning, and that in a forked
child nothing is touched.
"""

from __future__ import annotations

import sys
import threading
import warnings

from tiermem.process import HomeProcess
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
            close_all([lambda: house.conductor.close(failure), lambda: house.close(remove=None), guards.close])
        except Exception as error:  # noqa: BLE001 - there is nobody to raise it to
            warnings.warn(f"closing the runtime over {directories}: {error}", ResourceWarning, stacklevel=2)

    try:
        warnings.warn(
            f"a tiermem runtime over {directories} was never closed; use `with tiermem.offload(...)` or call close()",
            ResourceWarning,
            stacklevel=2,
        )
    finally:  # also where warnings are errors
        # The garbage may have been collected on a thread that closing waits for: the pager's, the update's, a drive's.
        if threading.current_thread().name.startswith(("tiermem-", "swap-")):
            threading.Thread(target=close, name="tiermem-close").start()
        else:
            close()
