"""The aiofiles backend: coroutines on an event loop, buffered files.

Owns one thread with an event loop and, per device, `depth` coroutines; aiofiles brings the threads that block. Does not
know order, splitting or completion. It opens the files a second time, without O_DIRECT, so it works where O_DIRECT is
refused and shows, in the benchmark, what the page cache and the hops between loop and executor cost. A drive that never
answers keeps one of its executor threads, and with it the interpreter's exit, waiting; prefer threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import aiofiles
from aiofiles.threadpool.binary import AsyncFileIO

from swap.backends.base import Backend, BlockSource
from swap.device_queue import DeviceQueue
from swap.errors import SwapClosedError, SwapError, SwapIOError, no_thread
from swap.requests import Block, BlockFile, Operation
from swap.transfer import Progress
from swap.watch import WatchedThread

T = TypeVar("T")

_EXECUTOR_THREADS = 32  # at most; they are started as needed


def _open_again(file: BlockFile, flags: int) -> int:
    """Open the same file a second time, whatever its name is by now: scratch files have lost theirs."""
    try:
        return os.open(f"/proc/self/fd/{file.fileno()}", flags | os.O_CLOEXEC)
    except FileNotFoundError:  # no /proc here
        return os.open(file.path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


class _Threads(concurrent.futures.ThreadPoolExecutor):
    """As many threads as the system allows: beyond them, calls wait for those that run. Not used after `shutdown`.

    The pool of the standard library raises then, but carries the call out all the same: a file that nobody closes.
    """

    _serving = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        """As of every executor. Raises RuntimeError where not even one thread may be started."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            super().submit(_answer, future, functools.partial(fn, *args, **kwargs))
            self._serving = True
        except RuntimeError:
            if not self._serving:
                future.cancel()
                raise
        return future


def _answer(future: concurrent.futures.Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - raised by whoever waits
        future.set_exception(error)
        del future, call  # the error keeps this frame, and would be kept by it
    else:
        future.set_result(result)


class AioBackend(Backend):
    """`depth` coroutines per device on a loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._executor = _Threads(_EXECUTOR_THREADS, thread_name_prefix="swap-aio")
        self._loop.set_default_executor(self._executor)
        self._wakers: dict[int, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="swap-aio-loop", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # a limit on processes and threads
            self._loop.close()
            raise no_thread("to move bytes", error) from error
        self._ending = WatchedThread(self._end, name="swap-aio-end")

    def attach(self, source: BlockSource, queue: DeviceQueue) -> None:
        """Start the coroutines of a device."""
        waker = self._wakers[queue.device] = asyncio.Event()

        def start() -> None:
            for _ in range(queue.depth if not self._closing else 0):
                self._tasks.add(self._loop.create_task(self._serve(source, queue, waker)))

        self._tell(start)

    def wake(self, queue: DeviceQueue) -> None:
        """Let the device's idle coroutines look at the queue."""
        self._tell(self._wakers[queue.device].set)

    def _tell(self, callback: Callable[[], None]) -> None:
        # The loop may be closed by another thread at any time. Then nothing is queued any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def close(self, timeout: float) -> None:
        """Let the coroutines finish what they are moving, and stop the loop."""
        if self._closing or threading.current_thread() is self._thread:
            raise SwapClosedError("the aiofiles backend is closed once, and not from an on_done callback")
        self._closing = True
        try:
            self._ending.start()
        except RuntimeError:  # a limit on threads: then it is waited for here, however long it takes
            self._end()
        else:
            self._ending.join(min(timeout, threading.TIMEOUT_MAX))

    def late(self) -> Sequence[threading.Thread]:
        """The thread that waits for the coroutines, if they have not ended."""
        return [self._ending] if self._ending.is_alive() else []

    def _end(self) -> None:
        concurrent.futures.wait([asyncio.run_coroutine_threadsafe(self._drain(), self._loop)])
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._executor.shutdown()
        self._loop.close()

    async def _drain(self) -> None:
        for waker in self._wakers.values():
            waker.set()
        await asyncio.gather(*self._tasks)

    async def _serve(self, source: BlockSource, queue: DeviceQueue, waker: asyncio.Event) -> None:
        handles: dict[BlockFile, AsyncFileIO] = {}  # its own, because seek and read are two calls
        try:
            while True:
                waker.clear()  # before looking, so that a wake between looking and waiting is seen
                block = source.try_take(queue)
                if block is not None:
                    source.finish(queue, block, await self._transfer(handles, block))
                elif self._closing:
                    return
                else:
                    await waker.wait()
        finally:
            for handle in handles.values():
                with contextlib.suppress(OSError):  # what was written is made durable by the file's own descriptor
                    await handle.close()

    async def _transfer(self, handles: dict[BlockFile, AsyncFileIO], block: Block) -> SwapError | None:
        progress = Progress(block)
        while not progress.done:
            try:
                moved = await self._call(handles, block, progress)
            except SwapError as error:
                return error.with_traceback(None)
            except Exception as error:  # noqa: BLE001 - recorded; the coroutine must go on
                # A RuntimeError is Python's, which may start no thread at all: in a moment perhaps.
                refused = isinstance(error, RuntimeError)
                verdict = progress.fail(BlockingIOError(errno.EAGAIN, str(error)) if refused else error)
                if isinstance(verdict, SwapIOError):
                    return verdict
                await asyncio.sleep(verdict)
            else:
                failure = progress.advance(moved)
                if failure is not None:
                    return failure
        return None

    async def _call(self, handles: dict[BlockFile, AsyncFileIO], block: Block, progress: Progress) -> int:
        file = block.file
        file.fileno()  # raises if the file was closed
        if file not in handles:
            handles[file] = await aiofiles.open(
                file.path, "r+b", buffering=0, opener=lambda _, flags: _open_again(file, flags)
            )
        handle = handles[file]
        await handle.seek(progress.offset)
        with progress.view as view:  # let go of at once: the thread that moved the bytes drops its own later
            moved: int | None = await (
                handle.readinto(view) if block.operation is Operation.READ else handle.write(view)
            )
        if moved is None:  # what a raw file returns instead of raising EAGAIN
            raise BlockingIOError(errno.EAGAIN, "the file would block")
        return moved
