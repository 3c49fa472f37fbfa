"""The table of a code book as straight lines, for processors that look up few numbers at a time but many times at once.

Owns the form and how it is found. Does not know who computes with it: `vectors.py`. Guarantees the codes of the table
for every float16, or that there are no lines.

The 32 exponents of float16 each have two lines, one up to an `edge` and one above it, because within a factor of two
the book has at most one place where the distance of its values changes, the end of a decade. A line answers with
`min((slope * mantissa / 2^16 + offset) / 2^8, cap)`, all in unsigned integers of 16 bits, `mantissa` being the ten
digits of the float16 times 64. What comes out is the distance from the code of zero, in codes; signs are not looked at.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

EXPONENTS = 32
LINES = 2 * EXPONENTS  # by exponent, then once more for those above the edge
_MANTISSAS = 1024
_FRACTION = 8
_NEVER = 0x7FFF  # an edge that no float16 is above

Words = npt.NDArray[np.uint16]
_Line = tuple[int, int, int]


def straight_lines(table: npt.NDArray[np.uint8]) -> Words:
    """The lines of a table of 65536 codes by the bits of a float16: uint16, edges, slopes, offsets and caps in a row.

    Codes of float16 that are not negative ascend. Raises ValueError if they lie on no such lines.
    """
    zero = int(table[0]) if table[0] > 1 else 0  # in an unsigned book, where nothing is rounded to 0, 1 is the least
    places = table[: EXPONENTS * _MANTISSAS].astype(np.int64) - zero
    edges = np.full(EXPONENTS, _NEVER, np.uint16)
    lines = np.zeros((3, LINES), np.uint16)
    for exponent in range(EXPONENTS):
        split, below, above = _two_lines(places[exponent * _MANTISSAS : (exponent + 1) * _MANTISSAS], exponent)
        if split < _MANTISSAS:
            edges[exponent] = exponent * _MANTISSAS + split - 1
        lines[:, exponent], lines[:, EXPONENTS + exponent] = below, above
    return np.concatenate([edges, lines.ravel()])


def _two_lines(places: npt.NDArray[np.int64], exponent: int) -> tuple[int, _Line, _Line]:
    """Where the second line begins, and both; the first is enough where the second begins beyond the last."""
    changes = np.flatnonzero(np.diff(places)) + 1
    for split in (_MANTISSAS, *changes.tolist()):
        below = _line(places[:split], 0)
        above = _line(places[split:], split) if split < _MANTISSAS else below
        if below is not None and above is not None:
            return split, below, above
    raise ValueError(f"codes of the float16 with exponent {exponent} are not on two lines")


def _line(places: npt.NDArray[np.int64], begin: int) -> _Line | None:
    """A line through the places of the mantissas from `begin` on, all of them; None if there is none."""
    cap, changes = int(places[-1]), np.flatnonzero(np.diff(places)) + 1
    if not changes.size:
        return 0, cap << _FRACTION, cap
    slopes = _slopes(changes, places)
    if not slopes.size:
        return None
    # Products only grow, so it is enough that each place is reached where it begins, and not one mantissa before.
    starts = np.concatenate([[0], changes])
    least = (places[starts][:, None] << _FRACTION) - _products(starts + begin, slopes)
    most = (places[changes][:, None] << _FRACTION) - 1 - _products(changes - 1 + begin, slopes)
    low, high = np.maximum(least.max(axis=0), 0), most.min(axis=0)
    high = np.minimum(high, 0xFFFF - _products(np.array([begin + places.size - 1]), slopes)[0])
    best = int(np.argmax(high - low))
    if high[best] < low[best]:
        return None
    return int(slopes[best]), int(low[best] + high[best]) // 2, cap


def _slopes(changes: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The slopes that a line through these changes may have."""
    if changes.size == 1:
        return np.arange(1, 1 << 16)
    rise, length = int(places[changes[-1]] - places[changes[0]]), int(changes[-1] - changes[0])
    whole = rise * _MANTISSAS << _FRACTION
    return np.arange(whole // (length + 1), min(whole // max(length - 1, 1) + 2, 1 << 16))


def _products(mantissas: npt.NDArray[Any], slopes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The upper halves of 16-bit products, a row for each mantissa."""
    return (mantissas.astype(np.int64)[:, None] << 6) * slopes[None] >> 16
