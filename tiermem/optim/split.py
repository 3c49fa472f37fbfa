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
is kept in the sign bit of the second moment, which is never negative. About one element in 131072 carries it, so both
directions look for candidates with one quick pass and mend them one by one.

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


def join(
    parameter: torch.Tensor,
    remainder: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    master: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Write the masters of a slice into `master` and clear the tie marks in `exp_avg_sq`.

    All are 1-D of one length: `parameter` bfloat16, `remainder` int16, `exp_avg_sq` and `master` float32, `scratch`
    int32 with undefined contents.
    """
    bits = master.view(torch.int32)
    master.copy_(parameter)
    scratch.copy_(remainder)
    bits.add_(scratch)
    marked = _marked(exp_avg_sq, remainder, scratch)
    if marked.size:
        bits.numpy()[marked] += _STEP
        exp_avg_sq.view(torch.int32).numpy()[marked] &= _MAGNITUDE


def joined(parameter: torch.Tensor, remainder: torch.Tensor, exp_avg_sq: torch.Tensor) -> torch.Tensor:
    """Return the masters of a slice as a new float32 tensor; nothing is changed."""
    master = parameter.to(torch.float32)
    bits = master.view(torch.int32)
    bits.add_(remainder.to(torch.int32))
    marked = _marked(exp_avg_sq, remainder, torch.empty_like(bits))
    if marked.size:
        bits.numpy()[marked] += _STEP
    return master


def split(
    master: torch.Tensor,
    parameter: torch.Tensor,
    remainder: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Write `master` into `parameter` and `remainder`, and the tie marks into `exp_avg_sq` (which has none).

    Shapes and dtypes as for `join`.
    """
    bits = master.view(torch.int32)
    parameter.copy_(master)
    remainder.copy_(bits)  # keeps the low 16 bits
    flags = _flags(scratch, remainder.numel())
    low = remainder.numpy()
    np.equal(low, _TIE, out=flags)
    ties = np.flatnonzero(flags)
    if not ties.size:
        return
    values = master.numpy()[ties]
    low[ties[np.isnan(values)]] = 0  # so that a mark never meets a NaN, which one more step could turn into a number
    above = ties[(values.view(np.int32) & _STEP == 0) & ~np.isnan(values)]
    exp_avg_sq.view(torch.int32).numpy()[above] |= _SIGN


def _marked(exp_avg_sq: torch.Tensor, remainder: torch.Tensor, scratch: torch.Tensor) -> npt.NDArray[np.intp]:
    flags = _flags(scratch, exp_avg_sq.numel())
    np.less(exp_avg_sq.view(torch.int32).numpy(), 0, out=flags)
    negative = np.flatnonzero(flags)
    if not negative.size:
        return negative
    # A NaN moment may be negative on its own account: only a tie can be marked.
    marked: npt.NDArray[np.intp] = negative[remainder.numpy()[negative] == _TIE]
    return marked


def _flags(scratch: torch.Tensor, numel: int) -> npt.NDArray[np.bool_]:
    flags: npt.NDArray[np.bool_] = scratch.numpy().view(np.bool_)[:numel]
    return flags
