"""The default backend: threads that call preadv and pwritev.

Owns `depth` threads per device. Does not know order, splitting or completion. Each thread takes a block straight from
the engine's queue when the last one is done, so a busy device costs no wake-ups; the system calls release the
interpreter lock, and the bytes go between the drive and the caller's buffer with no copy. The threads are daemons: a
drive that never answers cannot keep the interpreter from exiting.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

from swap.backends.base import Backend, BlockSource
from swap.device_queue import DeviceQueue
from swap.errors import no_thread
from swap.syscalls import SystemCalls
from swap.transfer import transfer
from swap.watch import WatchedThread, join


class ThreadsBackend(Backend):
    """`depth` threads per device."""

    def __init__(self, system: SystemCalls | None = None) -> None:
        self._system = system or SystemCalls()
        self._threads: list[threading.Thread] = []

    def attach(self, source: BlockSource, queue: DeviceQueue) -> None:
        """Start the threads of a device: as many as the system allows. Raises SwapError if it allows none."""
        for index in range(queue.depth):
            serve = functools.partial(self._serve, source, queue)
            thread = WatchedThread(serve, name=f"swap-{queue.device:x}-{index}")
            try:
                thread.start()
            except RuntimeError as error:  # a limit on processes and threads
                if not index:
                    raise no_thread("to move bytes", error) from error
                queue.limit_depth(index)  # those that run serve the queue, only less of it at once
                return
            self._threads.append(thread)

    def wake(self, queue: DeviceQueue) -> None:
        """Nothing: the threads wait in `take`."""

    def close(self, timeout: float) -> None:
        """Join the threads that come to an end within `timeout` seconds together."""
        # An on_done that closes the engine runs on one of them.
        join([thread for thread in self._threads if thread is not threading.current_thread()], timeout)

    def late(self) -> Sequence[threading.Thread]:
        """The threads that are stuck in a call."""
        return [thread for thread in self._threads if thread.is_alive() and thread is not threading.current_thread()]

    def _serve(self, source: BlockSource, queue: DeviceQueue) -> None:
        while (block := source.take(queue)) is not None:
            source.finish(queue, block, transfer(self._system, block))
