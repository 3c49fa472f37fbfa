"""How many elements a tile has: what is good for a drive, and what a budget may make of it.

Owns the sizes that come into question and their order. Does not know units, leases or whether anything fits. Guarantees
that every size is cut well: of whole blocks of `SMALLEST_TILE`, and of whole huge pages where it is large enough.
"""

from __future__ import annotations

from tiermem.memory.rounding import round_down
from tiermem.pager.tiling import SMALLEST_TILE

_WHOLE_TILE = 1 << 20
# A tile that is to be planned: large enough for a drive to be at full speed and for few wake-ups, small enough to have
# many in hand: README.md, "How large a tile is".
_SMALLEST_PLANNED, _LARGEST_PLANNED, _TILES_IN_BUDGET = 8 << 20, 64 << 20, 24
# Where a tile never sees a drive and a device computes: as much as many threads do between two turns at the
# interpreter's lock, which each of them, and who asks the device, waits for. Units that are updated on the device leave
# less room there the larger tiles are.
_LARGEST_BESIDE_A_DEVICE, _TILES_BESIDE_A_DEVICE = 1 << 30, 8
# Below this an update beside the computation gains less than its tiles' trips to the pager and to the worker cost.
_SMALLEST_BESIDE = 16 * SMALLEST_TILE


def planned_tile(budget: int, *, beside_device: bool = False, settle: bool = False) -> int:
    """Bytes of optimizer state that a tile should have where nobody says, for a budget of so many bytes.

    `beside_device`: a device computes, and all tiles fit into the budget. `settle`: units may be updated there.
    """
    largest = _LARGEST_BESIDE_A_DEVICE if beside_device else _LARGEST_PLANNED
    tiles = _TILES_BESIDE_A_DEVICE if beside_device and not settle else _TILES_IN_BUDGET
    return min(max(budget // tiles, _SMALLEST_PLANNED), largest)


def tile_sizes(tile_nbytes: int, itemsize: int) -> list[int]:
    """Elements of a tile of `tile_nbytes` bytes of state, `itemsize` each, and what to try instead: down by halves."""
    sizes = [_even(max(SMALLEST_TILE, tile_nbytes // itemsize))]
    while sizes[-1] // 2 >= SMALLEST_TILE:
        sizes.append(_even(sizes[-1] // 2))
    return sizes


def good_tiles(wanted: int) -> tuple[int, int]:
    """Elements that a tile should have at least where `wanted` are asked for, and where nothing fits with so many.

    A quarter, however the rest has to be done. Measured, 65 M float32 parameters and a budget of 15 % of their state:
    with tiles of 2**15 a unit's gradients could be held at once, and a step took 5.9 s (update="backward": 10.2); with
    tiles of 2**20, one at a time, 2.1.
    """
    least = min(_SMALLEST_BESIDE, wanted)
    return max(wanted // 4, least), least


def _even(numel: int) -> int:
    """Return a number of elements at or below this one whose pages are cut well.

    Of 2**20 and more, whole multiples: then a page of them, at an even number of bytes an element, is of whole huge
    pages, and a transfer of small ones takes up to twice as long (memory/README.md).
    """
    multiple = _WHOLE_TILE if numel >= _WHOLE_TILE else SMALLEST_TILE
    return round_down(numel, multiple)
