"""Moments kept in 8 bits, block by block.

Owns the block: 256 consecutive elements of one parameter within one tile, a code of 8 bits for each and one float32
scale for all. Does not know what is a first or a second moment, nor tiles or pages. Guarantees that what was
read from blocks is stored again with the same bits, that blocks do not depend on each other, and that the element
of the largest magnitude in a block keeps its exact value.

The scale
---------
The book ends at +1 and, below, at -0.993. So the scale is the element of largest magnitude with its sign, and not the
magnitude alone: divided by it that element is +1, exactly. With magnitudes a block whose largest element is negative
would shrink by 0.7 % each time it is stored.

Second moments
--------------
An element far below the largest of its block would be rounded to 0, and with a gradient near zero the next update would
divide its first moment by next to nothing. So the unsigned book rounds up to its least value, 3.25e-7 of the
largest (see `unsigned_book`): such an element moves less than it should, and never far more. A block of zeros has the
scale 0.

A moment that is infinite or NaN makes its block NaN, and with it the parameters at the next update.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tiermem.optim.codebook import CodeBook

BLOCK_NUMEL = 256
HOST = torch.device("cpu")  # said wherever something is made: torch's default may be another


def block_count(numel: int) -> int:
    """Blocks of a run of `numel` elements, of which the last may be short."""
    return -(-numel // BLOCK_NUMEL)


class BlockScratch:
    """What translating a slice of at most `numel` elements needs besides its results; allocated once."""

    def __init__(self, numel: int, device: torch.device = HOST) -> None:
        self.index = torch.empty(numel, dtype=torch.int64, device=device)
        self.half = torch.empty(numel, dtype=torch.float16, device=device)


@dataclass(frozen=True, slots=True)
class Blocks:
    """One moment of a run of elements: `codes` (uint8, one per element) and `scales` (float32, one per block)."""

    codes: torch.Tensor
    scales: torch.Tensor

    def part(self, begin: int, length: int) -> Blocks:
        """The elements [begin, begin + length); `begin` is a multiple of the block size, so is `length` or it ends."""
        first = begin // BLOCK_NUMEL
        return Blocks(self.codes[begin : begin + length], self.scales[first : first + block_count(length)])

    def load(self, book: CodeBook, out: torch.Tensor, scratch: BlockScratch) -> None:
        """Write the values to `out`: float32, as long as the elements, or as whole blocks: then 0 lies beyond them."""
        numel = self.codes.numel()
        book.decode(self.codes, scratch.index[:numel], out[:numel])
        out[numel:].zero_()
        whole = out.numel() // BLOCK_NUMEL
        out[: whole * BLOCK_NUMEL].view(-1, BLOCK_NUMEL).mul_(self.scales[:whole, None])
        if whole < self.scales.numel():
            out[whole * BLOCK_NUMEL :].mul_(self.scales[whole])

    def store(self, book: CodeBook, values: torch.Tensor, scratch: BlockScratch) -> None:
        """Keep `values` (float32, as long as whole blocks, 0 beyond the elements); they are overwritten."""
        numel = self.codes.numel()
        rows = values.view(-1, BLOCK_NUMEL)
        torch.amax(rows, dim=1, out=self.scales)
        if book.signed:
            # Two passes are 15 times faster than torch.aminmax, which has no vectorised form for rows.
            lowest = rows.amin(dim=1)
            torch.where(self.scales + lowest >= 0.0, self.scales, lowest, out=self.scales)
        rows.div_(self.scales[:, None])
        book.encode(values[:numel], scratch.half[:numel], scratch.index[:numel], self.codes)
