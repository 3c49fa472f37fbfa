"""Copies between host memory and a device: who is next, and who is told that it has arrived.

Owns the copies of one direction from the moment they are asked for until their end, on a thread of its own. Does not
know how bytes travel: it is given a function that launches a copy and answers with a `Flight`. Guarantees that each
copy ends once, with success or with the error of its launch or landing, that a copy somebody waits for overtakes
those that were asked for ahead of time, and that closing lets what was asked for end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from tiermem.errors import TiermemError
from tiermem.memory.arena import Frame
from tiermem.process import begin

Done = Callable[[BaseException | None], None]

# Launched at one time: the next one is under way while the end of the first is noticed.
_IN_FLIGHT = 2


class Flight(Protocol):
    """A copy on its way."""

    def remaining(self) -> float:
        """Seconds after which to look again; 0.0 when it has arrived. Raises what went wrong on the way."""

    def land(self) -> None:
        """Called once, when it has arrived. Raises what went wrong."""


class Copy:
    """One copy of the first `nbytes` bytes of a frame into another; `promote` lets it overtake."""

    __slots__ = ("done", "nbytes", "source", "target", "urgent")

    def __init__(self, source: Frame, target: Frame, nbytes: int, *, urgent: bool, done: Done) -> None:
        self.source = source
        self.target = target
        self.nbytes = nbytes
        self.urgent = urgent
        self.done = done

    def promote(self) -> None:
        """Somebody waits for it now: it overtakes those that nobody waits for. Any thread, never waits."""
        self.urgent = True

    def stalled(self) -> None:
        """Never: a device that has failed says so in the next call, with an error."""


def start_lines(*directions: tuple[str, Callable[[Copy], Flight]]) -> list[CopyLine]:
    """A line for each (name, launch), or none: where the thread of one cannot be started those before it are closed."""
    lines: list[CopyLine] = []
    try:
        for name, launch in directions:
            lines.append(CopyLine(name, launch))
    except BaseException:
        for line in lines:
            line.close()
        raise
    return lines


class CopyLine:
    """One direction. `start` may be called from any thread and never waits."""

    def __init__(self, name: str, launch: Callable[[Copy], Flight]) -> None:
        """`launch(copy)` is called on the line's thread; an error it raises ends that copy."""
        self._launch = launch
        # Not a condition, which may stay locked after an interrupt of whoever closes (`tiermem/future.py` says why).
        self._lock = threading.Lock()
        self._asked: SimpleQueue[Copy | None] = SimpleQueue()
        self._closed = False
        # The line's own.
        self._waiting: deque[Copy] = deque()
        self._flying: deque[tuple[Copy, Flight]] = deque()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            begin(self._thread)
        except BaseException:  # an interrupt: the thread may have begun, or be about to
            self._asked.put(None)
            raise

    def start(self, source: Frame, target: Frame, nbytes: int, *, urgent: bool, done: Done) -> Copy:
        """Copy; `done(error)` is called once, on the line's thread. Raises TiermemError after `close`."""
        copy = Copy(source, target, nbytes, urgent=urgent, done=done)
        with self._lock:
            if self._closed:
                raise TiermemError("a copy was asked of a device that is closed")
            self._asked.put(copy)
        return copy

    def close(self) -> None:
        """Take no more copies; wait for the end of those under way. Idempotent."""
        with self._lock:
            self._closed = True
            self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            idle = not self._waiting and not self._flying
            if idle and self._is_ending:
                return
            self._listen(None if idle else 0.0)
            copy = self._next() if len(self._flying) < _IN_FLIGHT else None
            if copy is not None:
                self._take_off(copy)
            elif self._flying:
                self._attend()

    def _listen(self, seconds: float | None) -> None:
        """Take in what has been asked since; wait for it that many seconds, None: until something is."""
        try:
            asked = self._asked.get(timeout=seconds)
            while True:
                if asked is None:
                    self._is_ending = True
                else:
                    self._waiting.append(asked)
                asked = self._asked.get_nowait()
        except Empty:
            return

    def _next(self) -> Copy | None:
        """Take the copy that is next: the oldest one somebody waits for, else the oldest."""
        if not self._waiting:
            return None
        copy = next((copy for copy in self._waiting if copy.urgent), self._waiting[0])
        self._waiting.remove(copy)
        return copy

    def _take_off(self, copy: Copy) -> None:
        try:
            self._flying.append((copy, self._launch(copy)))
        except Exception as error:  # noqa: BLE001 - told to whoever asked for the copy
            copy.done(error)

    def _attend(self) -> None:
        """Land the copy launched first if it has arrived; else wait a while, or until another one may be launched."""
        copy, flight = self._flying[0]
        error: BaseException | None = None
        try:
            seconds = flight.remaining()
            if seconds > 0:
                if not self._waiting or len(self._flying) >= _IN_FLIGHT:
                    self._listen(seconds)
                return
            flight.land()
        except Exception as raised:  # noqa: BLE001 - told to whoever asked for the copy
            error = raised
        self._flying.popleft()
        copy.done(error)
