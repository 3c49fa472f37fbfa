"""How a budget of device memory is shared out, beside that of host memory.

Owns the arithmetic from unit sizes and a device budget to what the computation may hold there at one time. Does not
know torch, pages or streams: bytes in, bytes out. Guarantees that the least budget it names works although a device's
frames lie in one piece and cannot be moved (see "Gaps"), and that tiles fit into both budgets.

Gaps. Frames that are leased stay where they are, all others can be made to go. Between and around n leased frames there
are n + 1 gaps, so a frame of b bytes finds its place if the bytes that are not leased are at least (n + 1) b, wherever
the n frames lie. That is asked for twice: when a unit is gathered inside n others, and when gradient tiles are taken
while a unit and those around it are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiermem.errors import BudgetError
from tiermem.planner.footprint import SMALLEST_TILE, Footprint, UnitSize, plan_footprint, rounded


@dataclass(frozen=True, slots=True)
class DeviceFootprint:
    """How the device budget is shared out.

    Attributes:
        nbytes: the budget.
        hold_tiles: whether a unit's gradient tiles are all leased at once while they arrive.
        reserve: bytes that fetching ahead leaves for demands.
        look_ahead: bytes fetched ahead at most.
        least: the smallest budget that would work, bytes.
    """

    nbytes: int
    hold_tiles: bool
    reserve: int
    look_ahead: int
    least: int


def plan_tiers(
    units: Sequence[UnitSize],
    host: int,
    device: int,
    tile_nbytes: int,
    look_ahead: int | None = None,
    *,
    tile: int | None = None,
) -> tuple[Footprint, DeviceFootprint]:
    """Share both budgets (bytes) out; other arguments as for `plan_footprint`.

    With a device the computation leases nothing in host memory; what it needs passes through, one unit at a time.

    Raises:
        BudgetError: the host budget, or the device budget, is too small; names the least that works.
    """
    least = device_least(units)
    if device < least:
        largest = max(units, key=lambda unit: unit.param_nbytes)
        raise BudgetError(
            f"device_memory is {device} bytes, but the largest unit ({largest.name}, {largest.param_nbytes} bytes of "
            f"parameters) needs at least {least} bytes on the device to be computed; "
            f"set device_memory to {least} bytes or more, or pass smaller units"
        )
    below = [replace(unit, nested_nbytes=0) for unit in units]
    while True:
        footprint = plan_footprint(below, host, tile_nbytes, look_ahead, tile=tile, gaps=True)
        needed = _needed(units, footprint.tile_numel, hold_tiles=False)
        if needed <= device or tile is not None or footprint.tile_numel <= SMALLEST_TILE:
            break
        tile_nbytes //= 2
    if needed > device:
        raise BudgetError(
            f"device_memory is {device} bytes, but with gradient tiles of {footprint.tile_numel} elements it takes "
            f"{needed}; raise device_memory"
        )
    holding = _needed(units, footprint.tile_numel, hold_tiles=True)
    spare = device - (holding if holding <= device else needed)
    return footprint, DeviceFootprint(
        nbytes=device,
        hold_tiles=holding <= device,
        reserve=max((_tile(unit, footprint.tile_numel) for unit in units), default=0),
        look_ahead=max(spare, device // 2),
        least=least,
    )


def device_least(units: Sequence[UnitSize]) -> int:
    """The smallest device budget that works, bytes."""
    return _needed(units, SMALLEST_TILE, hold_tiles=False)


def device_most(units: Sequence[UnitSize]) -> int:
    """Bytes with which no parameter would ever have to leave the device: more are of no use."""
    gradients = max((rounded(unit.trainable_numel * unit.grad_itemsize) for unit in units), default=0)
    return sum(rounded(unit.param_nbytes) for unit in units) + device_least(units) + 2 * gradients


def _needed(units: Sequence[UnitSize], tile_numel: int, *, hold_tiles: bool) -> int:
    """The computation's leases on the device, with room for the gaps between them."""
    tile = max((_tile(unit, tile_numel) for unit in units), default=0)
    most = max((-(-unit.trainable_numel // tile_numel) for unit in units), default=0) if hold_tiles else 1

    def of(unit: UnitSize) -> int:
        around, own = rounded(unit.nested_nbytes), rounded(unit.param_nbytes)
        gathered = around + (unit.nested_count + 1) * own
        written = around + own + (most + unit.nested_count + 2) * tile
        return max(gathered, written)

    return max(map(of, units), default=0)


def _tile(unit: UnitSize, tile_numel: int) -> int:
    return rounded(min(tile_numel, unit.trainable_numel) * unit.grad_itemsize)
