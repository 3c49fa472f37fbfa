"""How a run of elements falls into tiles.

Owns the integer arithmetic of tiles, and the multiples at which parameters and tiles are cut, on which both wings agree
here. Does not know what the elements are, where they live or how many bytes they have. Guarantees that the pieces of a
run cover it exactly, in order and without overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

# Elements: parameters begin, and are cut, at multiples of it only, as fused AdamW has the same bits there alone
# ("Slicing and bits" in `optim/kernels.py`).
ALIGN_NUMEL = 64
# Elements of the smallest tile; all others are multiples of it.
SMALLEST_TILE = 2048


@dataclass(frozen=True, slots=True)
class TileRange:
    """A piece of a run that lies within one tile; all numbers count elements.

    Elements `[begin, begin + length)` of the run, counted from the run's own start, are elements
    `[begin_in_tile, begin_in_tile + length)` of tile number `tile`.
    """

    tile: int
    begin_in_tile: int
    begin: int
    length: int


def tile_count(length: int, tile: int) -> int:
    """Return how many tiles of `tile` elements hold `length` elements; the last one may be shorter."""
    _demand_tile(tile)
    if length < 0:
        raise ValueError(f"a length is not negative, found {length}")
    return -(-length // tile)


@functools.lru_cache(maxsize=1 << 16)
def tile_ranges(start: int, length: int, tile: int) -> tuple[TileRange, ...]:
    """Cut the run of `length` elements that begins at element `start` of a tiled sequence at the tile boundaries.

    An empty run has no pieces. Raises ValueError for a negative start or length, or a tile without elements.
    """
    _demand_tile(tile)
    if start < 0 or length < 0:
        raise ValueError(f"start and length are not negative, found {start} and {length}")
    ranges = []
    begin = 0
    while begin < length:
        number, begin_in_tile = divmod(start + begin, tile)
        piece = min(tile - begin_in_tile, length - begin)
        ranges.append(TileRange(number, begin_in_tile, begin, piece))
        begin += piece
    return tuple(ranges)


def tiles_in_turn(runs: Iterable[tuple[int, int]], tile: int) -> tuple[int, ...]:
    """The tiles that these runs (start, length) touch, run by run: several times where several runs share a tile."""
    return tuple(piece.tile for start, length in runs for piece in tile_ranges(start, length, tile))


def _demand_tile(tile: int) -> None:
    if tile <= 0:
        raise ValueError(f"a tile holds at least one element, found {tile}")
