"""A backend without threads: whoever starts a request moves its bytes.

Owns nothing but the rule of who works. Does not know order or completion. Deterministic: with one caller, blocks are
moved in queue order before `start_read` or `start_write` returns.
"""

from __future__ import annotations

import errno
import threading
import time

from swap.backends.base import Backend, BlockSource
from swap.device_queue import DeviceQueue
from swap.errors import SwapIOError
from swap.requests import Block
from swap.syscalls import SystemCalls
from swap.transfer import transfer


class InlineBackend(Backend):
    """Moves bytes on the caller's thread."""

    def __init__(self, system: SystemCalls | None = None) -> None:
        self._system = system or SystemCalls()
        self._queues: list[tuple[BlockSource, DeviceQueue]] = []
        self._pumping = threading.local()

    def attach(self, source: BlockSource, queue: DeviceQueue) -> None:
        """Remember the device."""
        self._queues.append((source, queue))

    def wake(self, queue: DeviceQueue) -> None:  # noqa: ARG002 - whichever device has something
        """Move everything queued. A request started inside an `on_done` is left to the outer call."""
        if getattr(self._pumping, "now", False):
            return
        self._pumping.now = True
        try:
            while self._move_one():
                pass
        finally:
            self._pumping.now = False

    def _move_one(self) -> bool:
        """Move one block, of the first device that has one; False: nothing is queued."""
        for source, queue in self._queues:
            block = source.try_take(queue)
            if block is not None:
                try:
                    error = transfer(self._system, block)
                except BaseException as raised:  # an interrupt: the block is nobody's any more
                    source.finish(queue, block, _interrupted(block, raised))
                    raise
                source.finish(queue, block, error)
                return True
        return False

    def close(self, timeout: float) -> None:
        """Wait for blocks that other threads are moving; those of this thread are finished before it can get here."""
        deadline = time.monotonic() + timeout
        while any(queue.in_flight for _, queue in self._queues) and time.monotonic() < deadline:
            time.sleep(0.001)


def _interrupted(block: Block, raised: BaseException) -> SwapIOError:
    """The error of a block whose transfer an interrupt has ended."""
    return SwapIOError(
        block.operation,
        block.file.path,
        offset=block.offset,
        length=block.nbytes,
        errno=errno.EINTR,
        detail=f"it was ended by {type(raised).__name__}",
    )
