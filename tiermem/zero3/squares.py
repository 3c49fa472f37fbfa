"""Sums of squares of bfloat16 numbers, taken while they are copied or added to others, in a loop compiled by numba.

Owns the loop and in what it adds: float32 in blocks of 4096 elements from the first one on, float64 among blocks. Does
not know gradients. Guarantees the sums that torch has, bit for bit (but those of a NaN), and that their squares depend
on the numbers and their order only, neither on who else computes nor on where copies are cut; not that another
processor, whose vectors are of another length, has the same last bit.

`norms.py` imports this where numba is installed, and compares it with numpy first. In several functions, because the
compiler makes vectors of each by itself, and of none of them written into one. `team.py` compiles some of them into its
own loop, and numba keeps that by the date of that file: whoever changes something here touches it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tiermem.machine_code import bits_of, float_of, loop

Halves = npt.NDArray[np.int16]

BLOCK = 4096
_SIXTEEN = np.int32(16)
_ALMOST_HALF = np.int32(0x7FFF)
_NAN = np.int16(0x7FC0)


# Only here may the compiler add in another order than written: that is what makes vectors of it.
@loop(fastmath={"reassoc", "contract"})
def _squares(halves: Halves) -> Any:
    total = np.float32(0.0)
    for i in range(halves.size):
        number = float_of(np.int32(np.int32(halves[i]) << _SIXTEEN))
        total = np.float32(total + number * number)
    return total


@loop()
def _copy(source: Halves, target: Halves) -> None:
    for i in range(source.size):
        target[i] = source[i]


@loop()
def add_rounded(one: Any, other: Any) -> Any:
    """The bits of the sum of two bfloat16 numbers with these bits."""
    number = np.float32(float_of(np.int32(np.int32(one) << _SIXTEEN)) + float_of(np.int32(np.int32(other) << _SIXTEEN)))
    bits = bits_of(number)
    # To the nearest, of two to the even one.
    rounded = np.int32(bits + _ALMOST_HALF + ((bits >> _SIXTEEN) & np.int32(1)))
    return np.int16(rounded >> _SIXTEEN) if number == number else _NAN


@loop()
def _add(source: Halves, target: Halves) -> None:
    for i in range(source.size):
        target[i] = add_rounded(source[i], target[i])


@loop()
def put(source: Halves, target: Halves, adds: bool) -> None:
    """Copy to `target`, or add to it."""
    if adds:
        _add(source, target)
    else:
        _copy(source, target)


@loop()
def put_squares(halves: Halves, squares: Any, place: int) -> None:
    """Write the sum of squares of a block to its place among those of others."""
    squares[place] = _squares(halves)


@loop()
def sum_of_squares(halves: Halves) -> float:
    """The sum of squares of the numbers with these bits: int16, 1-D.

    In float64; infinite where the squares of 4096 elements are too many for float32, NaN where there is one.
    """
    total = 0.0
    for start in range(0, halves.size, BLOCK):
        total += _squares(halves[start : start + BLOCK])
    return total


@loop()
def copy_and_add(halves: Halves, begin: int, target: Halves, total: float) -> float:
    """Copy what begins at `begin` to all of `target`; return `total` and the squares of the blocks that begin there.

    Copies one after the other that are all of `halves` together come from 0.0 to its `sum_of_squares`, wherever cut.
    """
    end = begin + target.size
    first = min(end, -(-begin // BLOCK) * BLOCK)
    _copy(halves[begin:first], target[: first - begin])
    for start in range(first, end, BLOCK):
        total += _squares(halves[start : start + BLOCK])
        stop = min(start + BLOCK, end)
        _copy(halves[start:stop], target[start - begin : stop - begin])
    return total


@loop()
def sum_and_add(halves: Halves, begin: int, target: Halves, total: float, block: Halves) -> float:
    """Add what begins at `begin` to all of `target`, as torch does; return `total` and the squares of these sums.

    The squares of blocks, like those of `copy_and_add`: `block`, of 4096 elements, keeps one that is cut until the rest
    of it comes.
    """
    end = begin + target.size
    first = min(end, -(-begin // BLOCK) * BLOCK)
    _add(halves[begin:first], target[: first - begin])
    if first > begin:
        _copy(target[: first - begin], block[begin % BLOCK :])
        if first % BLOCK == 0 or first == halves.size:
            total += _squares(block[: (first - 1) % BLOCK + 1])
    for start in range(first, end, BLOCK):
        stop = min(start + BLOCK, end)
        sums = target[start - begin : stop - begin]
        _add(halves[start:stop], sums)
        if stop - start == BLOCK or stop == halves.size:
            total += _squares(sums)
        else:
            _copy(sums, block)
    return total
