"""What one rank has of a model's state, and the reading of it from pages that a mark protects.

Owns the interface between whoever holds state and whoever writes it down: ranges of parameters, and their bytes block
by block. Does not know files. Guarantees that at most one PARAM page and one STATE tile are in memory, that their bytes
have the checksums of the mark where it has any, and that nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from swap import AlignedBuffer, Mark, Priority, SwapSpace
from tiermem.checkpoint.manifest import FIRST, MASTER, SECOND, VALUE
from tiermem.errors import InvariantError
from tiermem.optim.masters import SLICE_NUMEL, CutBuffers, StateStore
from tiermem.optim.tiles import UnitState
from tiermem.pager.page import Intent, Kind, Lane, PageKey
from tiermem.pager.tiling import TileRange
from tiermem.zero3.layout import Slot
from tiermem.zero3.shards import Shard


@dataclass(frozen=True, slots=True)
class Holding:
    """Elements [first, first + count), in memory order, of the parameter in `slot`, as this rank has them.

    `offset`: where they begin in the unit's PARAM page, in bytes. `has_moments`: whether there are any to be kept; of
    one parameter all ranks must say the same.
    """

    unit: int
    slot: Slot
    first: int
    count: int
    offset: int
    has_moments: bool

    @property
    def planes(self) -> dict[str, torch.dtype]:
        """What is kept of each element."""
        if not self.slot.trainable:
            return {VALUE: self.slot.dtype}
        kept = (MASTER, FIRST, SECOND) if self.has_moments else (MASTER,)
        return dict.fromkeys(kept, torch.float32)


def holdings_of(shards: Sequence[Shard]) -> list[Holding]:
    """What a rank answers for, unit by unit; alone it has every parameter as a whole."""
    found = []
    for shard in shards:
        found += [Holding(shard.unit, each.slot, each.begin, each.length, each.offset, False) for each in shard.owned()]
        if shard.rank == 0:  # nobody owns what has no elements; a manifest names it all the same
            found += [
                Holding(shard.unit, slot, 0, 0, slot.offset, False) for slot in shard.layout.slots if not slot.numel
            ]
    return found


class RankState(Protocol):
    """The state of one rank."""

    def holdings(self) -> Sequence[Holding]:
        """In the order in which they are best read; a parameter may have several, by `first`."""

    def blocks(self, holding: Holding) -> Iterator[tuple[str, torch.Tensor]]:
        """The elements of each plane in order, in blocks (1-D, of the plane's dtype) valid until the next."""


class MarkedPages:
    """Reads the pages that a mark protects (`optim.masters.StatePager`). For one thread; READ leases of one page."""

    def __init__(self, space: SwapSpace, mark: Mark) -> None:
        self._space = space
        self._mark = mark
        self._held: dict[Kind, tuple[PageKey, torch.Tensor]] = {}  # the latest of each kind

    def is_written(self, key: PageKey) -> bool:
        """Whether the mark has a copy of the page."""
        return key in self._mark.copies

    def lease(self, keys: Sequence[PageKey], intent: Intent, *, lane: Lane = Lane.COMPUTE) -> _Held:  # noqa: ARG002
        """Read the page unless it was the latest of its kind; waits. Raises SwapIOError, ChecksumError."""
        if len(keys) != 1 or intent is not Intent.READ:
            raise InvariantError(f"a mark gives one page to read, not {len(keys)} to {intent.value}")
        (key,) = keys
        if self._held.get(key.kind, (None,))[0] != key:
            copy = self._mark.copies[key]
            _, kept = self._held.pop(key.kind, (None, None))
            if kept is None or kept.numel() != copy.extent.nbytes:
                del kept
                kept = torch.frombuffer(AlignedBuffer(copy.extent.nbytes).view, dtype=torch.uint8)
            # Training goes first: what it waits for stands before this in the drive's queue.
            request = self._space.start_read(
                copy.extent, kept.numpy().data, priority=Priority.WRITE_BACK, expected=copy.checksum
            )
            request.wait()
            self._held[key.kind] = key, kept
        return _Held(self._held[key.kind][1])


class _Held:
    """A page in memory until another of its kind is asked for."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def tensor(self, key: PageKey) -> torch.Tensor:  # noqa: ARG002 - there is only one
        return self._data

    def release(self) -> None:
        """Nothing to do."""

    def fail(self, error: BaseException) -> None:
        """Nothing to do: whoever reads spoils nothing."""


class MarkedState:
    """What this process has of a run's state, at the instant of a mark (`RankState`)."""

    def __init__(self, pages: MarkedPages, shards: Sequence[Shard], states: Mapping[int, UnitState]) -> None:
        self._pages = pages
        self._holdings = holdings_of(shards)
        self._states = states
        self._store = StateStore(pages, states)
        self._buffers = CutBuffers()
        # The parameters that have moments here; of several ranks those that have any on one of them, here as zeros.
        self.moments = {each.slot.parameter for each in self._holdings if self._has_moments(each.unit, each.slot)}

    def holdings(self) -> list[Holding]:
        """Unit by unit."""
        return [replace(each, has_moments=each.slot.parameter in self.moments) for each in self._holdings]

    def blocks(self, holding: Holding) -> Iterator[tuple[str, torch.Tensor]]:
        """Trained parameters slice by slice, others at once."""
        slot = holding.slot
        if not holding.count:
            return
        if not slot.trainable:
            key = PageKey(holding.unit, Kind.PARAM)
            nbytes = holding.count * slot.dtype.itemsize
            data = self._pages.lease([key], Intent.READ).tensor(key)
            yield VALUE, data[holding.offset : holding.offset + nbytes].view(slot.dtype)
            return
        for cut in self._store.cuts(holding.unit, slot.parameter):
            for part in _slices(cut):
                planes = self._store.read_cut(holding.unit, slot.parameter, part, self._buffers)
                yield from zip((MASTER, FIRST, SECOND) if holding.has_moments else (MASTER,), planes, strict=False)

    def _has_moments(self, unit: int, slot: Slot) -> bool:
        if not slot.trainable or not slot.numel:
            return False
        cuts = self._states[unit].cuts(self._states[unit].segment_of(slot.parameter))
        return any(self._pages.is_written(PageKey(unit, Kind.STATE, cut.tile)) for cut in cuts)


def _slices(cut: TileRange) -> Iterator[TileRange]:
    """Parts that `CutBuffers` have room for: a master and moments take several times the memory of what is kept."""
    for begin in range(0, cut.length, SLICE_NUMEL):
        length = min(SLICE_NUMEL, cut.length - begin)
        yield replace(cut, begin=cut.begin + begin, begin_in_tile=cut.begin_in_tile + begin, length=length)
