"""What a rank keeps of a unit, and where it lies in that rank's pages.

Owns the arithmetic between a unit's flat buffer and the pages of one rank. Does not know values, pages' places or how
ranks talk. Guarantees that the pieces of all ranks cover every parameter exactly once, that every cut inside a
parameter is at a multiple of 64 elements from its start (64 bytes for frozen ones), and that one rank's shard is the
whole buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tiermem.memory.rounding import round_up
from tiermem.pager.page import Kind, PageKey
from tiermem.pager.tiling import tile_count, tile_ranges
from tiermem.zero3.layout import ALIGN_NBYTES, Slot, UnitLayout

# Pages of kind TRANSIT, by tile number.
_GATHERED, _BUCKET, _RECEIVED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [begin, begin + length) of a parameter in memory order; `offset`: bytes from the start of the page."""

    slot: Slot
    begin: int
    length: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.length * self.slot.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BucketRange:
    """Elements [begin, begin + length) of a parameter lie from element `start` on in the bucket of gradients."""

    begin: int
    length: int
    start: int


@dataclass(frozen=True)
class Shard:
    """One rank's part of a unit. `whole`: the PARAM page holds all of the unit all the same (ZeRO's stages 1 and 2).

    `rank`: among those who share a copy. `copies`: how many copies of the model the ranks keep.
    """

    layout: UnitLayout
    rank: int = 0
    whole: bool = False
    copies: int = 1

    @property
    def unit(self) -> int:
        """The unit's number."""
        return self.layout.unit

    @cached_property
    def begin(self) -> int:
        """First trainable element of this part, counted from the unit's start."""
        return self.rank * self.layout.part_numel

    @cached_property
    def trainable_numel(self) -> int:
        """Trainable elements of this part, without padding; 0 for ranks a small unit does not reach."""
        return min(max(0, self.layout.trainable_numel - self.begin), self.layout.part_numel)

    @property
    def page_begin(self) -> int:
        """First trainable element of this part, counted from the start of the PARAM page."""
        return self.begin if self.whole else 0

    @cached_property
    def frozen_offset(self) -> int:
        """First frozen byte in a PARAM page that holds the part only."""
        return round_up(self.layout.part_numel * self.layout.dtype.itemsize, ALIGN_NBYTES)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the PARAM page; the same on every rank."""
        if self.whole or self.layout.ranks == 1:
            return self.layout.nbytes
        part = self.layout.part_numel * self.layout.dtype.itemsize
        return max(1, self.frozen_offset + self.layout.frozen_part if self.layout.frozen_part else part)

    @cached_property
    def tiles(self) -> int:
        """How many tiles of gradients and states this rank has."""
        return tile_count(self.trainable_numel, self.layout.tile_numel)

    def tile_length(self, tile: int) -> int:
        """Elements in tile `tile` of this rank."""
        return min(self.layout.tile_numel, self.trainable_numel - tile * self.layout.tile_numel)

    @cached_property
    def exchanges(self) -> int:
        """How many exchanges the gradient takes: one for each tile of the largest part."""
        return tile_count(self.layout.part_numel, self.layout.tile_numel)

    def exchange_length(self, tile: int) -> int:
        """Elements that each rank gives each other in exchange `tile`, padding included."""
        return min(self.layout.tile_numel, self.layout.part_numel - tile * self.layout.tile_numel)

    @property
    def bucket_nbytes(self) -> int:
        """Bytes of the unit's gradient before it is added up, padding included."""
        return self.layout.part_numel * self.layout.ranks * self.layout.dtype.itemsize

    @property
    def received_nbytes(self) -> int:
        """Bytes that arrive in the largest exchange, and beside them what is added up over copies."""
        return arriving_nbytes(self.exchange_length(0), self.layout.dtype.itemsize, self.layout.ranks, self.copies)

    @property
    def gathered_key(self) -> PageKey:
        """The transient page of the gathered unit."""
        return PageKey(self.unit, Kind.TRANSIT, _GATHERED)

    @property
    def bucket_key(self) -> PageKey:
        """The transient page of gradients that are to be added up."""
        return PageKey(self.unit, Kind.TRANSIT, _BUCKET)

    @property
    def received_key(self) -> PageKey:
        """The transient page of gradients that have come from the ranks."""
        return PageKey(self.unit, Kind.TRANSIT, _RECEIVED)

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the transient page of the gathered unit; 0 where the PARAM page is the unit."""
        return 0 if self.whole or self.layout.ranks == 1 else self.layout.nbytes

    def pages(self) -> list[tuple[PageKey, int]]:
        """The pages of parameters and gradients with their sizes in bytes."""
        layout = self.layout
        itemsize = layout.dtype.itemsize
        gradients = [(layout.gradient_key(tile), self.tile_length(tile) * itemsize) for tile in range(self.tiles)]
        return [(layout.key, self.nbytes), *gradients]

    def transit_pages(self) -> list[tuple[PageKey, int]]:
        """The transient pages with their sizes in bytes; one rank has none."""
        if self.layout.ranks == 1:
            return []
        pages = [(self.gathered_key, self.gathered_nbytes)] if self.gathered_nbytes else []
        if self.layout.part_numel:
            pages += [(self.bucket_key, self.bucket_nbytes), (self.received_key, self.received_nbytes)]
        return pages

    def owned(self) -> list[Piece]:
        """The pieces of parameters that this rank answers for, by offset: what it updates, saves and contributes."""
        size, base = self.layout.dtype.itemsize, self.page_begin * self.layout.dtype.itemsize
        pieces = [
            Piece(slot, low - slot.start, high - low, base + (low - self.begin) * size)
            for slot in self.layout.trainable
            for low, high in [_cut(slot.start, slot.numel, self.begin, self.layout.part_numel)]
            if low < high
        ]
        first = self.layout.frozen_begin + self.rank * self.layout.frozen_part
        into = first if self.whole else self.frozen_offset
        for slot in self.layout.slots[len(self.layout.trainable) :]:
            low, high = _cut(slot.offset, slot.nbytes, first, self.layout.frozen_part)
            if low < high:
                size = slot.dtype.itemsize
                pieces.append(Piece(slot, (low - slot.offset) // size, (high - low) // size, into + low - first))
        return pieces

    def held(self) -> list[Piece]:
        """The pieces that the PARAM page holds: what is owned, or everything if it is `whole`."""
        if not self.whole:
            return self.owned()
        return [Piece(slot, 0, slot.numel, slot.offset) for slot in self.layout.slots if slot.numel]


def owned_of(shard: Shard, slot: Slot) -> list[Piece]:
    """The pieces of one parameter that the rank answers for: one, or none."""
    return [piece for piece in shard.owned() if piece.slot.parameter == slot.parameter]


def bucket_ranges(shard: Shard, slot: Slot) -> list[BucketRange]:
    """Where a trainable parameter's gradient lies in the bucket: what goes to each rank lies together, by tile."""
    layout = shard.layout
    ranges = []
    for to_rank in tile_ranges(slot.start, slot.numel, max(1, layout.part_numel)):
        for cut in tile_ranges(to_rank.begin_in_tile, to_rank.length, layout.tile_numel):
            before = cut.tile * layout.tile_numel * layout.ranks
            start = before + to_rank.tile * shard.exchange_length(cut.tile) + cut.begin_in_tile
            ranges.append(BucketRange(to_rank.begin + cut.begin, cut.length, start))
    return ranges


def arriving_nbytes(numel: int, itemsize: int, ranks: int, copies: int) -> int:
    """Bytes that an exchange of gradients takes where `numel` elements come from each of the ranks.

    Several copies add their sums up besides, in float32 at least: what is sent, and what comes, in as many pieces.
    """
    return numel * itemsize * ranks + copies_nbytes(numel, itemsize, copies)


def copies_nbytes(numel: int, itemsize: int, copies: int) -> int:
    """What of them is for the sums that copies add up."""
    return 2 * round_up(numel, copies) * max(4, itemsize) if copies > 1 else 0


def shards_of(layouts: Sequence[UnitLayout], rank: int, *, whole: bool, copies: int) -> tuple[Shard, ...]:
    """The shards of one rank, by unit."""
    return tuple(Shard(layout, rank, whole, copies) for layout in layouts)


def _cut(start: int, length: int, window: int, width: int) -> tuple[int, int]:
    """The part of [start, start + length) inside [window, window + width)."""
    return max(start, window), min(start + length, window + width)
