"""Sharing the budgets of a run out to a model's units.

Owns the size of tiles wished for, and the choice between memory alone and memory beside a device. Does not do the
arithmetic (`planner`), does not know modules, and opens nothing. Guarantees that a run which is resumed gets the
tiles it was committed with, or is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiermem.config import Config
from tiermem.errors import BudgetError, ConfigError, ResumeError
from tiermem.planner.device import DeviceFootprint, device_most, plan_tiers, wished_tile
from tiermem.planner.footprint import Footprint, UnitSize, plan_footprint
from tiermem.planner.tilesizes import planned_tile
from tiermem.runtime.devices import device_budget


def share_out(
    config: Config,
    sizes: Sequence[UnitSize],
    host_nbytes: int,
    *,
    beside: int = 0,
    tile: int | None = None,
    least: Callable[[int], int] = lambda nbytes: nbytes,
) -> tuple[Footprint, DeviceFootprint | None]:
    """How host memory is shared out, and device memory where the computation has its own.

    `host_nbytes`: for pages; `beside`: what else is in the budget. `tile`: elements of a tile in the commit that is
    continued. `least(number)`: the smallest of what all ranks give.

    Raises:
        ConfigError: the device is not there, or needs a size.
        BudgetError: a budget is too small; names the largest unit and the least that works.
        ResumeError: the tiles of the commit do not fit into the budgets.
    """
    ahead, settle = config.look_ahead_nbytes, config.update_on == "auto"
    below = config.tile_nbytes or wished_tile(sizes, host_nbytes, host_nbytes + beside, settle=settle)
    device_nbytes = device_budget(config, lambda: device_most(sizes, settle=settle, tile_nbytes=below))
    tile_nbytes = below if device_nbytes is not None else config.tile_nbytes or planned_tile(host_nbytes + beside)

    agreed = least(device_nbytes or 0)
    if device_nbytes is not None:
        if not agreed:
            raise ConfigError(f"device={config.device!r}: this rank computes on a device, another one does not")
        device_nbytes = agreed

    def share(tile: int | None) -> tuple[Footprint, DeviceFootprint | None]:
        if device_nbytes is None:
            return plan_footprint(sizes, host_nbytes, tile_nbytes, ahead, tile=tile), None
        return plan_tiers(sizes, host_nbytes, device_nbytes, tile_nbytes, ahead, tile=tile, settle=settle)

    shared = share(None)
    if tile is None or tile == shared[0].tile_numel:
        return shared
    try:
        return share(tile)
    except BudgetError as error:
        raise ResumeError(
            f"the run was committed with tiles of {tile} elements, which do not fit: {error}; resume with a larger "
            "budget, or with the one it had and go on from a snapshot (runtime.snapshot) with this one"
        ) from error
