"""An event loop that waits for threads and clocks only, never for files or sockets.

Owns how the loop sleeps and is woken: a lock, where asyncio's own loops write a byte into a socket and read it again.
Does not know messages or pages. Guarantees that a wake-up is never lost, that any number of them before the loop looks
are one, and that whoever rings goes on at once: it neither waits nor gives the interpreter lock up, and the loop, once
woken, asks for that lock once instead of three times. (With a thread that computes in Python each time may cost a
switch interval.)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence


class _Bell:
    """What `asyncio.BaseEventLoop` asks of its selector: to sleep until something happens or a time has passed."""

    def __init__(self) -> None:
        self._rung = threading.Lock()
        self._rung.acquire()

    def ring(self) -> None:
        """Wake the loop, or keep it from falling asleep. Any thread, also from a finalizer."""
        if self._rung.locked():
            try:
                self._rung.release()
            except RuntimeError:  # it has been rung meanwhile
                return

    def select(self, timeout: float | None) -> Sequence[object]:
        """Sleep until rung, for `timeout` seconds at most; there are no files to speak of."""
        if timeout is None:
            self._rung.acquire()
        elif timeout > 0:
            self._rung.acquire(timeout=min(timeout, threading.TIMEOUT_MAX))
        else:
            self._rung.acquire(blocking=False)
        return ()


class BellLoop(asyncio.BaseEventLoop):
    """Runs callbacks, timers, tasks and executors. The three names below are what asyncio has its loops fill in."""

    def __init__(self, turned: Callable[[], None]) -> None:
        """`turned()` is called in every turn of the loop, before the tasks: cheaper than a callback for each call."""
        super().__init__()
        self._selector = _Bell()
        self._turned = turned
        self.ring = self._selector.ring  # have the loop turn, now or after this turn; any thread, also a finalizer's

    def _process_events(self, event_list: Sequence[object]) -> None:  # noqa: ARG002 - `select` never finds any
        self._turned()

    def _write_to_self(self) -> None:
        self._selector.ring()
