"""Requests: one logical read or write, and the parts and blocks it is cut into.

Owns what a caller sees of a transfer (done, error, checksum, wait, promote) and the records the engine keeps of it.
Does not know threads, queues or system calls: its owner does, behind `RequestOwner`. Guarantees that `on_done` is
called once, after `done` and `error` are set, and that the buffer is held until then and no longer.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from swap.blocks import ALIGNMENT, is_aligned
from swap.checksums import checksum, mismatch
from swap.errors import SwapTimeoutError
from swap.watch import Happening


class Priority(enum.IntEnum):
    """What is served first: smaller is sooner."""

    DEMAND = 0
    READ_AHEAD = 1
    WRITE_BACK = 2


class Operation(enum.StrEnum):
    """The direction of a transfer."""

    READ = "read"
    WRITE = "write"


class BlockFile(Protocol):
    """What the engine needs of a file."""

    @property
    def path(self) -> str:
        """For messages, and for backends that open the file themselves."""

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache and so must stay aligned."""

    @property
    def device(self) -> int:
        """Files with the same number share a queue."""

    def fileno(self) -> int:
        """The open descriptor; raises SwapClosedError after closing."""


Span = tuple[BlockFile, int, int]
"""File, byte offset in it, and number of bytes: a stretch of a request."""


class Part:
    """The stretch of a request that lies in one file: what is queued. `issued` bytes of it were given to the device."""

    __slots__ = ("_request", "file", "issued", "nbytes", "offset", "sequence", "view")

    def __init__(self, file: BlockFile, offset: int, view: memoryview) -> None:
        self._request: Request | None = None
        self.file = file
        self.offset = offset
        self.nbytes = view.nbytes
        self.view: memoryview | None = view
        self.issued = 0
        self.sequence = 0

    @property
    def request(self) -> Request:
        """The one this is a part of, until that is done. Raises RuntimeError afterwards."""
        if self._request is None:
            raise RuntimeError(f"what was asked for a part of, {self}, is done")
        return self._request

    @request.setter
    def request(self, request: Request) -> None:
        self._request = request

    @property
    def lane(self) -> tuple[Operation, Priority] | None:
        """Which way it goes, and how urgently; None once its request is done."""
        request = self._request
        return None if request is None else (request.operation, request.priority)

    def release(self) -> None:
        """Let go of the buffer, even if a traceback somewhere keeps this object alive, and of the request.

        They know each other, and would wait for the cycle collector, which programs switch off.
        """
        if self.view is not None:
            self.view.release()
            self.view = None
        self._request = None

    def __str__(self) -> str:
        return f"{self.nbytes} bytes at offset {self.offset} in {self.file.path!r}"


class Block:
    """One submission to the device: `view` is to be filled from, or written to, byte `offset` of `file`."""

    __slots__ = ("nbytes", "offset", "operation", "part", "started", "view")

    def __init__(self, part: Part, start: int, nbytes: int, started: float) -> None:
        if part.view is None:
            raise RuntimeError(f"a block of {part} was asked for after the request had let go of its buffer")
        self.part = part
        self.operation = part.request.operation  # which `close` may have given up by the time the transfer ends
        self.offset = part.offset + start
        self.nbytes = nbytes
        self.view = part.view[start : start + nbytes]
        self.started = started

    @property
    def file(self) -> BlockFile:
        """The file this block lies in."""
        return self.part.file


def part_of(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """Where the bytes from `begin` to `end` of all that lies in `spans` are."""
    found, before = [], 0
    for file, offset, nbytes in spans:
        first, last = max(begin, before) - before, min(end, before + nbytes) - before
        if first < last:
            found.append((file, offset + first, last - first))
        before += nbytes
    return found


def cut(spans: Sequence[Span], view: memoryview) -> tuple[Part, ...]:
    """Lay the spans over a buffer, one after another. Raises ValueError unless they are aligned and fill it exactly."""
    parts = []
    begin = 0
    for file, offset, nbytes in spans:
        if offset < 0 or nbytes <= 0 or not is_aligned(offset) or not is_aligned(nbytes):
            raise ValueError(
                f"expected offset and length in multiples of {ALIGNMENT} bytes, "
                f"found offset {offset} and length {nbytes} in {file.path!r}"
            )
        parts.append(Part(file, offset, view[begin : begin + nbytes]))
        begin += nbytes
    if begin != view.nbytes:
        raise ValueError(f"expected a buffer of {begin} bytes, as long as the spans together, found {view.nbytes}")
    return tuple(parts)


class Check:
    """Takes the checksum of a request's bytes when they have been moved; `expected` is what it must be, if known."""

    __slots__ = ("expected", "found", "view")

    def __init__(self, view: memoryview, expected: int | None) -> None:
        self.view: memoryview | None = view
        self.expected = expected
        self.found: int | None = None

    def run(self, request: Request) -> BaseException | None:
        """Compute the checksum; return the error if it is not what was expected."""
        if self.view is None:
            return None
        self.found = checksum(self.view)
        if self.expected is None or self.found == self.expected:
            return None
        spans = [(part.file, part.offset, part.nbytes) for part in request.parts]
        return mismatch(request.operation, spans, expected=self.expected, found=self.found)

    def release(self) -> None:
        """Let go of the buffer, even if a traceback somewhere keeps this object alive."""
        if self.view is not None:
            self.view.release()
            self.view = None


class RequestOwner(Protocol):
    """What a request asks of the engine that runs it."""

    def promote(self, request: Request, priority: Priority) -> None:
        """Move what is still queued of a request to another priority."""

    def seconds_until_stall(self, request: Request) -> float:
        """Seconds after which a request that shows no progress counts as stalled; 0 or less if it does now."""


class Request:
    """One logical read or write. Made by an engine; shared by whoever waits.

    `operation`, `priority` and `nbytes` say what was asked; `done`, `error`, `seconds` (submit to done) and `checksum`
    how it went.
    """

    __slots__ = (
        "_check", "_event", "_on_done", "_owner", "_submitted",
        "done", "error", "operation", "parts", "pending", "priority", "seconds",
    )  # fmt: skip

    def __init__(
        self,
        owner: RequestOwner,
        operation: Operation,
        parts: tuple[Part, ...],
        *,
        priority: Priority,
        on_done: Callable[[Request], None] | None,
        check: Check | None = None,
    ) -> None:
        self.operation = operation
        self.priority = priority
        self.done = False
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.parts = parts
        self.pending = 0  # blocks neither finished nor dropped; the engine's, under its lock
        self._check = check
        self._owner = owner
        self._on_done = on_done
        self._event = Happening()
        self._submitted = time.monotonic()
        for part in parts:
            part.request = self

    def __str__(self) -> str:
        return f"{self.operation} of " + " and ".join(str(part) for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes to move."""
        return sum(part.nbytes for part in self.parts)

    @property
    def checksum(self) -> int | None:
        """Of the bytes moved, if it was asked for and they all were; see `swap.checksums`."""
        return self._check.found if self._check is not None else None

    def promote(self, priority: Priority) -> None:
        """Let what is still queued of this request be served at `priority` if that is sooner. Never waits."""
        self._owner.promote(self, priority)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the request is done, and raise its error if it has one.

        Raises SwapTimeoutError, naming the request, after `timeout` seconds or when the device has made no progress for
        the engine's `stall_seconds`. The transfer is then still in flight and its buffer must not be reused.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            self._wait_once(deadline)
        if self.error is not None:
            # Without the traceback of earlier raises, which would keep their frames, and so their buffers, alive.
            raise self.error.with_traceback(None)

    def stalled(self) -> SwapTimeoutError | None:
        """The error, naming the request, if the device has made no progress for the engine's `stall_seconds`.

        For those who wait by `on_done` instead of `wait`, and ask every second or more often: silence counts only when
        it has been looked at for a while (`watch.py`). Never waits, and the transfer goes on.
        """
        if self.done or self._owner.seconds_until_stall(self) > 0:
            return None
        return SwapTimeoutError(
            f"{self} is stalled: the device shows no progress, {self._age()} after it was started; see the kernel log. "
            "Its buffer must not be reused"
        )

    def settle(self) -> bool:
        """For the engine, once, before `complete`: take the checksum if asked for; return whether all went well."""
        if self._check is not None and self.error is None:
            try:
                self.error = self._check.run(self)
            except Exception as error:  # noqa: BLE001 - recorded; a worker thread must go on
                self.error = error.with_traceback(None)  # its frames hold views of the buffer
        return self.error is None

    def complete(self) -> BaseException | None:
        """For the engine, once: let go of the buffer, publish, call `on_done`; return what that raised, if it did."""
        for part in self.parts:
            part.release()
        if self._check is not None:
            self._check.release()
        self.seconds = time.monotonic() - self._submitted
        callback, self._on_done = self._on_done, None
        self.done = True
        raised: BaseException | None = None
        if callback is not None:
            try:
                callback(self)
            except BaseException as error:  # noqa: BLE001 - recorded and returned; a worker thread must go on
                raised = error
                self.error = self.error or error
        self._event.set()
        return raised

    def _wait_once(self, deadline: float | None) -> None:
        """Wait until done, late or stalled, with no wake-up in between; raise SwapTimeoutError for the last two."""
        patience = self._owner.seconds_until_stall(self)
        remaining = patience if deadline is None else min(patience, deadline - time.monotonic())
        if (remaining > 0 and self._event.wait(min(remaining, threading.TIMEOUT_MAX))) or self.done:
            return
        if deadline is not None and time.monotonic() >= deadline:
            raise SwapTimeoutError(
                f"{self} was not done in time, {self._age()} after it was started; its buffer must not be reused"
            )
        stalled = self.stalled()
        if stalled is not None:
            raise stalled

    def _age(self) -> str:
        return f"{time.monotonic() - self._submitted:.1f} seconds"
