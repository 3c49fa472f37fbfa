"""The thread that runs update kernels, one after the other.

Owns that thread, and how a coroutine waits for what is done on it. Does not know what a kernel does, nor pages.
Guarantees that whoever waits for a kernel is told on the loop by one message, with its result or its error, and that
cancelling the wait waits for the end all the same: a kernel writes into leased frames.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from tiermem.errands import Errands
from tiermem.errors import TiermemError
from tiermem.pager.loop import Message

T = TypeVar("T")


class Worker:
    """Runs kernels. `run` on the loop, `close` from any other thread."""

    def __init__(self, name: str, report: Callable[[Message], None]) -> None:
        """`report(message)`: run a message on the loop soon; any thread."""
        self._report = report
        self._errands = Errands(name)  # whose thread begins with the first: a model that is only run has no updates

    async def run(self, function: Callable[[], T]) -> T:
        """Wait for `function()` run on the worker; raises what it raises."""
        ended = asyncio.Event()
        future = self._errands.start(lambda: _carry_out(function))
        future.add_done_callback(lambda _: self._report(ended.set))
        try:
            await ended.wait()
        except asyncio.CancelledError:
            while not ended.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await ended.wait()
            raise
        return future.result()

    def close(self) -> None:
        """Wait for what is queued, and end the thread. After the loop has ended, or before anything was run."""
        self._errands.close()


def _carry_out(function: Callable[[], T]) -> T:
    try:
        return function()
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        # An exit, which would end the loop instead of being told.
        raise TiermemError(f"a kernel ended with {type(error).__name__}: {error}") from error
