"""Why a rank has left: last words, in the store of torch.distributed.

Owns the names of these words, and the patience with whoever keeps the store, who may be the one that is gone. Does not
know process groups. Guarantees that nobody waits for the store longer than a few seconds, whatever has become of it.

The store answers in its own time: a call that its keeper does not answer, because the process is stopped or its machine
is off, has no limit. So every call is a daemon thread's, and is waited for no longer than that.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# How long those who notice that somebody is gone wait for each other's word, seconds. A rank in the middle of a long
# computation notices late and is then among those who are named as silent.
_WORD_SECONDS = 5.0
_LOOK_SECONDS = 0.05
LONGEST_TEXT = 2000


class Words:
    """The words of one group of ranks, of which this is number `rank`."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        """`name`: the same on every rank, and of no other group that uses the same store; may be changed."""
        self.name = name
        self._rank = rank
        self._size = size

    def leave(self, reason: str) -> None:
        """Say why this rank goes. Raises nothing."""
        store = _store()
        if store is not None:
            _within(_WORD_SECONDS, lambda: store.set(f"{self.name}/{self._rank}", reason[:LONGEST_TEXT]))

    def read(self, seconds: float) -> dict[int, str]:
        """What the others have left, by rank; waits up to `seconds` for those who have not noticed yet."""
        store, found = _store(), dict[int, str]()
        seconds = min(_WORD_SECONDS, seconds)
        until = time.monotonic() + seconds

        def look() -> None:
            missing = [rank for rank in range(self._size) if rank != self._rank]
            while missing and time.monotonic() < until:
                for rank in list(missing):
                    key = f"{self.name}/{rank}"
                    if store.check([key]):
                        found[rank] = store.get(key).decode(errors="replace")
                        missing.remove(rank)
                if missing:
                    time.sleep(_LOOK_SECONDS)

        if store is not None:
            _within(seconds, look)
        return dict(found)


def _within(seconds: float, action: Callable[[], None]) -> None:
    """Do it, or leave it to itself after `seconds`. What the store raises is no news: its keeper is gone."""

    def quietly() -> None:
        with contextlib.suppress(RuntimeError):
            action()

    thread = threading.Thread(target=quietly, name="tiermem-words", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more of them are allowed, or the interpreter is ending
        quietly()
    else:
        thread.join(seconds)


def _store() -> Any:
    """The store of torch.distributed; None: that is closed."""
    with contextlib.suppress(RuntimeError, ValueError):
        return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - as in ranks.py
    return None
