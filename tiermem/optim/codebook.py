"""The two code books of 8-bit moments, and the translation between numbers and codes.

Owns the values of the dynamic data type of "8-bit Optimizers via Block-wise Quantization" (Dettmers et al. 2022,
section 2.2), signed and unsigned, and how a number is rounded to a code. Does not know blocks, scales or tiles.
Guarantees that codes are in the order of the values, that a value of the book gets its own code, and that every number
gets the code of the nearest value, or of one that is nearer to it after rounding to eleven binary digits; of two that
are equally near the smaller magnitude's.

A value is +-10^-e (0.1 + 0.9 (2k + 1) / 2n), the middle of the k-th of n equal parts of a decade: the decade next to 1
has 64 parts (128 without sign), each one below it half as many, seven decades in all; besides there are 0 and 1. The
last bit may differ from the table of bitsandbytes, which rounds to float32 on the way.

Encoding by table
-----------------
A search for the nearest of 256 values costs 33 ns per number in torch (`bucketize`). Rounded to float16, a number in
[-1, 1] has 16 bits, so a table of 65536 codes answers with one look (0.5 ns, the conversion included). It is multiplied
by 32768 before, so that no digit is lost to float16's least exponent: what is looked up is within 1/2048 of the number,
where neighbours in the book are 1/140 apart or more. `lines.py` says the same table in another form.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

DECADES = 7
UNIT = 32768.0  # what stands for 1 among the float16 that are looked up


@dataclass(frozen=True, eq=False, slots=True)
class CodeBook:
    """`values`: float32, 256, ascending. `table`: uint8, 65536, the code of each float16 by its bits, times `UNIT`."""

    values: torch.Tensor
    table: torch.Tensor
    signed: bool

    def on(self, device: torch.device | None) -> CodeBook:
        """The same book on a device, for numbers that lie there; None: where it is."""
        return self if device is None else CodeBook(self.values.to(device), self.table.to(device), self.signed)

    def decode(self, codes: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of `codes` (1-D uint8) to `out` (float32). `index`: int64 scratch, all of one length."""
        index.copy_(codes)
        torch.index_select(self.values, 0, index, out=out)

    def encode(self, numbers: torch.Tensor, half: torch.Tensor, index: torch.Tensor, codes: torch.Tensor) -> None:
        """Write the codes of `numbers` (1-D float32, in [-1, 1]; overwritten) to `codes` (uint8).

        `half` (float16) and `index` (int64) are scratch, all of one length. A NaN gets the code of the least magnitude.
        """
        half.copy_(numbers.mul_(UNIT))
        index.copy_(half.view(torch.uint16))
        torch.index_select(self.table, 0, index, out=codes)


@functools.cache
def signed_book() -> CodeBook:
    """For first moments."""
    positive = _positive(parts=1)
    values = torch.cat([-positive.flip(0), _exactly(0.0), positive, _exactly(1.0)])
    return _book(values, signed=True)


@functools.cache
def unsigned_book() -> CodeBook:
    """For second moments. Nothing is rounded to the value 0: see "Second moments" in blocks.py."""
    values = torch.cat([_exactly(0.0), _positive(parts=2), _exactly(1.0)])
    return _book(values, signed=False)


def _exactly(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64, device="cpu")


def _positive(parts: int) -> torch.Tensor:
    """The values between 0 and 1, ascending, float64; `parts` in the lowest decade, twice as many in each next one."""
    decades = []
    for decade in range(DECADES):
        count = parts << decade
        middles = 0.1 + 0.9 * (2 * torch.arange(count, dtype=torch.float64, device="cpu") + 1) / (2 * count)
        decades.append(middles * 10.0 ** (decade - DECADES + 1))
    return torch.cat(decades)


def _book(exact: torch.Tensor, *, signed: bool) -> CodeBook:
    zero = int(torch.argmin(exact.abs()))
    middles = (exact[zero + 1 :] + exact[zero:-1]) / 2
    bits = torch.arange(1 << 15, dtype=torch.int32, device="cpu").to(torch.uint16)
    magnitudes = bits.view(torch.float16).to(torch.float64) / UNIT
    places = torch.bucketize(magnitudes, middles)
    places[~magnitudes.isfinite()] = 0
    if signed:
        codes = torch.cat([zero + places, zero - places.clamp(max=zero)])
    else:
        codes = torch.cat([places, torch.zeros_like(places)]).clamp_(min=1)
    return CodeBook(exact.to(torch.float32), codes.to(torch.uint8), signed)
