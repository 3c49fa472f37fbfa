"""The thread that runs update kernels, one after the other.

Owns the thread and the queue before it. Does not know what a kernel does, nor pages. Guarantees that whoever waits for
a kernel is told on the loop by one message, with its result or its error, and that cancelling the wait waits for the
end all the same: a kernel writes into leased frames.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from tiermem.errors import TiermemError
from tiermem.pager.loop import Message
from tiermem.process import begin

T = TypeVar("T")


class _Job(Generic[T]):
    """A kernel and who waits for it; all but `function` is used on the loop only."""

    __slots__ = ("error", "function", "is_done", "result", "waiter")

    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.is_done = False
        self.result: T
        self.error: BaseException | None = None
        self.waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def returned(self, result: T) -> None:
        """The kernel is through."""
        self.result = result
        self._end()

    def raised(self, error: BaseException) -> None:
        """The kernel has raised."""
        self.error = error
        self._end()

    def _end(self) -> None:
        self.is_done = True
        if not self.waiter.done():
            self.waiter.set_result(None)


class Worker:
    """Runs kernels. `run` on the loop, `close` from any other thread."""

    def __init__(self, name: str, report: Callable[[Message], None]) -> None:
        """`report(message)`: run a message on the loop soon; any thread."""
        self._report = report
        self._jobs: SimpleQueue[Message | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._started = False

    async def run(self, function: Callable[[], T]) -> T:
        """Wait for `function()` run on the worker; raises what it raises."""
        job = _Job(function)
        if not self._started:  # not before there is something to do: a model that is only run has no updates
            begin(self._thread)  # first: where that is refused, nobody is to wait for a thread there is not
            self._started = True
        self._jobs.put(lambda: _carry_out(job, self._report))
        try:
            await job.waiter
        except asyncio.CancelledError:
            while not job.is_done:
                job.waiter = asyncio.get_running_loop().create_future()
                try:
                    await job.waiter
                except asyncio.CancelledError:
                    continue
            raise
        if job.error is not None:
            raise job.error
        return job.result

    def close(self) -> None:
        """Wait for what is queued, and end the thread. After the loop has ended, or before anything was run."""
        if self._started:
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # nothing of it is kept until the next one comes


def _carry_out(job: _Job[T], report: Callable[[Message], None]) -> None:
    try:
        result = job.function()
    except Exception as error:  # noqa: BLE001 - handed to whoever waits on the loop
        raised: BaseException = error
        report(lambda: job.raised(raised))
    except BaseException as error:  # noqa: BLE001 - an exit, which would end the loop instead of being told
        ended = TiermemError(f"a kernel ended with {type(error).__name__}: {error}")
        ended.__cause__ = error
        report(lambda: job.raised(ended))
    else:
        report(lambda: job.returned(result))
