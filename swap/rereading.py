"""Checksums of copies that were written without one: their bytes are read again.

Owns the order of the reads and the memory they go to. Does not know who wants to know, or why it was not taken at once.
Guarantees that a little memory is enough whatever the copies' size, and that a copy has a checksum only when all of its
bytes have been read. What a drive has lost before is not found: the checksum is of what is there now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from swap.blocks import split
from swap.buffers import AlignedBuffer
from swap.checksums import CHECKSUM_BLOCK, RunningChecksum
from swap.generations import Copy
from swap.requests import Priority, Request
from swap.space import SwapSpace

_PART = 8 * CHECKSUM_BLOCK
_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes `begin` to `end` of a copy's extent; `running`: the checksum of those before."""

    copy: Copy
    begin: int
    end: int
    running: RunningChecksum

    @property
    def last(self) -> bool:
        """Whether no bytes come after these."""
        return self.end == self.copy.extent.nbytes


def take_checksums(space: SwapSpace, copies: Iterable[Copy]) -> int:
    """Read the copies that have no checksum, and give them one; return how many bytes were read. Waits.

    Nobody may write to their extents meanwhile: a mark holds them. Raises SwapIOError, SwapTimeoutError,
    SwapClosedError; the copies that were not done then have none still.
    """
    without = [copy for copy in copies if copy.checksum is None]
    without.sort(key=lambda copy: (copy.extent.pieces[0].directory, copy.extent.pieces[0].offset))
    largest = min(_PART, max((copy.extent.nbytes for copy in without), default=0))
    # Not closed but dropped: a drive that stalls may still write into them, and a request keeps its own alive.
    free = [AlignedBuffer(largest).view for _ in range(_IN_FLIGHT if without else 0)]
    pending: deque[tuple[_Part, Request, memoryview]] = deque()

    def end_one() -> None:
        part, request, view = pending.popleft()
        request.wait()
        part.running.add(view[: part.end - part.begin])
        if part.last:
            part.copy.checksum = part.running.value()
        free.append(view)

    for part in _parts(without):
        if not free:
            end_one()
        view, where = free.pop(), (part.begin, part.end)
        buffer = view[: part.end - part.begin]
        # Training goes first: what it waits for stands before this in the drive's queue.
        request = space.start_read(part.copy.extent, buffer, priority=Priority.WRITE_BACK, part=where)
        pending.append((part, request, view))
    while pending:
        end_one()
    return sum(copy.extent.nbytes for copy in without)


def _parts(copies: Iterable[Copy]) -> Iterator[_Part]:
    for copy in copies:
        running = RunningChecksum()
        for begin, nbytes in split(copy.extent.nbytes, _PART):
            yield _Part(copy, begin, begin + nbytes, running)
