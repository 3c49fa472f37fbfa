"""Extents, and the allocator that hands out byte ranges of one file.

Owns the arithmetic of free and used ranges. Does not know files, directories' meaning, or what the bytes hold.
Invariants, property-tested: used ranges and holes never overlap and together cover the range exactly; no two holes
touch; every offset and length is aligned; when all is freed there is one hole again.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from swap.blocks import ALIGNMENT, is_aligned
from swap.errors import SwapError


@dataclass(frozen=True, slots=True)
class Piece:
    """`nbytes` at byte `offset` of the swap file in directory number `directory`."""

    directory: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Room in a swap space, in one or several pieces; their bytes follow each other in the buffer of a transfer.

    `slot` tells apart the two copies of an extent that is kept in generations; 0 where there is one copy.
    """

    pieces: tuple[Piece, ...]
    slot: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes in all pieces, a multiple of `ALIGNMENT`."""
        return sum(piece.nbytes for piece in self.pieces)


class ExtentAllocator:
    """Hands out aligned ranges of [start, start + nbytes): best fit, lowest offset among equals. Not thread-safe.

    Best fit keeps large holes whole; training allocates few sizes, so the remainders it leaves are reusable. The list
    of holes is scanned, which is fast while extents are megabytes and holes are few.
    """

    def __init__(self, nbytes: int, *, start: int = 0) -> None:
        if nbytes < 0 or not is_aligned(nbytes) or not is_aligned(start):
            raise ValueError(f"expected multiples of {ALIGNMENT} bytes, found nbytes {nbytes} and start {start}")
        self.nbytes = nbytes
        self.high_water = 0
        self.allocated = 0
        self._holes: list[tuple[int, int]] = [(start, nbytes)] if nbytes else []
        self._used: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes in all holes."""
        return self.nbytes - self.allocated

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest range that could be allocated now."""
        return max((length for _, length in self._holes), default=0)

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether exactly this range is allocated."""
        return self._used.get(offset) == nbytes

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a range of `nbytes`, or None if no hole is large enough."""
        if nbytes <= 0 or not is_aligned(nbytes):
            raise ValueError(f"expected a positive multiple of {ALIGNMENT} bytes, found {nbytes}")
        fitting = [(length, offset) for offset, length in self._holes if length >= nbytes]
        if not fitting:
            return None
        _, offset = min(fitting)
        self.claim(offset, nbytes)
        return offset

    def claim(self, offset: int, nbytes: int) -> bool:
        """Take exactly this range, as it was in an earlier run; False if any of it is in use or outside."""
        index = bisect.bisect_right(self._holes, offset, key=lambda hole: hole[0]) - 1
        if index < 0 or nbytes <= 0 or not is_aligned(offset) or not is_aligned(nbytes):
            return False
        hole, length = self._holes[index]
        if offset + nbytes > hole + length:
            return False
        rest = [(hole, offset - hole), (offset + nbytes, hole + length - offset - nbytes)]
        self._holes[index : index + 1] = [(begin, size) for begin, size in rest if size]
        self._used[offset] = nbytes
        self.allocated += nbytes
        self.high_water = max(self.high_water, self.allocated)
        return True

    def free(self, offset: int, nbytes: int) -> None:
        """Give a range back, merging it with the holes it touches. Raises SwapError if it is not allocated as such."""
        if not self.holds(offset, nbytes):
            raise SwapError(
                f"free of {nbytes} bytes at offset {offset}: expected an allocated range, found "
                f"{self._used.get(offset, 'nothing')} allocated there; it may have been freed twice"
            )
        del self._used[offset]
        self.allocated -= nbytes
        index = bisect.bisect_left(self._holes, (offset, 0))
        begin, end = offset, offset + nbytes
        if index < len(self._holes) and self._holes[index][0] == end:
            end += self._holes.pop(index)[1]
        if index > 0 and sum(self._holes[index - 1]) == begin:
            index -= 1
            begin = self._holes.pop(index)[0]
        self._holes.insert(index, (begin, end - begin))
