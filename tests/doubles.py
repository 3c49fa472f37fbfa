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
from typing import Any, TypeVar, cast

from swap.backends.base import Backend, BlockSource
from swap.device_queue import DeviceQueue
from swap.engine import Engine
from swap.errors import SwapError
from swap.requests import Block, BlockFile, Operation, Priority, Request
from swap.syscalls import SystemCalls

T = TypeVar("T")


def start_read(
    engine: Engine, file: BlockFile, offset: int, buffer: Any, priority: Priority = Priority.DEMAND, **others: Any
) -> Request:
    """Start filling `buffer` from byte `offset` of `file`."""
    span = (file, offset, memoryview(buffer).nbytes)
    return engine.start(Operation.READ, [span], buffer, priority=priority, **others)


def start_write(
    engine: Engine,
    file: BlockFile,
    offset: int,
    buffer: Any,
    *,
    priority: Priority = Priority.WRITE_BACK,
    **others: Any,
) -> Request:
    """Start writing `buffer` to byte `offset` of `file`."""
    span = (file, offset, memoryview(buffer).nbytes)
    return engine.start(Operation.WRITE, [span], buffer, priority=priority, **others)


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

    def ask(self, call: Callable[[], T]) -> T:
        return cast("T", self._suffer("ask", lambda _: call()))

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        if self.refuse_direct and flags & os.O_DIRECT:
            raise OSError(22, os.strerror(22))
        return int(self._suffer("open", lambda _: super(FaultySystemCalls, self).open(path, flags, mode)))

    def close(self, fd: int) -> None:
        self._suffer("close", lambda _: super(FaultySystemCalls, self).close(fd))

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

    def fsync(self, fd: int) -> None:
        self._suffer("fsync", lambda _: super(FaultySystemCalls, self).fsync(fd))

    def rename(self, source: str, target: str) -> None:
        self._suffer("rename", lambda _: super(FaultySystemCalls, self).rename(source, target))

    def unlink(self, path: str) -> None:
        self._suffer("unlink", lambda _: super(FaultySystemCalls, self).unlink(path))

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


@dataclass
class _Inode:
    """A file as the drive has it, and what has been done to it since: (offset, bytes) or a size, in order."""

    durable: bytearray
    pending: list[tuple[int, bytes] | int]

    def settle(self) -> None:
        for change in self.pending:
            self.apply(change)
        self.pending.clear()

    def apply(self, change: tuple[int, bytes] | int) -> None:
        if isinstance(change, int):
            del self.durable[change:]
            self.durable.extend(bytes(change - len(self.durable)))
        else:
            offset, data = change
            self.durable.extend(bytes(max(0, offset + len(data) - len(self.durable))))
            self.durable[offset : offset + len(data)] = data


class PowerCut(SystemCalls):
    """Real files on a drive that keeps only what was synced: the rest may be lost, torn or reordered by a cut.

    `cut_after(n)` lets n more changing calls pass; the next one fails but may have happened, all later ones fail. Then
    `reboot(directory, target, choose)` makes in `target` what the drive may hold of `directory`. Data are durable after
    fsync or fdatasync of their file, names after fsync of their directory and not before. What is not may survive in
    any part: each `sector` of each write by itself, in any order; each size change; each change of names. `choose(n)`
    picks a number below n.
    """

    def __init__(self, *directories: os.PathLike[str], sector: int = 4096) -> None:
        """What is in the directories now is durable."""
        self.calls = 0
        self._lock = threading.RLock()  # who notes a change, and settles, may be on any thread
        self._sector = sector
        self._left: int | None = None
        self._inodes: dict[tuple[int, int], _Inode] = {}
        self._names: dict[str, dict[str, _Inode]] = {}  # durable names of each directory
        self._renames: dict[str, list[list[tuple[str, _Inode | None]]]] = defaultdict(list)  # changes since, in order
        for directory in map(os.fspath, directories):
            self._names[directory] = {}
            for entry in os.scandir(directory):
                with open(entry.path, "rb") as file:
                    self._names[directory][entry.name] = inode = _Inode(bytearray(file.read()), [])
                self._inodes[self._number(os.stat(entry.path))] = inode

    def cut_after(self, calls: int) -> None:
        self._left = calls

    @property
    def dead(self) -> bool:
        return self._left is not None and self._left < 0

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        if not flags & os.O_CREAT or os.path.lexists(path):
            if self.dead:
                raise OSError(5, "the power is off")
            return super().open(path, flags, mode)
        with self._lock:
            cutting = self._begin()
            inode = _Inode(bytearray(), [])
            self._note(path, inode)
            self._end(cutting)
            fd = super().open(path, flags, mode)
            self._inodes[self._number(os.fstat(fd))] = inode  # also if the number was another file's before
        return fd

    def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
        with self._lock:
            cutting = self._begin()
            self._inode(fd).pending.append((offset, bytes(view)))
            self._end(cutting)
        return super().pwritev(fd, view, offset)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        with self._lock:
            cutting = self._begin()
            self._inode(fd).pending.append(max(offset + nbytes, os.fstat(fd).st_size))
            self._end(cutting)
        super().fallocate(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        with self._lock:
            cutting = self._begin()
            self._inode(fd).pending.append(nbytes)
            self._end(cutting)
        super().truncate(fd, nbytes)

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            self._end(self._begin())
            self._inode(fd).settle()

    def fsync(self, fd: int) -> None:
        with self._lock:
            self._end(self._begin())
            path = os.readlink(f"/proc/self/fd/{fd}")
            if not os.path.isdir(path):
                self._inode(fd).settle()
            for change in self._renames.pop(path, []):
                self._apply(self._names[path], change)

    def rename(self, source: str, target: str) -> None:
        moved: list[tuple[str, _Inode | None]] = [(os.path.basename(source), None)]
        with self._lock:
            cutting = self._begin()
            moved.append((os.path.basename(target), self._inodes[self._number(os.stat(source))]))
            self._renames[os.path.dirname(source)].append(moved)
            self._end(cutting)
            super().rename(source, target)

    def unlink(self, path: str) -> None:
        with self._lock:
            cutting = self._begin()
            self._note(path, None)
            self._end(cutting)
            super().unlink(path)

    def reboot(self, directory: str, target: str, choose: Callable[[int], int]) -> None:
        """Write into the empty directory `target` what a cut may have left of `directory`."""
        names = dict(self._names[directory])
        for change in self._renames[directory]:
            if choose(2):
                self._apply(names, change)
        for name, inode in names.items():
            with open(os.path.join(target, name), "xb") as file:
                file.write(self._survivor(inode, choose))

    def _survivor(self, inode: _Inode, choose: Callable[[int], int]) -> bytes:
        after = _Inode(bytearray(inode.durable), [])
        parts: list[tuple[int, bytes] | int] = []
        for change in inode.pending:
            if isinstance(change, int):
                parts.append(change)
                continue
            offset, data = change
            parts += [(offset + at, data[at : at + self._sector]) for at in range(0, len(data), self._sector)]
        kept = [part for part in parts if choose(2)]
        if choose(2):  # the drive writes in whatever order suits it
            kept = [kept.pop(choose(len(kept))) for _ in range(len(kept))]
        for part in kept:
            after.apply(part)
        return bytes(after.durable)

    def _begin(self) -> bool:
        """Count a change; whether it is the one in which the power goes."""
        if self.dead:
            raise OSError(5, "the power is off")
        self.calls += 1
        if self._left is not None:
            self._left -= 1
        return self.dead

    def _end(self, cutting: bool) -> None:
        """The interrupted change stays noted as one that may have happened, in part or whole."""
        if cutting:
            raise OSError(5, "the power is off")

    def _note(self, path: str, inode: _Inode | None) -> None:
        self._renames[os.path.dirname(path)].append([(os.path.basename(path), inode)])

    @staticmethod
    def _apply(names: dict[str, _Inode], change: list[tuple[str, _Inode | None]]) -> None:
        for name, inode in change:
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode

    def _inode(self, fd: int) -> _Inode:
        return self._inodes[self._number(os.fstat(fd))]

    @staticmethod
    def _number(found: os.stat_result) -> tuple[int, int]:
        return found.st_dev, found.st_ino


class StepBackend(Backend):
    """A device driven by hand: `issue` takes blocks off the queue, `finish` completes one of `in_flight`.

    Bytes move between the buffers and `contents` (path to bytes) when a block is finished.
    """

    def __init__(self) -> None:
        self.in_flight: list[Block] = []
        self.contents: dict[str, bytearray] = defaultdict(bytearray)
        self.served: list[tuple[BlockSource, DeviceQueue]] = []

    def attach(self, source: BlockSource, queue: DeviceQueue) -> None:
        self.served.append((source, queue))

    def wake(self, queue: DeviceQueue) -> None:
        pass

    def issue(self, limit: int | None = None) -> list[Block]:
        """Take as many blocks as depth and bytes in flight allow, at most `limit`."""
        issued: list[Block] = []
        for source, queue in self.served:
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
        for source, queue in self.served:
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
