"""The engine: requests in, blocks out to a backend, completions back.

Owns the queues of all devices, the lock that guards them and the requests in them, and the backend. Does not know
extents or swap spaces; a file is a `BlockFile`. It does not order requests that touch the same bytes: a read of what is
still being written gets either. Guarantees:

1. Every request started is completed exactly once, with or without an error, closing included.
2. A request is completed only when none of its blocks is with the device, so its buffer is nobody's but the caller's.
   The one exception is a device that does not answer while the engine is closed; that error says so.
3. Nothing raised by a worker or a callback is lost: the request, or `close`, raises it.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from swap.backends.aio import AioBackend
from swap.backends.base import Backend
from swap.backends.inline import InlineBackend
from swap.backends.threads import ThreadsBackend
from swap.blocks import block_count
from swap.buffers import aligned_view
from swap.device_queue import DeviceQueue
from swap.errors import SwapClosedError, SwapError, SwapTimeoutError
from swap.requests import Block, Check, Operation, Priority, Request, Span, cut
from swap.settings import EngineSettings, EngineStatistics
from swap.syscalls import SystemCalls
from swap.watch import Watch

if TYPE_CHECKING:
    from typing_extensions import Buffer

OnDone = Callable[[Request], None]


def make_backend(name: str, system: SystemCalls | None = None) -> Backend:
    """Make the backend of a settings' name. `system` replaces the system calls where the backend makes them."""
    if name == "aiofiles":
        return AioBackend()
    return InlineBackend(system) if name == "inline" else ThreadsBackend(system)


class Engine:
    """Moves bytes between files and buffers. Every method may be called from any thread."""

    def __init__(self, settings: EngineSettings | None = None, *, backend: Backend | None = None) -> None:
        self.settings = settings or EngineSettings()
        self.backend = backend or make_backend(self.settings.backend)
        self._lock = threading.Lock()
        self._attaching = threading.Lock()
        self._queues: dict[int, DeviceQueue] = {}
        self._available: dict[int, threading.Condition] = {}
        self._sequences = itertools.count(1)
        self._counts = Counter(requests=0, failed=0)
        self._closed = False
        self._pid = os.getpid()
        self._callback_error: BaseException | None = None
        self._watch = Watch(self.settings.stall_seconds)

    # What callers use.

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child: it has the queues but none of the threads.

        To be asked before the lock is taken: another thread may have held it when the process was forked.
        """
        return os.getpid() != self._pid

    def start(
        self,
        operation: Operation,
        spans: Sequence[Span],
        buffer: Buffer,
        *,
        priority: Priority,
        on_done: OnDone | None = None,
        checksum: bool = False,
        expected: int | None = None,
    ) -> Request:
        """Start one transfer between `buffer` and `spans`, whose bytes follow each other in it. Never waits.

        The request holds the buffer until it is done. `on_done(request)` is called once, on the thread that finished
        it; it must be quick, and may start requests. With `checksum` that thread first computes `request.checksum`;
        with `expected` (a checksum) it also compares, and the request fails with ChecksumError. Raises ValueError for a
        buffer or span that is not aligned, SwapClosedError after `close`, SwapError in a forked child and where no
        thread can be started; everything later is recorded in the request.
        """
        if self.is_foreign:
            raise foreign()
        # Views are made where they are used: a local one would stay with this frame, and that with a traceback.
        check = Check(aligned_view(buffer), expected) if checksum or expected is not None else None
        parts = cut(spans, aligned_view(buffer))
        queues = {part.file.device: self._queue(part.file.device) for part in parts}
        with self._lock:
            _require_open(closed=self._closed)
            # Not before: a request and its parts know each other, and a refused one would keep the buffer's views.
            request = Request(self, operation, parts, priority=priority, on_done=on_done, check=check)
            self._counts["requests"] += 1
            for part in request.parts:
                blocks = block_count(part.nbytes, self.settings.block_size)
                request.pending += blocks
                queues[part.file.device].push(part, self._sequences, time.monotonic())
                self._available[part.file.device].notify(blocks)
        for queue in queues.values():
            self.backend.wake(queue)
        return request

    def statistics(self) -> EngineStatistics:
        """What has happened since the engine was made."""
        now = time.monotonic()
        with self._lock:
            devices = tuple(queue.statistics(now) for queue in self._queues.values())
            return EngineStatistics(self._counts["requests"], self._counts["failed"], devices)

    def close(self) -> None:
        """Fail what is queued, wait for what is with the device, stop the backend. Idempotent.

        Waits at most `stall_seconds` and three more; then raises SwapTimeoutError naming what the device still holds.
        Raises a SwapError with the first error that escaped from an `on_done` as its cause, if one did.
        """
        if self.is_foreign:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            dropped = self._drop_queued()
            for condition in self._available.values():
                condition.notify_all()
        self._complete(dropped)
        self.backend.close(self.settings.stall_seconds)
        stuck = self._abandon_in_flight()
        if stuck:
            raise SwapTimeoutError(
                f"the device did not answer for {self.settings.stall_seconds} seconds while closing; still in flight, "
                f"and their buffers must not be reused: {'; '.join(stuck)}"
            )
        if self._callback_error is not None:
            raise SwapError(f"an on_done callback raised {self._callback_error!r}") from self._callback_error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # What requests use (RequestOwner).

    def promote(self, request: Request, priority: Priority) -> None:
        """See `Request.promote`."""
        with self._lock:
            if priority >= request.priority:
                return
            for part in request.parts:
                self._queues[part.file.device].move(part, priority)
            request.priority = priority

    def seconds_until_stall(self, request: Request) -> float:
        """Seconds until the request has stalled: a device finished no block, or has had one of its, for too long.

        Only devices that still have some of it count: one that is through with its part may be idle while others work.
        """
        with self._lock:
            since: list[float] = []
            for part in request.parts:
                queue = self._queues[part.file.device]
                started = [block.started for block in queue.in_flight if block.part is part]
                if started or queue.holds(part):
                    since += [queue.progressed, *started]
            if not since:  # all of it is moved: it is being completed
                since = [max(self._queues[part.file.device].progressed for part in request.parts)]
            now = time.monotonic()
            unwatched = self._watch.look(now)
        left = min(since) + self.settings.stall_seconds - now
        return left if left > 0 else unwatched

    # What backends use (BlockSource).

    def take(self, queue: DeviceQueue) -> Block | None:
        """Wait for the next block of a device; None when the engine is closed."""
        with self._lock:
            while True:
                block = queue.take(time.monotonic())
                if block is not None or self._closed:
                    return block
                self._available[queue.device].wait()

    def try_take(self, queue: DeviceQueue) -> Block | None:
        """The next block of a device, or None if there is none now."""
        with self._lock:
            return queue.take(time.monotonic())

    def finish(self, queue: DeviceQueue, block: Block, error: SwapError | None) -> None:
        """Report a block; completes its request, and calls its `on_done`, if it was the last one."""
        with self._lock:
            if block not in queue.in_flight:  # abandoned by `close`
                return
            request = block.part.request
            block.view.release()  # explicitly: a traceback may keep the block alive
            queue.finish(block, time.monotonic(), failed=error is not None)
            request.pending -= 1
            if error is not None:
                request.error = request.error or error
                request.pending -= sum(self._queues[part.file.device].drop(part) for part in request.parts)
            completed = [request] if request.pending == 0 else []
            held_back, queue.held_back = queue.held_back, False
            if held_back:
                self._available[queue.device].notify_all()
        if held_back:
            self.backend.wake(queue)
        self._complete(completed)

    # Inside.

    def _queue(self, device: int) -> DeviceQueue:
        queue = self._queues.get(device)  # without the lock: none is ever taken away, and `start` asks `_require_open`
        if queue is not None:
            return queue
        with self._lock:
            _require_open(closed=self._closed)
        with self._attaching:  # not under the engine's lock: starting threads takes a while
            if device not in self._queues:
                settings = self.settings
                queue = DeviceQueue(
                    device,
                    block_size=settings.block_size,
                    depth=settings.queue_depth,
                    max_bytes_in_flight=settings.max_bytes_in_flight,
                )
                with self._lock:  # `close` goes through all of them
                    self._available[device] = threading.Condition(self._lock)
                self.backend.attach(self, queue)
                with self._lock:
                    self._queues[device] = queue
            return self._queues[device]

    def _unfinished(self) -> list[Request]:
        found: dict[int, Request] = {}
        for queue in self._queues.values():
            for part in queue.parts():
                found[id(part.request)] = part.request
            for block in queue.in_flight:
                found[id(block.part.request)] = block.part.request
        return list(found.values())

    def _drop_queued(self) -> list[Request]:
        """Take back every block that no device has yet; the requests that are complete by that."""
        completed = []
        for request in self._unfinished():
            dropped = sum(self._queues[part.file.device].drop(part) for part in request.parts)
            request.pending -= dropped
            if dropped:
                request.error = request.error or SwapClosedError(
                    f"{request} was still queued when the engine was closed"
                )
            if request.pending == 0:
                completed.append(request)
        return completed

    def _abandon_in_flight(self) -> list[str]:
        with self._lock:
            requests = self._unfinished()
            names = [str(request) for request in requests]
            for request, name in zip(requests, names, strict=True):
                request.error = SwapTimeoutError(f"{name} was still in flight; its buffer must not be reused")
            for queue in self._queues.values():
                queue.abandon(time.monotonic())
        self._complete(requests)
        return names

    def _complete(self, requests: list[Request]) -> None:
        for request in requests:
            if not request.settle():
                with self._lock:
                    self._counts["failed"] += 1
            raised = request.complete()
            if raised is not None:
                self._callback_error = self._callback_error or raised


def _require_open(*, closed: bool) -> None:
    if closed:
        raise SwapClosedError("the engine is closed: no request can be started any more")


def foreign() -> SwapError:
    """The error of a forked child."""
    return SwapError("this engine belongs to the process that made it and has no threads in a forked child")
