"""Frames cut from one piece of memory that is there from the beginning: a device's, or page-locked host memory.

Owns which part of the piece is whose frame, and the fences of what was freed. Does not know pages, streams, or what the
memory is: a `Slab` makes the frames. Guarantees that live frames never overlap, that their rounded sizes stay within
the capacity, and that a frame laid where another was freed carries the fences of that one. Unlike the arena of
pageable memory it can be out of room in one piece while there is room in bytes: see `clearing`. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined,unused-ignore]

from tiermem.errors import InvariantError
from tiermem.memory.arena import FRAME_ALIGNMENT, POISON, Fence, Frame, LiveFrames, rounded
from tiermem.memory.ranges import Range, RangeSet, cheapest_window
from tiermem.memory.rounding import round_down
from tiermem.memory.tiers import Tier

_ASIDE = 2  # the low end is kept free for this many of the largest frames that pass through


class Slab(Protocol):
    """One piece of memory of `nbytes` bytes."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    def frame(self, offset: int, asked: int, nbytes: int) -> Frame:
        """The frame over bytes [offset, offset + nbytes), with a storage of its own that keeps the memory alive."""

    def fill(self, frame: Frame, value: int) -> None:
        """Set every byte of the frame once its fences have passed; a fence of the frame's stands for that."""

    def fence(self) -> Fence | None:
        """What the calling thread has asked of the device that works on the memory; None: it is all done."""

    def close(self) -> None:
        """Give the memory back, or, where a tensor still looks at it, have the last one do so."""


class TensorSlab:
    """The bytes of one tensor: memory of whatever allocator made it, on the processor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """`tensor`: 1-D uint8."""
        self.nbytes = tensor.numel()
        self._tensor: torch.Tensor | None = tensor

    def frame(self, offset: int, asked: int, nbytes: int) -> Frame:
        """See `Slab`. Raises InvariantError after `close`."""
        if self._tensor is None:
            raise InvariantError("a frame was asked of memory that was given back")
        return Frame(offset, asked, own_storage(self._tensor[offset : offset + nbytes]))

    def fill(self, frame: Frame, value: int) -> None:
        """Set every byte of the frame."""
        frame.tensor.fill_(value)

    def fence(self) -> Fence | None:
        """None: what a processor was asked for is done when the call returns."""
        return None

    def close(self) -> None:
        """Forget the tensor; frames that somebody looks at keep the memory."""
        self._tensor = None


def own_storage(part: torch.Tensor) -> torch.Tensor:
    """A tensor over the same bytes whose storage begins at them, and which keeps the memory of `part` alive.

    Through DLPack: the one public way to have several storages over one allocation, the same on every device.
    """
    shared: torch.Tensor = from_dlpack(to_dlpack(part))
    return shared


class _Freed(NamedTuple):
    """A freed range that work asked for earlier may still touch."""

    start: int
    end: int
    fences: tuple[Fence, ...]


def _above(lowest: int, holes: Iterable[Range]) -> list[Range]:
    """What of the holes lies at `lowest` or above, in order."""
    return [Range(max(lowest, hole.start), hole.end) for hole in holes if hole.end > lowest]


class SlabArena(LiveFrames):
    """The frames of one slab: see `tiermem.memory.arena.Arena`. Raises ConfigError for less than one frame.

    `poison` overwrites frames with NaN when they are freed and when they are handed out. `passing`: bytes of the
    largest frame that only passes through; zero: nothing is set aside for such.
    """

    def __init__(self, slab: Slab, tier: Tier, *, poison: bool = False, passing: int = 0) -> None:
        super().__init__(tier, slab.nbytes, poison=poison)
        usable = round_down(slab.nbytes, FRAME_ALIGNMENT)
        self._slab = slab
        self._free = RangeSet()
        self._free.add(0, usable)
        self._passing = rounded(passing) if passing else 0
        self._largest = self._middle = 0
        self._freed: list[_Freed] = []

    def allocate(self, nbytes: int) -> Frame | None:
        """Return a frame of at least `nbytes`, or None if there is no room in one piece now. Never waits.

        Raises InvariantError for less than one byte or after `close`.
        """
        length = self._reserve(nbytes)
        if length is None:
            return None
        start = self._place(length)
        if start is None:
            self.release(length)
            return None
        self._free.remove(start, start + length)
        frame = self._slab.frame(start, nbytes, length)
        frame.fences = self._fences(frame.offset, frame.offset + length)
        if self._poison:
            self._slab.fill(frame, POISON)
        self._live[frame.offset] = frame
        return frame

    def free(self, frame: Frame) -> None:
        """Take a frame back; whoever gets its bytes next gets its fences too.

        Raises InvariantError if the frame is not a live frame of this arena: freed before, or another's.
        """
        self._forget(frame)
        if self._poison:
            self._slab.fill(frame, POISON)
        if frame.fences:
            self._freed.append(_Freed(frame.offset, frame.offset + frame.nbytes, frame.fences))
        self._free.add(frame.offset, frame.offset + frame.nbytes)
        self.release(frame.nbytes)

    def clearing(self, nbytes: int, candidates: Sequence[Frame]) -> list[Frame] | None:
        """Which of `candidates` must be freed before `allocate(nbytes)` succeeds; None if freeing all is not enough.

        Of the places where the frame could lie it is the one that costs the fewest bytes of them.
        """
        length = rounded(nbytes)
        lowest = self._lowest(length)
        able = [frame for frame in candidates if frame.offset >= lowest]
        taken = [Range(frame.offset, frame.offset + frame.nbytes) for frame in able]
        chosen = cheapest_window(_above(lowest, self._free), taken, length)
        return None if chosen is None else [able[index] for index in chosen]

    def fence(self) -> Fence | None:
        """What the calling thread has asked of the device that works on the slab; None: it is all done."""
        return self._slab.fence()

    def close(self) -> None:
        """Give everything back. Bytes that somebody still looks at live until the last view dies. Idempotent."""
        if not self._closed:
            self._closed = True
            self._let_go()
            self._slab.close()

    def _place(self, length: int) -> int | None:
        """Where a frame of this length goes: large ones to the low end, small ones (tiles) to the high end.

        So that tiles, which come and go, do not lie about between parameters. Where the low end is set aside, those of
        middling size (tiles of state, which stay) fill the gaps that others of their size have left.
        """
        self._largest = max(self._largest, length)
        lowest = self._lowest(length)
        holes = [hole for hole in _above(lowest, self._free.at_least(length)) if hole.length >= length]
        if not holes:
            return None
        if 2 * length >= (self._passing or self._largest):
            return holes[0].start
        self._middle = max(self._middle, length)
        if not self._passing or 2 * length < self._middle:
            return holes[-1].end - length
        return next((hole for hole in holes if hole.length == length), holes[0]).start

    def _lowest(self, length: int) -> int:
        """Where the first frame of this length may begin: the low end is set aside for what passes through."""
        return 0 if 2 * length >= self._passing else _ASIDE * self._passing

    def _fences(self, start: int, end: int) -> tuple[Fence, ...]:
        """What may still be going on in [start, end)."""
        pending = [
            part._replace(fences=fences)
            for part in self._freed
            if (fences := tuple(fence for fence in part.fences if not fence.passed()))
        ]
        self._freed = pending
        met = (fence for part in pending if part.start < end and start < part.end for fence in part.fences)
        return tuple(dict.fromkeys(met))
