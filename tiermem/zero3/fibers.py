"""Where a computation runs that others take turns with: in a thread of its own, or on a stack of its own in this one.

Owns how the turn is given and given back. Does not know units or whose turn it is. Guarantees that only one side runs
at a time, that a fiber whose target raises has ended, that it has the context variables of its maker (what it sets is
its own), and that a stack in the caller's thread finds what is kept for each thread as if the thread was its own.

Two kinds, because autograd's engine keeps one stack of running backwards for each thread: only a thread of its own can
be stopped inside a backward. A stack of its own needs no thread, and so no second team of OpenMP's.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from tiermem.errors import InvariantError, TiermemError
from tiermem.process import begin

try:
    import greenlet
except ImportError:  # an interpreter it was not built for
    greenlet = None

PutAside = Callable[[], Callable[[], None]]


class OwnThread:
    """A computation in a thread of its own; it can be stopped `anywhere`, inside a backward, too."""

    anywhere = True

    def __init__(self, target: Callable[[], None]) -> None:
        self._target, self._context = target, contextvars.copy_context()
        # Queues, where semaphores would do, but may stay locked after an interrupt (`tiermem/future.py` says why).
        self._go: SimpleQueue[None] = SimpleQueue()
        self._back: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._begins = threading.Lock()  # taken by the thread, or by whoever ends it before it has begun

    @property
    def inside(self) -> bool:
        """Whether this is called in it."""
        return self._thread is threading.current_thread()

    def go(self) -> None:
        """Let it go on until it stops or ends. By the one who made it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._live, name="tiermem-micro-batch", daemon=True)
            try:
                begin(self._thread)
            except TiermemError:  # no more threads are allowed: there is none to be ended
                self._thread = None
                raise
        self._go.put(None)
        self._back.get()

    def stop(self) -> None:
        """Give the turn back and wait for the next. By what runs in it."""
        self._back.put(None)
        self._go.get()

    def end(self) -> None:
        """Let it go on to its end, once it has begun.

        It may be running: what interrupts a caller who waits does not interrupt it.
        """
        if self._thread is None or self._begins.acquire(blocking=False):
            return  # where somebody was interrupted as he started it, it may begin yet: and does nothing
        self._go.put(None)
        self._thread.join()

    def _live(self) -> None:
        if not self._begins.acquire(blocking=False):
            return
        self._go.get()
        try:
            self._context.run(self._target)
        finally:
            self._back.put(None)


class OwnStack:
    """A computation on a stack of its own in the thread of the caller, if `OwnStack.possible`: greenlet is there.

    `aside`: each puts something aside that is kept for each thread, as if the thread was new, and returns what puts it
    back, whatever is there then. That may be called again, where an interrupt has ended it.
    """

    possible = greenlet is not None
    anywhere = False

    def __init__(self, target: Callable[[], None], *, aside: Sequence[PutAside]) -> None:
        self._aside = aside
        self._greenlet = greenlet.greenlet(target)
        self._greenlet.gr_context = contextvars.copy_context()

    @property
    def inside(self) -> bool:
        """See `OwnThread`."""
        return greenlet.getcurrent() is self._greenlet

    def go(self) -> None:
        """See `OwnThread`."""
        self._greenlet.parent = greenlet.getcurrent()
        self._switch(self._greenlet)

    def stop(self) -> None:
        """See `OwnThread`."""
        caller = self._greenlet.parent
        if caller is None:
            raise InvariantError("a fiber stops that nobody has let go on")
        self._switch(caller)

    def end(self) -> None:
        """See `OwnThread`."""
        while self._greenlet:  # has begun and not ended
            self.go()

    def _switch(self, to: Any) -> None:
        back: list[Callable[[], None]] = []
        try:
            for put_aside in self._aside:
                back.append(put_aside())  # noqa: PERF401 - what has been put aside is known when the next is interrupted
            to.switch()
        finally:
            try:
                _call_all(back)
            except BaseException:
                _call_all(back)  # an interrupt: what it has kept from being put back
                raise


Fiber = OwnThread | OwnStack
"""A computation that can be stopped."""


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()
