"""Host memory that holds copies of pages.

Owns the frames of the HOST tier: their addresses, their bytes, and the budget they count against. Does not know pages,
leases or moves. Guarantees that live frames plus the memory kept for reuse never exceed the capacity, and that
`allocate` succeeds whenever the budget has room for the rounded size, however mixed the sizes before were. Not
thread-safe: it belongs to the one thread that owns residency; the bytes of a frame may be used from anywhere.
"""

from __future__ import annotations

import contextlib
import mmap
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from tiermem.errors import CapacityError, ConfigError, InvariantError
from tiermem.memory.budget import Budget
from tiermem.memory.mapping import HUGE_PAGE, Mapping, tensor_over
from tiermem.memory.ranges import Placement, RangeAllocator
from tiermem.memory.rounding import round_down, round_up
from tiermem.memory.sizes import format_bytes
from tiermem.memory.tiers import Tier

# O_DIRECT wants 4096; handing memory back wants whole pages, which are larger on some arm64 systems.
FRAME_ALIGNMENT = max(4096, mmap.PAGESIZE)
POISON = 0xFF  # in every byte: NaN in float32, float16 and bfloat16


def rounded(nbytes: int) -> int:
    """Bytes that a frame for `nbytes` bytes takes: whole frame alignments."""
    return round_up(nbytes, FRAME_ALIGNMENT)


class Sized(Protocol):
    """What takes bytes."""

    nbytes: int


S = TypeVar("S", bound=Sized)


def first_ones(candidates: Sequence[S], missing: int) -> list[S] | None:
    """The first of these that have as many bytes as are missing; None: all of them have fewer."""
    going = []
    for each in candidates:
        if missing <= 0:
            break
        going.append(each)
        missing -= each.nbytes
    return going if missing <= 0 else None


class Fence(Protocol):
    """A point in what an accelerator was asked to do; work asked for before it may still be running (see `Frame`)."""

    def passed(self) -> bool:
        """Whether everything asked for before is done. Never waits."""

    def hold(self) -> None:
        """Have whatever the calling thread asks of the accelerator from now on wait for it. The caller does not."""


class Frame:
    """Bytes in an arena that hold, or are about to hold, a copy of a page.

    `asked` is the size asked for and `nbytes` that size rounded up; `offset` is the frame's name within its arena;
    `tensor` is 1-D uint8 of length `nbytes` with a storage of its own beginning at the frame; `fences` are what has to
    have passed before anybody but the one who asked for that work touches the bytes. Contents are undefined until
    written.
    """

    __slots__ = ("_buffer", "asked", "fences", "nbytes", "offset", "tensor")

    def __init__(self, offset: int, asked: int, tensor: torch.Tensor, buffer: memoryview | None = None) -> None:
        """`buffer`: the same bytes for I/O, where they are in host memory."""
        self.offset = offset
        self.asked = asked
        self.nbytes = tensor.numel()
        self.tensor = tensor
        self.fences: tuple[Fence, ...] = ()
        self._buffer = buffer

    @property
    def buffer(self) -> memoryview:
        """The bytes for I/O: writable, aligned for O_DIRECT. Raises InvariantError for a frame on a device."""
        if self._buffer is None:
            raise InvariantError(f"the frame at offset {self.offset} is on a device: files cannot reach it")
        return self._buffer

    def fence(self, fence: Fence | None) -> None:
        """Remember a fence besides those that have not passed yet; None: nothing was asked for."""
        if fence is not None:
            self.fences = (*(known for known in self.fences if not known.passed()), fence)

    def let_go(self) -> None:
        """Hold on to the bytes no longer; views of them still do. Whoever is left with the frame finds it empty."""
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._buffer = None


class Arena(Protocol):
    """Frames of one tier."""

    @property
    def capacity(self) -> int:
        """Bytes all frames together may occupy."""

    @property
    def reserved(self) -> int:
        """Bytes live frames occupy."""

    @property
    def high_water(self) -> int:
        """Most bytes that were ever reserved."""

    def allocate(self, nbytes: int) -> Frame | None:
        """Return a frame of at least `nbytes`, or None if there is no room now. Never waits."""

    def free(self, frame: Frame) -> None:
        """Take a frame back; its bytes may be reused at once."""

    def clearing(self, nbytes: int, candidates: Sequence[Frame]) -> list[Frame] | None:
        """Which of `candidates` must be freed before `allocate(nbytes)` succeeds; None if freeing all is not enough."""

    def fence(self) -> Fence | None:
        """What the calling thread has asked of the device that computes on these frames; None: it is all done."""

    def close(self) -> None:
        """Give everything back."""


class LiveFrames(Budget):
    """What both kinds of arena are: a budget of which frames are handed out, and what they refuse in the same words."""

    def __init__(self, tier: Tier, capacity: int, *, poison: bool) -> None:
        if capacity < FRAME_ALIGNMENT:
            raise ConfigError(
                f"expected a {tier.name} budget of at least {FRAME_ALIGNMENT} bytes, found {capacity}; "
                f"raise {tier.name.lower()}_memory"
            )
        super().__init__(tier, capacity)
        self._poison = poison
        self._live: dict[int, Frame] = {}
        self._closed = False

    def _reserve(self, nbytes: int) -> int | None:
        """Reserve a frame's bytes; return how many a frame of `nbytes` takes, None if the budget has no room now."""
        if nbytes < 1 or self._closed:
            raise InvariantError(f"a frame of {nbytes} bytes was asked of {'a closed' if self._closed else 'an'} arena")
        taken = rounded(nbytes)
        return taken if self.try_reserve(taken) else None

    def _forget(self, frame: Frame) -> None:
        """Take a frame out of those that are live; the bytes stay reserved."""
        if self._live.get(frame.offset) is not frame:
            raise InvariantError(
                f"the frame at offset {frame.offset} ({frame.nbytes} bytes) is not live in this arena: freed twice?"
            )
        del self._live[frame.offset]

    def _let_go(self) -> None:
        """Forget the frames handed out. Pages have them still, and whoever has an optimizer or a hook has the pages."""
        for frame in self._live.values():
            frame.let_go()
        self._live.clear()


class HostArena(LiveFrames):
    """The frames of host memory: see `Arena`, and README.md for how memory is kept within `capacity` bytes.

    `poison` overwrites frames with NaN when they are freed and when they are handed out, so that a test sees who
    reads them too late or too early. `address_factor` says how much address space to reserve, in capacities. Raises
    ConfigError for a capacity below one frame, CapacityError if the system denies even one capacity of addresses.
    """

    def __init__(self, capacity: int, *, poison: bool = False, address_factor: int = 8) -> None:
        super().__init__(Tier.HOST, capacity, poison=poison)
        usable = round_down(capacity, FRAME_ALIGNMENT)  # pages are given back whole, so the limit is whole too
        self._area_nbytes = usable * address_factor
        self._ranges = RangeAllocator(limit=usable, block=HUGE_PAGE)
        self._areas: list[Mapping] = []
        self._area_offsets: list[int] = []
        while not self._add_area():
            if self._area_nbytes <= usable:
                raise CapacityError(
                    f"the system denied {format_bytes(capacity)} of address space for HOST; lower host_memory, "
                    "or see `ulimit -v` and vm.overcommit_memory"
                )
            self._area_nbytes = rounded(max(usable, self._area_nbytes // 2))

    def allocate(self, nbytes: int) -> Frame | None:
        """Return a frame of at least `nbytes`, or None if the budget has no room now. Never waits.

        Raises InvariantError for less than one byte or after `close`.
        """
        length = self._reserve(nbytes)
        if length is None:
            return None
        placement = self._ranges.allocate(length)
        if placement is None and self._add_area():
            placement = self._ranges.allocate(length)
        if placement is None:
            self.release(length)
            return None
        try:
            self._cool(placement)  # before the frame is touched: see the guarantee
        except BaseException:
            self._ranges.take_back(placement)
            self.release(length)
            raise
        area, offset = self._locate(placement.start)
        area.use_whole(offset, length)
        buffer = area.buffer(offset, length)
        frame = Frame(placement.start, nbytes, tensor_over(buffer), buffer)
        if self._poison:
            frame.tensor.fill_(POISON)
        self._live[frame.offset] = frame
        return frame

    def free(self, frame: Frame) -> None:
        """Take a frame back; its bytes may be reused at once.

        Raises InvariantError if the frame is not a live frame of this arena: freed before, or another's.
        """
        self._forget(frame)
        if self._poison:
            frame.tensor.fill_(POISON)
        self._ranges.release(frame.offset)
        self.release(frame.nbytes)

    def clearing(self, nbytes: int, candidates: Sequence[Frame]) -> list[Frame] | None:
        """Which of `candidates`, the first ones first, must be freed before `allocate(nbytes)` succeeds; None: too few.

        Only bytes count here: addresses are plenty.
        """
        return first_ones(candidates, rounded(nbytes) - (self.capacity - self.reserved))

    def fence(self) -> None:
        """Nothing is asked of a processor that it has not done when the call returns."""

    def close(self) -> None:
        """Give everything back. Bytes that somebody still looks at live until the last view dies. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for part in self._ranges.warm_ranges():
            area, offset = self._locate(part.start)
            with contextlib.suppress(CapacityError):  # locked memory goes when it is unmapped
                area.give_back(offset, part.length)
        self._let_go()
        for area in self._areas:
            area.close()

    def _add_area(self) -> bool:
        """Reserve one more area of addresses; False if the system denies it."""
        try:
            area = Mapping(self._area_nbytes)
        except OSError:
            return False
        # One unused alignment between areas: ranges in different mappings must never merge. And what is a multiple of
        # a huge page among the offsets is one among the addresses.
        offset = self._area_offsets[-1] + self._areas[-1].nbytes + FRAME_ALIGNMENT if self._areas else 0
        offset += (area.address - offset) % HUGE_PAGE
        self._areas.append(area)
        self._area_offsets.append(offset)
        self._ranges.extend(offset, area.nbytes)
        return True

    def _cool(self, placement: Placement) -> None:
        """Take back the pages that are to be cold: whole huge ones go where the placement lacks some, others go."""
        moves, left = placement.exchanges(HUGE_PAGE) if placement.cooled else ([], [])
        for part, to in moves:
            area, offset = self._locate(part.start)
            target, place = self._locate(to)
            if not area.move(offset, part.length, target, place):
                left.append(part)
        for part in left:
            area, offset = self._locate(part.start)
            area.give_back(offset, part.length)

    def _locate(self, offset: int) -> tuple[Mapping, int]:
        """Return the area that holds `offset` and the offset within it."""
        index = bisect_right(self._area_offsets, offset) - 1
        return self._areas[index], offset - self._area_offsets[index]
