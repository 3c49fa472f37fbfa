"""One area of address space from the operating system.

Owns an anonymous private mapping: addresses that occupy no memory until they are touched, and the means to hand
touched pages back. Does not know which of its addresses are in use. Guarantees that reserving costs no memory, that
one touched byte brings in no page beyond a range that was said to be used as a whole, and that closing never fails
while a tensor still looks at it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

import torch

from tiermem.errors import CapacityError
from tiermem.memory.ranges import Range, RangeSet

# Python names the flag only from 3.13 on. This is its value on every Linux that torch has wheels for (x86-64, aarch64);
# elsewhere nothing is asked for, and a reservation too large is answered by a smaller one.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if hasattr(mmap, "MADV_DONTFORK") else 0)


# Of x86-64, and of aarch64 with its usual pages. Where they are larger fewer ranges hold one, and nothing else changes.
HUGE_PAGE = 2 << 20


# Linux, `mremap(2)`: to a given address, and the old one stays a mapping, without its pages (5.7 and newer).
_MOVE = ctypes.c_int(0x1 | 0x2 | 0x4)
_REMAP = getattr(ctypes.CDLL(None), "mremap", None)
if _REMAP is not None:
    _REMAP.restype = ctypes.c_void_p


class Mapping:
    """`nbytes` of address space from `address` on, page-aligned, zero when first touched.

    Raises OSError if there is no room for it.
    """

    __slots__ = ("_huge", "_map", "_view", "address", "nbytes")

    def __init__(self, nbytes: int, *, huge: bool = False) -> None:
        """`huge`: ask for huge pages, where all of the memory is going to be used and none given back early."""
        self.nbytes = nbytes
        try:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        except OverflowError as error:  # more than there are addresses, which the system is not even asked
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
        self._view = memoryview(self._map)
        self.address = tensor_over(self._view[:1]).data_ptr()
        self._huge = RangeSet()  # whole huge pages that were asked for
        # Huge pages only where they were asked for: touching one byte would bring in 2 MiB, so the bound on physical
        # memory would not hold where the system hands them out unasked.
        self._advise("MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", 0, nbytes)
        # Fork: a child would share the pages copy-on-write, so that every later write here costs a second copy, and
        # O_DIRECT reads in flight during the fork may land in the wrong copy (see NOTES in open(2)).
        self._advise("MADV_DONTFORK", 0, nbytes)

    def buffer(self, offset: int, nbytes: int) -> memoryview:
        """Return a writable view of bytes [offset, offset + nbytes)."""
        return self._view[offset : offset + nbytes]

    def use_whole(self, offset: int, nbytes: int) -> None:
        """Say that all bytes of a range are about to be written: huge pages may lie inside it, never across its ends.

        O_DIRECT pins every page of a transfer, so with huge pages a transfer costs a fraction (README.md). Where a huge
        page could lie and small ones do, they are given back: they would stay for ever.
        """
        start, end = self._up(offset), self._down(offset + nbytes)
        for known in (*self._huge.overlapping(start, end), Range(end, end)):
            if known.start > start:
                self._huge.add(start, known.start)
                # In this order: a table of small pages goes only with all its pages (and not before Linux 6.14).
                self._advise("MADV_HUGEPAGE", start, known.start - start)
                self._advise("MADV_DONTNEED", start, known.start - start)
            start = known.end

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return the pages of a page-aligned range to the system; they read as zeros afterwards.

        Raises CapacityError if the system refuses, as it does for memory that `mlockall` locked.
        """
        for part in tuple(self._huge.overlapping(offset, offset + nbytes)):
            self._advise("MADV_NOHUGEPAGE", part.start, part.length)  # one touched byte is one small page again
            self._huge.remove(self._down(part.start), self._up(part.end))
        try:
            self._map.madvise(mmap.MADV_DONTNEED, offset, nbytes)
        except OSError as error:
            raise CapacityError(
                f"the system refused to take back {nbytes} bytes of host memory ({error}); is all memory locked?"
            ) from error

    def move(self, offset: int, nbytes: int, target: Mapping, to: int) -> bool:
        """Have the pages of a range of whole huge pages at `to` in `target`, where none are; False if that cannot be.

        As if the range were given back and the same bytes touched there, without anything being cleared.
        """
        parts = tuple(self._huge.overlapping(offset, offset + nbytes))
        if parts != (Range(offset, offset + nbytes),) or not _remap(self.address + offset, nbytes, target.address + to):
            return False
        self._huge.remove(offset, offset + nbytes)
        self._advise("MADV_NOHUGEPAGE", offset, nbytes)
        target._huge.remove(to, to + nbytes)
        target._huge.add(to, to + nbytes)  # they are there now
        return True

    def _down(self, offset: int) -> int:
        """Return the offset, at or below this one, at which a huge page can begin."""
        return offset - (self.address + offset) % HUGE_PAGE

    def _up(self, offset: int) -> int:
        """Return the offset, at or above this one, at which a huge page can begin."""
        return offset + -(self.address + offset) % HUGE_PAGE

    def _advise(self, advice: str, offset: int, nbytes: int) -> None:
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel without the feature does not need the advice
                self._map.madvise(getattr(mmap, advice), offset, nbytes)

    def close(self) -> None:
        """Unmap now, or, if somebody still looks at a part of the mapping, when the last view dies."""
        self._view.release()
        with contextlib.suppress(BufferError):
            self._map.close()


def _remap(source: int, nbytes: int, target: int) -> bool:
    """Move the pages at one address to another; False, and nothing is done, where the system does not."""
    size = ctypes.c_size_t(nbytes)
    return _REMAP is not None and bool(
        _REMAP(ctypes.c_void_p(source), size, size, _MOVE, ctypes.c_void_p(target)) == target
    )


def tensor_over(buffer: memoryview) -> torch.Tensor:
    """Return a 1-D uint8 tensor over `buffer`, with a storage of its own that begins exactly at the buffer."""
    return torch.frombuffer(buffer, dtype=torch.uint8)
