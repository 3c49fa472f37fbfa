"""Sharing the budgets of a run out to a model's units.

Owns the translation of modules and layouts into the sizes that the planner shares budgets out by, and the size of tiles
wished for. Does not do the arithmetic (`planner`) and opens nothing. Guarantees that a run which is resumed gets the
tiles it was committed with, or is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiermem.config import Config
from tiermem.errors import BudgetError, ResumeError
from tiermem.optim.tiles import state_nbytes
from tiermem.planner.device import DeviceFootprint, device_most, plan_tiers
from tiermem.planner.footprint import Footprint, UnitSize, plan_footprint, rounded
from tiermem.runtime.devices import device_budget
from tiermem.zero3.layout import UnitLayout
from tiermem.zero3.units import ModelUnits

# A tile that is to be planned: large enough for a drive to be at full speed and for few wake-ups, small enough to have
# many in hand. Measured with a budget of 512 MiB: 16 MiB moves more than 8 (fewer wake-ups) and than 32 (less ahead).
_SMALLEST_PLANNED, _LARGEST_PLANNED, _TILES_IN_BUDGET = 8 << 20, 32 << 20, 32


def share_out(
    config: Config, sizes: Sequence[UnitSize], host_nbytes: int, *, tile: int | None = None
) -> tuple[Footprint, DeviceFootprint | None]:
    """How host memory is shared out, and device memory where the computation has its own.

    `tile`: elements of a tile in the commit that is continued.

    Raises:
        ConfigError: the device is not there, or needs a size.
        BudgetError: a budget is too small; names the largest unit and the least that works.
        ResumeError: the tiles of the commit do not fit into the budgets.
    """
    ahead, tile_nbytes = config.look_ahead_nbytes, config.tile_nbytes or _planned_tile(host_nbytes)
    device_nbytes = device_budget(config, lambda: device_most(sizes))

    def share(tile: int | None) -> tuple[Footprint, DeviceFootprint | None]:
        if device_nbytes is None:
            return plan_footprint(sizes, host_nbytes, tile_nbytes, ahead, tile=tile), None
        return plan_tiers(sizes, host_nbytes, device_nbytes, tile_nbytes, ahead, tile=tile)

    shared = share(None)
    if tile is None or tile == shared[0].tile_numel:
        return shared
    try:
        return share(tile)
    except BudgetError as error:
        raise ResumeError(
            f"the run was committed with tiles of {tile} elements, which do not fit into "
            f"host_memory={host_nbytes}: resume with a larger budget ({error})"
        ) from error


def unit_sizes(divided: ModelUnits, layouts: Sequence[UnitLayout], dtype: torch.dtype) -> list[UnitSize]:
    """Every unit as the planner sees it."""
    nested = _nested(divided, layouts)
    state_itemsize = state_nbytes(dtype, 64) // 64 if any(layout.trainable for layout in layouts) else 1
    return [
        UnitSize(
            name=layout.name,
            param_nbytes=layout.nbytes,
            trainable_numel=layout.trainable_numel,
            grad_itemsize=dtype.itemsize,
            state_itemsize=state_itemsize,
            nested_nbytes=nested[layout.unit][0],
            nested_count=nested[layout.unit][1],
        )
        for layout in layouts
    ]


def _nested(divided: ModelUnits, layouts: Sequence[UnitLayout]) -> dict[int, tuple[int, int]]:
    """For each unit the most bytes, and the largest number, of others that a module call needing it holds meanwhile."""
    named = {id(module): name for name, module in divided.model.named_modules()}
    points = {named[id(point.module)]: point.units for point in divided.points}
    most = {layout.unit: (0, 0) for layout in layouts}
    for name, units in points.items():
        parts = name.split(".") if name else []
        around = ["", *(".".join(parts[:count]) for count in range(1, len(parts)))]
        held = {unit for outer in around for unit in points.get(outer, ())} | set(units)
        for unit in units:
            beside = sum(rounded(layouts[other].nbytes) for other in held if other != unit)
            most[unit] = max(most[unit][0], beside), max(most[unit][1], len(held) - 1)
    return most


def _planned_tile(host_nbytes: int) -> int:
    return min(max(host_nbytes // _TILES_IN_BUDGET, _SMALLEST_PLANNED), _LARGEST_PLANNED)
