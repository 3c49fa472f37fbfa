"""Aligned memory for O_DIRECT, and the test that a buffer is fit for it.

Owns `AlignedBuffer`, an anonymous mapping of exactly the size asked for (rounded to the page by the kernel, never to a
power of two). Does not know files or requests. Guarantees page alignment, zeroed contents, and that memory with a view
still in use is never unmapped: `close` raises instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import TYPE_CHECKING, Self

from swap.blocks import ALIGNMENT, align_up, is_aligned
from swap.errors import SwapClosedError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_HUGE_PAGE = 2 << 20


class AlignedBuffer:
    """`nbytes` of zeroed memory whose address is a multiple of `ALIGNMENT`; `view` is a writable memoryview of it.

    In huge pages where the system has them, unless `huge_pages` is False.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool = True) -> None:
        if nbytes <= 0:
            raise ValueError(f"a buffer needs a positive number of bytes, found {nbytes}")
        self.nbytes = nbytes
        # Private rather than shared: shared anonymous memory is charged as shmem and gets no transparent huge pages.
        self._mapping = mmap.mmap(-1, align_up(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # O_DIRECT pins every page of a transfer; with huge pages there are 512 times fewer of them.
        advice = "MADV_HUGEPAGE" if huge_pages else "MADV_NOHUGEPAGE"
        if nbytes >= _HUGE_PAGE and hasattr(mmap, advice):
            with contextlib.suppress(OSError):
                self._mapping.madvise(getattr(mmap, advice))
        self._view: memoryview | None = memoryview(self._mapping)[:nbytes]

    @property
    def view(self) -> memoryview:
        """The memory: one-dimensional, bytes, writable, exactly `nbytes` long. Raises SwapClosedError after `close`."""
        if self._view is None:
            raise SwapClosedError("this AlignedBuffer has been closed; allocate another")
        return self._view

    def close(self) -> None:
        """Give the memory back. Raises BufferError, and keeps the memory, while someone still has a view of it."""
        if self._view is None:
            return
        view, self._view = self._view, None
        try:
            view.release()
            self._mapping.close()
        except BufferError:
            self._view = memoryview(self._mapping)[: self.nbytes]
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, raised: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except BufferError:
            # The frames of an error on its way (an interrupt inside a transfer) may hold views: the memory goes with
            # them, and the error must not be hidden by ours.
            if raised is None:
                raise


def address_of(view: memoryview) -> int:
    """The address of a writable view's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def aligned_view(buffer: Buffer) -> memoryview:
    """Return `buffer` as a flat view of bytes fit for O_DIRECT, without copying.

    Raises ValueError unless it is writable, contiguous, not empty, and aligned to `ALIGNMENT` in address and length.
    The same is asked of buffers for buffered files, so that a program runs on every file system or on none.
    """
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        raise ValueError(
            f"expected a writable contiguous buffer, found {view.format=} {view.readonly=} {view.strides=}"
        )
    view = view.cast("B")
    if view.nbytes == 0 or not is_aligned(view.nbytes):
        raise ValueError(f"buffer length: expected a positive multiple of {ALIGNMENT} bytes, found {view.nbytes}")
    if not is_aligned(address_of(view)):
        raise ValueError(
            f"buffer address: expected a multiple of {ALIGNMENT}, found {address_of(view):#x}; use swap.AlignedBuffer"
        )
    return view
