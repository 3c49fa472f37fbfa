"""An event loop on a thread of its own, and the mailbox through which other threads speak with it.

Owns the loop, the thread and the order of messages. Does not know pages. Guarantees that messages run one after the
other in the order they were posted, that any number of them posted in one go cost one wake-up, that `after` runs once
after each batch, and that after `shut` nobody's message is taken without being told so.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from tiermem.errors import InvariantError, TiermemError
from tiermem.future import Future
from tiermem.pager.bell import BellLoop
from tiermem.process import HomeProcess, begin

T = TypeVar("T")
Message = Callable[[], object]


class LoopThread:
    """Runs messages and coroutines on one thread."""

    def __init__(self, name: str, *, after: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """`after()` runs on the loop after each batch of messages; `failed(error)` when one or the other raised."""
        self._after = after
        self._failed = failed
        self._inbox: deque[Message] = deque()
        # asyncio would let one be collected that waits for what nobody else has, and whoever waits for it with it.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ringing = False
        self._is_hungry = True
        self._door = threading.RLock()  # a finalizer may release a lease in the middle of anything
        self._shut = False
        self._ended = False
        self._home = HomeProcess()
        self.asyncio = BellLoop(self._deliver)
        # Whoever takes it has the loop: the thread, to run it, or who could not wait for that, to close it.
        unclaimed = [self.asyncio]
        self._thread = threading.Thread(target=_run, args=(unclaimed,), name=name, daemon=True)
        try:
            begin(self._thread)
        except BaseException:  # an interrupt leaves open whether the thread has begun, or ever will
            if _claim(unclaimed) is None:
                self.asyncio.call_soon_threadsafe(self.asyncio.stop)
                self._thread.join()
            self.asyncio.close()
            raise

    @property
    def is_current(self) -> bool:
        """Whether the caller is on the loop's thread."""
        # Both: a thread that has ended leaves its number to a later one.
        return threading.get_ident() == self._thread.ident and threading.current_thread() is self._thread

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child of the process whose loop it is: the thread was not forked with it."""
        return not self._home.is_here

    def post(self, message: Message) -> bool:
        """Run `message` on the loop soon. Never waits; False (and nothing is done) after `shut`."""
        if not self._home.is_here:  # first: another thread may have held the door when the process was forked
            return False
        with self._door:
            if self._shut:
                return False
            self.report(message)
        return True

    def leave(self, message: Message) -> bool:
        """As `post`, but only a hungry loop is woken for it (`set_hungry`); another one runs it when it next wakes."""
        if not self._home.is_here:
            return False
        with self._door:
            if self._shut:
                return False
            self._inbox.append(message)
            if self._is_hungry:  # after it was left: whoever gets hungry looks into the inbox after that
                self.wake()
        return True

    def set_hungry(self, hungry: bool) -> None:
        """Whether what is left (see `leave`) should run at once from now on. On the loop only."""
        self._is_hungry = hungry
        if hungry and self._inbox:  # left while nobody was
            self.wake()

    def report(self, message: Message) -> None:
        """As `post`, but taken after `shut` as well: for the ends of what was started before.

        After `finish` nobody is left to hear of them: what a silent device held then ends unheard.
        """
        if self._ended:
            return
        self._inbox.append(message)
        self.wake()

    def wake(self) -> None:
        """Have `after` run soon, even without a message."""
        self._ringing = True
        self.asyncio.ring()  # always: an interrupt may have come between the two

    def call(self, function: Callable[[], T]) -> T:
        """Wait for `function()` run on the loop; raises what it raises, TiermemError after `shut`."""
        if self.is_current:
            return function()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed to the thread that waits for the result
                future.set_exception(error)

        if not self.post(run):
            raise closed()
        return future.result()

    def start_task(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; the future carries its result or error. Raises TiermemError after `shut`."""
        if self.is_foreign:
            coroutine.close()
            raise closed()
        future: Future[T] = Future()
        with self._door:
            if not self._shut:
                self.asyncio.call_soon_threadsafe(self._begin_task, coroutine, future)
                return future
        coroutine.close()
        raise closed()

    def shut(self) -> bool:
        """Take no more messages from outside. False if that is so already."""
        if self.is_foreign:
            return False
        with self._door:
            was_open, self._shut = not self._shut, True
        return was_open

    def finish(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """After `shut`: run everything posted before, then `last`, then end the thread. Waits.

        If it was interrupted it is to be called again, and then only ends the thread.
        """
        if self.is_current:
            raise InvariantError("closed from its own loop, which would wait for itself; this is a bug in tiermem")
        try:
            if not self._ended:
                self._end(last)
        finally:
            self._ended = True
            if self._thread.is_alive():
                self.asyncio.call_soon_threadsafe(self.asyncio.stop)
                self._thread.join()
            self.asyncio.close()

    def _end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        ended: Future[None] = Future()
        self.report(lambda: self._begin_task(last(), ended))
        ended.result()

    def _begin_task(self, coroutine: Coroutine[Any, Any, T], future: Future[T]) -> None:
        task = self.asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: _tell(task, future))

    def _deliver(self) -> None:
        if not self._ringing and not self._inbox:  # an interrupt may have come between a message and its ring
            return
        self._ringing = False  # first: whoever posts from now on rings again
        inbox = self._inbox
        for _ in range(len(inbox)):
            message = inbox.popleft()
            try:
                message()
            except Exception as error:  # noqa: BLE001 - nobody waits for a message, so its error goes to the owner
                self._failed(error)
        try:
            self._after()
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error)


def _claim(unclaimed: list[BellLoop]) -> BellLoop | None:
    """Take the loop, once, by whichever thread comes first."""
    try:
        return unclaimed.pop()
    except IndexError:
        return None


def _run(unclaimed: list[BellLoop]) -> None:
    if (loop := _claim(unclaimed)) is not None:
        loop.run_forever()


def _tell(task: asyncio.Task[T], future: Future[T]) -> None:
    """Have a future end as a task has."""
    if task.cancelled():
        future.set_exception(CancelledError())
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


def closed() -> TiermemError:
    """The error of whoever comes too late."""
    return TiermemError(
        "the pager is closed; a closed runtime cannot be used again, nor can one in a forked child of its process"
    )
