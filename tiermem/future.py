"""What another thread has been asked to do, for those who wait for its end.

Owns one result or error to come, and the gate before it. Does not know who brings it. Guarantees that a wait ends with
that result, with that error, or with an interrupt (Ctrl-C) that leaves nothing locked.

Why not `concurrent.futures.Future`, of which this is the part that is needed: who waits for one takes a lock in code
that is Python's own (`threading.Condition`), and an interrupt between the taking and the `with` that gives it back
leaves it locked. Whoever has the result to tell, the pager's loop for one, then waits for ever; one in about a thousand
interrupts of short waits did that. A `with` over a lock that is C's has no such gap.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Generic, TypeVar

T = TypeVar("T")


class Future(Generic[T]):
    """A result or an error, set once and from any thread; the methods are those of `concurrent.futures.Future`."""

    __slots__ = ("__weakref__", "_callbacks", "_error", "_gate", "_is_done", "_result")

    def __init__(self) -> None:
        self._result: T
        self._error: BaseException | None = None
        self._is_done = False
        self._callbacks: deque[Callable[[Future[T]], object]] = deque()
        self._gate = threading.Lock()
        self._gate.acquire()

    def done(self) -> bool:
        """Whether there is a result or an error."""
        return self._is_done

    def cancelled(self) -> bool:
        """Whether it ended as a task that was cancelled."""
        return isinstance(self._error, CancelledError)

    def result(self) -> T:
        """Wait for the result; raises the error."""
        error = self.exception()
        if error is not None:
            try:
                raise error
            finally:
                del error, self  # it keeps this frame: a reference cycle
        return self._result

    def exception(self) -> BaseException | None:
        """Wait for the end; the error, or None."""
        with self._gate:
            return self._error

    def set_result(self, result: T) -> None:
        """End with this result."""
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        """End with this error."""
        self._error = error
        self._end()

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call `callback(self)` at the end, on the thread that brings it; at once if that has come."""
        self._callbacks.append(callback)
        if self._is_done:
            self._call_back()

    def _end(self) -> None:
        self._is_done = True
        self._gate.release()
        self._call_back()

    def _call_back(self) -> None:
        # Whoever adds a callback then looks whether it is done, and whoever ends it then looks whether there is one: at
        # least one of the two finds it.
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # the other one has found it
                return
            callback(self)
