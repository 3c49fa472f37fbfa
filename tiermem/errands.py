"""A thread that does one thing after the other for others.

Owns the thread and the queue before it. Does not know what is done. Guarantees that things are done in the order they
were started in, each once, and that an interrupt (Ctrl-C) of whoever starts them, or waits, leaves nothing locked; that
of a `concurrent.futures` executor may, see `future.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from tiermem.future import Future
from tiermem.process import begin

T = TypeVar("T")


class Errands:
    """Done on a thread that begins with the first of them."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self, function: Callable[[], T]) -> Future[T]:
        """Have `function()` called after those before; the future has its result or error.

        Raises TiermemError where the system allows no thread, and does nothing.
        """
        future: Future[T] = Future()
        if self._thread.ident is None:
            begin(self._thread)
        self._queue.put(lambda: _carry_out(function, future))
        return future

    def close(self) -> None:
        """Wait for what was started, and end the thread. May be called twice."""
        if self._thread.ident is not None:
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (errand := self._queue.get()) is not None:
            errand()
            del errand  # nothing of it is kept until the next one comes


def elsewhere(name: str, function: Callable[[], T]) -> T:
    """Wait for `function()` on a thread that is gone afterwards; raises what it raises.

    A signal handler comes amid the wait then, and never amid the function, which might take what that raises for
    something of its own. TiermemError where the system allows no thread.
    """
    errands = Errands(name)
    try:
        return errands.start(function).result()
    finally:
        errands.close()


def _carry_out(function: Callable[[], T], future: Future[T]) -> None:
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - handed to whoever waits
        future.set_exception(error)
    else:
        future.set_result(result)
