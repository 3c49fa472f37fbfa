"""The lossless split of a float32 master into a bfloat16 parameter and what is missing from it.

Owns the bit arithmetic of `split` (master to parameter and remainder) and `join` (back again). Does not know tiles,
pages or optimizers; it works in place on 1-D slices with scratch given by the caller, and allocates only for the few
elements that are exact ties. Guarantees that the parameter has the bits of `master.to(torch.bfloat16)` and that join
restores every master that is not NaN bit for bit (a NaN comes back as a NaN).

Ties
----
The parameter is the master rounded to nearest, ties to even; the remainder is the master's low 16 bits. Read as a
signed number the remainder is the distance from the parameter, so that (parameter << 16) + remainder is the master;
at the distance of exactly half a step, +0x8000, it reads as -0x8000 and this sum is one step too low. Sixteen bits
cannot do better: 65537 masters round to each even parameter. The missing bit, "the master lies above this parameter",
is kept in the sign bit of a float32 second moment, which is never negative (`SignMarks`), or in a plane of single bits
where moments have 8 bits (`BitMarks`). Only remainders of 0x8000 can carry it, about one in 65536, so both directions
look for those with one quick pass over the remainders and mend them one by one.

float16 has too few exponent bits for any 16-bit remainder: there the tile holds the whole master. float32 parameters
are their own masters.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_TIE = np.int16(-0x8000)
_STEP = np.int32(0x10000)
_SIGN = np.int32(-0x80000000)
_MAGNITUDE = np.int32(0x7FFFFFFF)


Indices = npt.NDArray[np.intp]


class SignMarks:
    """The marks of a slice, of which there are few, in the sign bits of a second moment: 1-D float32."""

    def __init__(self, exp_avg_sq: torch.Tensor) -> None:
        self._bits = exp_avg_sq.view(torch.int32).numpy()

    def of(self, elements: Indices) -> npt.NDArray[np.bool_]:
        """Which of these elements are marked: those with a sign."""
        signs: npt.NDArray[np.bool_] = self._bits[elements] < 0
        return signs

    def set(self, elements: Indices) -> None:
        """Give these elements a sign; none of the slice has one yet."""
        self._bits[elements] |= _SIGN

    def clear(self, elements: Indices) -> None:
        """Take the signs of these elements away, which are all there are."""
        self._bits[elements] &= _MAGNITUDE


class BitMarks:
    """As `SignMarks`, in a plane of bits: 1-D uint8, element i is bit i % 8 of byte i // 8."""

    def __init__(self, bits: torch.Tensor) -> None:
        self._bits = bits.numpy()

    def of(self, elements: Indices) -> npt.NDArray[np.bool_]:
        """Those whose bit is set."""
        marked: npt.NDArray[np.bool_] = (self._bits[elements // 8] >> (elements % 8).astype(np.uint8)) & 1 != 0
        return marked

    def set(self, elements: Indices) -> None:
        """Set the bits of these elements."""
        np.bitwise_or.at(self._bits, elements // 8, (1 << (elements % 8)).astype(np.uint8))

    def clear(self, elements: Indices) -> None:
        """Clear the bytes of these elements."""
        self._bits[elements // 8] = 0


Marks = SignMarks | BitMarks


def join(
    parameter: torch.Tensor, remainder: torch.Tensor, marks: Marks, master: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Write the masters of a slice into `master` and clear the tie marks.

    All tensors are 1-D of one length: `parameter` bfloat16, `remainder` int16, `master` float32, `scratch` int32 with
    undefined contents.
    """
    master.copy_(parameter)
    marks.clear(complete(master, remainder, marks, scratch))


def complete(master: torch.Tensor, remainder: torch.Tensor, marks: Marks, scratch: torch.Tensor) -> Indices:
    """Turn the parameters of a slice in float32, `master`, into its masters; return the elements whose mark is set.

    Nothing else is changed. Tensors as for `join`.
    """
    bits = master.view(torch.int32)
    scratch.copy_(remainder)
    bits.add_(scratch)
    ties = _ties(remainder, scratch)
    marked: Indices = ties[marks.of(ties)]
    bits.numpy()[marked] += _STEP
    return marked


def split(
    master: torch.Tensor, parameter: torch.Tensor, remainder: torch.Tensor, marks: Marks, scratch: torch.Tensor
) -> None:
    """Write `master` into `parameter` and `remainder`, and the tie marks into `marks` (which has none).

    Shapes and dtypes as for `join`.
    """
    bits = master.view(torch.int32)
    parameter.copy_(master)
    remainder.copy_(bits)  # keeps the low 16 bits
    ties = _ties(remainder, scratch)
    values = master.numpy()[ties]
    # So that a mark never meets a NaN, which one more step could turn into a number.
    remainder.numpy()[ties[np.isnan(values)]] = 0
    marks.set(ties[(values.view(np.int32) & _STEP == 0) & ~np.isnan(values)])


# On a device
# Looking for the few ties means waiting for their number. Masks over all elements take more passes, but none of them
# waits, and the bits are the same.


class SignMasks:
    """As `SignMarks`; which elements are marked is told by bool tensors as long as the slice."""

    def __init__(self, exp_avg_sq: torch.Tensor) -> None:
        self._bits = exp_avg_sq.view(torch.int32)

    def read(self) -> torch.Tensor:
        """Which elements have a sign; those of them whose remainder is no tie are not marked."""
        return self._bits < 0

    def clear(self, marked: torch.Tensor) -> None:
        """Take the signs of these elements away, which are all there are."""
        self._bits.add_(marked, alpha=int(_SIGN))  # the highest bit: adding it turns it over, and carries nowhere

    def set(self, marked: torch.Tensor) -> None:
        """Give these elements a sign; none of the slice has one yet."""
        self._bits.add_(marked, alpha=int(_SIGN))


class BitMasks:
    """As `SignMasks`, in the bits that `BitMarks` has; `numel` elements."""

    def __init__(self, bits: torch.Tensor, numel: int) -> None:
        self._bits, self._numel = bits, numel
        self._places = torch.arange(8, dtype=torch.uint8, device=bits.device)

    def read(self) -> torch.Tensor:
        """Those whose bit is set."""
        return (self._bits[:, None] >> self._places).bitwise_and_(1).view(-1)[: self._numel] != 0

    def clear(self, _: torch.Tensor) -> None:
        """Clear all bytes."""
        self._bits.zero_()

    def set(self, marked: torch.Tensor) -> None:
        """Set the bits of these elements."""
        whole = torch.zeros(8 * self._bits.numel(), dtype=torch.uint8, device=self._bits.device)
        whole[: self._numel].copy_(marked)
        self._bits.bitwise_or_((whole.view(-1, 8) << self._places).sum(dim=1, dtype=torch.uint8))


Masks = SignMasks | BitMasks


def join_masked(parameter: torch.Tensor, remainder: torch.Tensor, marks: Masks, master: torch.Tensor) -> None:
    """As `join`, on whatever device all tensors are."""
    bits = master.view(torch.int32)
    master.copy_(parameter)
    bits.add_(remainder)
    marked = marks.read().logical_and_(remainder == int(_TIE))
    bits.add_(marked, alpha=int(_STEP))
    marks.clear(marked)


def split_masked(master: torch.Tensor, parameter: torch.Tensor, remainder: torch.Tensor, marks: Masks) -> None:
    """As `split`, on whatever device all tensors are."""
    bits = master.view(torch.int32)
    parameter.copy_(master)
    remainder.copy_(bits)
    ties, missing = remainder == int(_TIE), master.isnan()
    even = (bits & int(_STEP) == 0).logical_and_(ties)
    remainder.masked_fill_(ties.logical_and_(missing), 0)
    marks.set(even > missing)


def _ties(remainder: torch.Tensor, scratch: torch.Tensor) -> Indices:
    """The elements of the slice whose remainder is half a step."""
    low = remainder.numpy()
    flags: npt.NDArray[np.bool_] = scratch.numpy().view(np.bool_)[: low.size]
    np.equal(low, _TIE, out=flags)
    return np.flatnonzero(flags)
