"""A step with many tiles seen through one with fewer, larger ones.

Owns the design of such a step. Does not simulate. Guarantees that what larger tiles take in hand is added to the
budgets, so that what is held and cached besides stays as it is.
"""

from __future__ import annotations

from dataclasses import replace

from tiermem.memory.arena import rounded
from tiermem.memory.rounding import round_up
from tiermem.pager.tiling import SMALLEST_TILE
from tiermem.planner.design import Design
from tiermem.planner.footprint import received_nbytes
from tiermem.planner.parts import unit_sizes


def retiled(design: Design, factor: int) -> Design:
    """The same design with tiles `factor` times as large, and as many bytes more as those take in hand.

    For quick simulation of budgets so tight that tiles are tiny: what is held and cached besides stays as it is, and
    the drive sees requests of the real size, no more of them at once than the real tiles allow.
    """
    footprint, workload = design.footprint, design.workload
    sizes = unit_sizes(workload, design.settings.division)
    most = max(size.trainable_numel for size in sizes)
    tile = max(footprint.tile_numel, min(footprint.tile_numel * factor, round_up(most, SMALLEST_TILE)))
    itemsize = workload.itemsize + workload.widest_itemsize
    grown = rounded((tile - footprint.tile_numel) * itemsize)
    larger = replace(footprint, tile_numel=tile, reserve=footprint.reserve + grown)
    small = footprint.tile_numel * workload.state_itemsize < design.drive.block
    block = rounded(footprint.tile_numel * workload.state_itemsize) if small else design.drive.block
    depth = min(design.drive.depth, 2 * footprint.depth) if small and footprint.serial else design.drive.depth
    # What arrives of other ranks, on the tier of the computation.
    arrives = max(received_nbytes(size, tile) - received_nbytes(size, footprint.tile_numel) for size in sizes)
    arrives, device = arrives if design.several else 0, design.device
    host = design.settings.host_memory + grown * (footprint.depth + 2) + (arrives if device is None else 0)
    return replace(
        design,
        settings=replace(design.settings, host_memory=host),
        footprint=larger,
        device=device and replace(device, nbytes=device.nbytes + 2 * grown + arrives),
        drive=replace(design.drive, block=block, depth=depth),
        tile_seconds=design.tile_seconds * tile / footprint.tile_numel,
    )
