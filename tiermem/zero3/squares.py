"""Sums of squares of bfloat16 numbers, taken while they are copied, in a loop compiled by numba.

Owns the loop and in what it adds: float32 in blocks of 4096 elements from the first one on, float64 among blocks. Does
not know gradients. Guarantees that the sum depends on the numbers and their order only, neither on who else computes
nor on where copies are cut; not that another processor, whose vectors are of another length, has the same last bit.

`norms.py` imports this where numba is installed, and compares it with numpy first. In several functions, because the
compiler makes vectors of each by itself, and of none of them written into one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

Halves = npt.NDArray[np.int16]

_BLOCK = 4096
_SIXTEEN = np.int32(16)


# As in `optim/intrinsics.py`, a wing that this one does not know.
@intrinsic
def _float_of(_context: Any, _bits: Any) -> Any:
    """The float32 with these 32 bits."""
    return types.float32(types.int32), lambda _c, builder, _s, arguments: builder.bitcast(arguments[0], ir.FloatType())


# Only here may the compiler add in another order than written: that is what makes vectors of it.
@njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _squares(halves: Halves) -> Any:
    total = np.float32(0.0)
    for i in range(halves.size):
        number = _float_of(np.int32(np.int32(halves[i]) << _SIXTEEN))
        total = np.float32(total + number * number)
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _copy(source: Halves, target: Halves) -> None:
    for i in range(source.size):
        target[i] = source[i]


@njit(nogil=True, cache=True, error_model="numpy")
def sum_of_squares(halves: Halves) -> float:
    """The sum of squares of the numbers with these bits: int16, 1-D.

    In float64; infinite where the squares of 4096 elements are too many for float32, NaN where there is one.
    """
    total = 0.0
    for start in range(0, halves.size, _BLOCK):
        total += _squares(halves[start : start + _BLOCK])
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def copy_and_add(halves: Halves, begin: int, target: Halves, total: float) -> float:
    """Copy what begins at `begin` to all of `target`; return `total` and the squares of the blocks that begin there.

    Copies one after the other that are all of `halves` together come from 0.0 to its `sum_of_squares`, wherever cut.
    """
    end = begin + target.size
    first = min(end, -(-begin // _BLOCK) * _BLOCK)
    _copy(halves[begin:first], target[: first - begin])
    for start in range(first, end, _BLOCK):
        total += _squares(halves[start : start + _BLOCK])
        stop = min(start + _BLOCK, end)
        _copy(halves[start:stop], target[start - begin : stop - begin])
    return total
