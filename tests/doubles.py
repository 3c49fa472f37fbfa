"""Stand-ins for the parts of the world that tests must control.

Owns a faulty system-call layer, a backend driven by hand, and a file for engines that need none on disk. Knows the
interfaces it stands in for, not the code under test. Guarantees determinism: nothing here happens by itself.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swap.backends.base import Backend, BlockSource
from swap.device_queue import DeviceQueue
from swap.errors import SwapError
from swap.requests import Block, Operation
from swap.syscalls import SystemCalls


@dataclass(frozen=True)
class Short:
    """The call moves at most `nbytes` bytes."""

    nbytes: int


class Stall:
    """The call does not return until `release`; `entered` is set once it has begun."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._released = threading.Event()

    def release(self) -> None:
        self._released.set()

    def hold(self) -> None:
        self.entered.set()
        if not self._released.wait(60):
            raise TimeoutError("a stalled call was never released")


Fault = int | Short | Stall | None


class FaultySystemCalls(SystemCalls):
    """Real system calls, except where a fault was injected. An int is an errno to raise; None lets a call pass."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = defaultdict(int)
        self.slept: list[float] = []
        self.refuse_direct = False
        self._faults: dict[str, deque[Fault]] = defaultdict(deque)
        self._always: dict[str, Fault] = {}
        self._lock = threading.Lock()

    def inject(self, call: str, *faults: Fault) -> None:
        """Let the next calls of this name suffer these faults, one each."""
        self._faults[call].extend(faults)

    def always(self, call: str, fault: Fault) -> None:
        """Let every call of this name suffer this fault, after the injected ones."""
        self._always[call] = fault

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        if self.refuse_direct and flags & os.O_DIRECT:
            raise OSError(22, os.strerror(22))
        return int(self._suffer("open", lambda _: super(FaultySystemCalls, self).open(path, flags, mode)))

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        return int(self._suffer("preadv", lambda n: super(FaultySystemCalls, self).preadv(fd, view[:n], offset)))

    def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
        return int(self._suffer("pwritev", lambda n: super(FaultySystemCalls, self).pwritev(fd, view[:n], offset)))

    def fdatasync(self, fd: int) -> None:
        self._suffer("fdatasync", lambda _: super(FaultySystemCalls, self).fdatasync(fd))

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._suffer("fallocate", lambda _: super(FaultySystemCalls, self).fallocate(fd, offset, nbytes))

    def truncate(self, fd: int, nbytes: int) -> None:
        self._suffer("truncate", lambda _: super(FaultySystemCalls, self).truncate(fd, nbytes))

    def lock(self, fd: int) -> None:
        self._suffer("lock", lambda _: super(FaultySystemCalls, self).lock(fd))

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def _suffer(self, call: str, real: Callable[[int | None], Any]) -> Any:
        with self._lock:
            self.calls[call] += 1
            faults = self._faults[call]
            fault = faults.popleft() if faults else self._always.get(call)
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault))
        if isinstance(fault, Stall):
            fault.hold()
        if not isinstance(fault, Short):
            return real(None)
        # O_DIRECT refuses a transfer of odd length, so a short one is made from a whole number of sectors.
        moved = real(-(-fault.nbytes // 4096) * 4096) if fault.nbytes else 0
        return min(moved, fault.nbytes)


class StepBackend(Backend):
    """A device driven by hand: `issue` takes blocks off the queue, `finish` completes one of `in_flight`.

    Bytes move between the buffers and `contents` (path to bytes) when a block is finished.
    """

    def __init__(self) -> None:
        self.in_flight: list[Block] = []
        self.contents: dict[str, bytearray] = defaultdict(bytearray)
        self._served: list[tuple[BlockSource, DeviceQueue]] = []

    def attach(self, source: BlockSource, queue: DeviceQueue) -> None:
        self._served.append((source, queue))

    def wake(self, queue: DeviceQueue) -> None:
        pass

    def issue(self, limit: int | None = None) -> list[Block]:
        """Take as many blocks as depth and bytes in flight allow, at most `limit`."""
        issued: list[Block] = []
        for source, queue in self._served:
            while limit is None or len(issued) < limit:
                block = source.try_take(queue)
                if block is None:
                    break
                issued.append(block)
        self.in_flight.extend(issued)
        return issued

    def finish(self, block: Block | None = None, error: SwapError | None = None) -> Block:
        """Complete a block in flight, the oldest if none is named."""
        block = block or self.in_flight[0]
        self.in_flight.remove(block)
        if error is None:
            self._move(block)
        for source, queue in self._served:
            if queue.device == block.file.device:
                source.finish(queue, block, error)
        return block

    def run(self) -> list[Block]:
        """Issue and finish one block at a time until nothing is queued; return them in order."""
        done: list[Block] = []
        while self.issue(1) or self.in_flight:
            done.append(self.finish())
        return done

    def close(self, timeout: float) -> None:
        for block in list(self.in_flight):
            self.finish(block)

    def _move(self, block: Block) -> None:
        contents = self.contents[block.file.path]
        end = block.offset + block.nbytes
        contents.extend(bytes(max(0, end - len(contents))))
        if block.operation is Operation.READ:
            block.view[:] = contents[block.offset : end]
        else:
            contents[block.offset : end] = block.view


@dataclass(frozen=True)
class PaperFile:
    """A `BlockFile` that exists in name only, for `StepBackend`."""

    path: str = "paper"
    device: int = 1
    direct: bool = True

    def fileno(self) -> int:
        raise AssertionError("a paper file has no descriptor")
