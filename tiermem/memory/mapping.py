"""One area of address space from the operating system.

Owns an anonymous private mapping: addresses that occupy no memory until they are touched, and the means to hand
touched pages back. Does not know which of its addresses are in use. Guarantees that reserving costs no memory, that
one touched byte brings in one page and no more, and that closing never fails while a tensor still looks at it.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

from tiermem.errors import CapacityError

# Python names the flag only from 3.13 on. This is its value on every Linux that torch has wheels for (x86-64, aarch64);
# elsewhere nothing is asked for, and a reservation too large is answered by a smaller one.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if hasattr(mmap, "MADV_DONTFORK") else 0)


class Mapping:
    """`nbytes` of address space, page-aligned, zero when first touched. Raises OSError if there is no room for it."""

    __slots__ = ("_map", "_view", "nbytes")

    def __init__(self, nbytes: int, *, huge: bool = False) -> None:
        """`huge`: ask for huge pages, where all of the memory is going to be used and none given back early."""
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        self._view = memoryview(self._map)
        # Huge pages: touching one byte would bring in 2 MiB, and giving back a part of one frees nothing, so the bound
        # on physical memory would not hold where the system hands them out unasked.
        # Fork: a child would share the pages copy-on-write, so that every later write here costs a second copy, and
        # O_DIRECT reads in flight during the fork may land in the wrong copy (see NOTES in open(2)).
        for advice in ("MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):  # a kernel without the feature does not need the advice
                    self._map.madvise(getattr(mmap, advice))

    def buffer(self, offset: int, nbytes: int) -> memoryview:
        """Return a writable view of bytes [offset, offset + nbytes)."""
        return self._view[offset : offset + nbytes]

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return the pages of a page-aligned range to the system; they read as zeros afterwards.

        Raises CapacityError if the system refuses, as it does for memory that `mlockall` locked.
        """
        try:
            self._map.madvise(mmap.MADV_DONTNEED, offset, nbytes)
        except OSError as error:
            raise CapacityError(
                f"the system refused to take back {nbytes} bytes of host memory ({error}); is all memory locked?"
            ) from error

    def close(self) -> None:
        """Unmap now, or, if somebody still looks at a part of the mapping, when the last view dies."""
        self._view.release()
        with contextlib.suppress(BufferError):
            self._map.close()


def tensor_over(buffer: memoryview) -> torch.Tensor:
    """Return a 1-D uint8 tensor over `buffer`, with a storage of its own that begins exactly at the buffer."""
    return torch.frombuffer(buffer, dtype=torch.uint8)
