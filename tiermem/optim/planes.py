"""What is in a STATE tile: typed views of its bytes, and the moments in them.

Owns the meaning of a tile's planes, for float32 moments and for 8-bit ones. Does not know pages, leases or the update.
Guarantees that views lie inside the buffer and do not overlap, and that moments stored and read again are the
same numbers, rounded to 8 bits where they are kept so. A tile of zero bytes means zero moments.

A tile without 8-bit moments: remainder (int16) for bfloat16 parameters or master (float32) for float16 ones, exp_avg
and exp_avg_sq, each as long as the tile. Otherwise: the same first plane, exp_avg and exp_avg_sq of the parameters that
keep float32, then codes of both moments, scales of both, and the marks of bfloat16 masters, of those that do not. Those
lie piece after piece (`tiles.Stretch`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from tiermem.errors import InvariantError
from tiermem.optim.blocks import BLOCK_NUMEL, HOST, Blocks, BlockScratch, block_count
from tiermem.optim.codebook import signed_book, unsigned_book
from tiermem.optim.split import BitMarks, BitMasks, Marks, Masks, SignMarks, SignMasks
from tiermem.optim.tiles import Mixture, UnitState, aligned, master_dtypes


@dataclass(frozen=True, slots=True)
class StatePlanes:
    """A run of elements with float32 moments; each view 1-D, as long as the run.

    `remainder` (int16) exists for bfloat16 parameters, `master` (float32) for float16 ones. The sign bit of
    `exp_avg_sq` belongs to the split of bfloat16 masters (see "Ties" in split.py).
    """

    remainder: torch.Tensor | None
    master: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.exp_avg.numel()

    @property
    def marks(self) -> Marks:
        """Where the split of masters keeps its marks."""
        return SignMarks(self.exp_avg_sq)

    @property
    def masks(self) -> Masks:
        """The same marks, for all elements at once."""
        return SignMasks(self.exp_avg_sq)

    def part(self, begin: int, length: int) -> StatePlanes:
        """The elements [begin, begin + length)."""
        piece = slice(begin, begin + length)
        return StatePlanes(*_cut(self.remainder, self.master, piece), self.exp_avg[piece], self.exp_avg_sq[piece])

    def read_moments(self, first: torch.Tensor, second: torch.Tensor, _: BlockScratch) -> None:
        """Copy both moments, float32, to `first` and `second`."""
        first.copy_(self.exp_avg)
        second.copy_(self.exp_avg_sq)
        if self.remainder is not None:
            second.abs_()

    def store_moments(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Overwrite both moments; the master stays."""
        self.exp_avg.copy_(first)
        if self.remainder is None:
            self.exp_avg_sq.copy_(second)
        else:
            torch.copysign(second.abs(), self.exp_avg_sq, out=self.exp_avg_sq)

    def clear_moments(self) -> None:
        """Make both moments zero, and forget the marks."""
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()


@dataclass(frozen=True, slots=True)
class BlockPlanes:
    """A run of elements of one parameter with 8-bit moments, from a block's first element on.

    `remainder` and `master` as in `StatePlanes`; `mark_bits` (uint8, a bit per element) exists for bfloat16 parameters.
    """

    remainder: torch.Tensor | None
    master: torch.Tensor | None
    mark_bits: torch.Tensor | None
    exp_avg: Blocks
    exp_avg_sq: Blocks

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.exp_avg.codes.numel()

    @property
    def marks(self) -> Marks:
        """Where the split of masters keeps its marks. Raises `InvariantError` where masters are not split."""
        return BitMarks(self._bits)

    @property
    def masks(self) -> Masks:
        """The same marks, for all elements at once. Raises as `marks`."""
        return BitMasks(self._bits, self.numel)

    @property
    def _bits(self) -> torch.Tensor:
        if self.mark_bits is None:
            raise InvariantError("marks of a split were asked for where masters are not split")
        return self.mark_bits

    def part(self, begin: int, length: int) -> BlockPlanes:
        """The elements [begin, begin + length): whole blocks, the last of the run may be short."""
        if begin % BLOCK_NUMEL or (length % BLOCK_NUMEL and begin + length != self.numel):
            raise InvariantError(f"elements {begin} to {begin + length} are not blocks of {BLOCK_NUMEL}")
        bits = None if self.mark_bits is None else self.mark_bits[begin // 8 : -(-(begin + length) // 8)]
        piece = slice(begin, begin + length)
        blocks = self.exp_avg.part(begin, length), self.exp_avg_sq.part(begin, length)
        return BlockPlanes(*_cut(self.remainder, self.master, piece), bits, *blocks)

    def read_moments(self, first: torch.Tensor, second: torch.Tensor, scratch: BlockScratch) -> None:
        """Copy both moments, float32, to `first` and `second`."""
        self.exp_avg.load(signed_book(), first, scratch)
        self.exp_avg_sq.load(unsigned_book(), second, scratch)

    def store_moments(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Overwrite both moments with these, rounded; the master stays."""
        whole, scratch = block_count(self.numel) * BLOCK_NUMEL, BlockScratch(self.numel)
        for book, blocks, values in (
            (signed_book(), self.exp_avg, first),
            (unsigned_book(), self.exp_avg_sq, second),
        ):
            padded = torch.zeros(whole, dtype=torch.float32, device=HOST)
            padded[: self.numel] = values
            blocks.store(book, padded, scratch)

    def clear_moments(self) -> None:
        """Make both moments zero, and forget the marks."""
        for blocks in (self.exp_avg, self.exp_avg_sq):
            blocks.codes.zero_()
            blocks.scales.zero_()
        if self.mark_bits is not None:
            self.mark_bits.zero_()


@dataclass(frozen=True, slots=True)
class MixedPlanes:
    """A whole tile in which some moments are in 8 bits. `float32` and `blocks` hold the elements of each kind."""

    numel: int
    remainder: torch.Tensor | None
    master: torch.Tensor | None
    mixture: Mixture
    float32: tuple[torch.Tensor, torch.Tensor]
    blocks: tuple[Blocks, Blocks]
    mark_bits: torch.Tensor | None

    def part(self, begin: int, length: int) -> StatePlanes | BlockPlanes:
        """A run of elements of one parameter. Raises `InvariantError` for one that is no piece of a parameter."""
        for stretch in self.mixture.stretches:
            if stretch.begin <= begin and begin + length <= stretch.begin + stretch.length:
                break
        else:
            raise InvariantError(f"elements {begin} to {begin + length} of a tile are not of one parameter")
        piece = slice(stretch.begin, stretch.begin + stretch.length)
        own = slice(stretch.place, stretch.place + stretch.length)
        narrow = _cut(self.remainder, self.master, piece)
        if not stretch.quantized:
            moments = self.float32[0][own], self.float32[1][own]
            return StatePlanes(*narrow, *moments).part(begin - stretch.begin, length)
        scales = slice(stretch.block, stretch.block + block_count(stretch.length))
        bits = None if self.mark_bits is None else self.mark_bits[own.start // 8 : -(-own.stop // 8)]
        first, second = (Blocks(blocks.codes[own], blocks.scales[scales]) for blocks in self.blocks)
        return BlockPlanes(*narrow, bits, first, second).part(begin - stretch.begin, length)


def tile_planes(buffer: torch.Tensor, state: UnitState, tile: int) -> StatePlanes | MixedPlanes:
    """View STATE page `tile` of a unit. `buffer`: 1-D uint8, at least `state.state_nbytes(tile)` long."""
    sizes = state.plane_sizes(tile)
    ends = [0]
    for nbytes in sizes:
        ends.append(ends[-1] + aligned(nbytes))
    if buffer.numel() < ends[-1]:
        raise InvariantError(f"STATE tile {tile} of unit {state.unit} takes {ends[-1]} bytes, found {buffer.numel()}")
    views = [buffer[begin : begin + nbytes] for (begin, _), nbytes in zip(pairwise(ends), sizes, strict=True)]
    first = [views.pop(0).view(dtype) for dtype in master_dtypes(state.dtype)]
    remainder = first[0] if state.dtype == torch.bfloat16 else None
    master = first[0] if state.dtype == torch.float16 else None
    exact = views[0].view(torch.float32), views[1].view(torch.float32)
    mixture = state.mixture(tile)
    if mixture is None:
        return StatePlanes(remainder, master, *exact)
    scales = views[4].view(torch.float32), views[5].view(torch.float32)
    return MixedPlanes(
        numel=state.tile_length(tile),
        remainder=remainder,
        master=master,
        mixture=mixture,
        float32=exact,
        blocks=(Blocks(views[2], scales[0]), Blocks(views[3], scales[1])),
        mark_bits=views[6] if state.dtype == torch.bfloat16 else None,
    )


def _cut(
    remainder: torch.Tensor | None, master: torch.Tensor | None, piece: slice
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return None if remainder is None else remainder[piece], None if master is None else master[piece]
