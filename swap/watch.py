"""Whether this process was running while it waited: a stopped one (Ctrl-Z, a paused container or machine) was not.

Owns the doubt about a wait that has taken too long, the threads that a drive may keep, and how one waits for what
happens once. Does not know what that is. Guarantees that silence is put down to a drive only after the process has run,
and looked, for a while without a pause; so a drive that is really silent is found out that much later. That a thread
counts as ended when it has ended, whatever has become of those who waited for it; and that whoever waits is told,
whoever else was interrupted.

What the kernel had to say while the process was stopped its threads report as soon as they run again, and whoever has
waited meanwhile may come before them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

_LONGEST_GRACE = 3.0
_LATE = 1.0


class Happening:
    """Something that happens once, and waits for it.

    Not a `threading.Event`: who waits for one takes a lock in code of Python's own, and an interrupt (Ctrl-C) right
    after that leaves it locked. Who is to set it then waits for ever, and so does whoever waits again.
    """

    __slots__ = ("_gate", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._is_set

    def set(self) -> None:
        """It has. May be said twice."""
        self._is_set = True
        self._open()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has happened, for `timeout` seconds at most; whether it has."""
        if not self.is_set():
            try:
                self._gate.acquire(timeout=-1 if timeout is None else timeout)
            finally:
                if self.is_set():  # let the next one through
                    self._open()
        return self._is_set

    def _at_fork_reinit(self) -> None:
        """In a forked child nobody waits for what `threading` asks this of."""

    def _open(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._gate.release()


class WatchedThread(threading.Thread):
    """A daemon that may be kept by a drive. Used in the process that started it.

    Python 3.11 and 3.12 take a thread for ended if an interrupt comes while it is joined.
    """

    def __init__(self, target: Callable[[], object], *, name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._over = Happening()
        self._started = Happening()  # as `threading` calls it; the event there would be waited for by whoever starts it

    def run(self) -> None:
        """Carry out the target."""
        try:
            super().run()
        finally:
            self._over.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end; it was started."""
        if self._over.wait(timeout):
            super().join()

    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self.ident is not None and not self._over.is_set()


class Watch:
    """Counts how long somebody has been looking without a pause. Not thread-safe."""

    def __init__(self, stall_seconds: float) -> None:
        self._grace = grace(stall_seconds)
        self._since = self._last = float("-inf")

    def look(self, now: float) -> float:
        """Look; return the seconds to go on looking before silence means something, 0 or less if that is so now."""
        if now - self._last > self._grace + _LATE:
            self._since = now
        self._last = now
        return self._since + self._grace - now


def grace(stall_seconds: float) -> float:
    """Seconds of a running process without an answer, beyond `stall_seconds` of any."""
    return min(stall_seconds, _LONGEST_GRACE)


def join(threads: Sequence[threading.Thread], stall_seconds: float) -> None:
    """Wait until they have ended, for `stall_seconds` together, and a while longer in case the process was stopped."""
    for seconds in (stall_seconds, grace(stall_seconds)):
        until = time.monotonic() + min(seconds, threading.TIMEOUT_MAX)
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
