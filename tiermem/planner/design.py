"""From a step, a machine and budgets to what will be simulated: pages, footprint, schedule and speeds of one rank.

Owns the arithmetic between what a user asks for and what one rank has. Does not simulate and does no I/O. Guarantees
that pages, tiles and the schedule are those the runtime would make (the same functions make them), and that what does
not fit is a BudgetError that names what is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiermem.memory.arena import FRAME_ALIGNMENT
from tiermem.memory.rounding import round_down
from tiermem.pager.page import Kind, PageKey
from tiermem.pager.schedule import Schedule
from tiermem.pager.tiling import tiles_in_turn
from tiermem.planner.device import DeviceFootprint, device_least, device_most, least_below, plan_tiers, wished_tile
from tiermem.planner.footprint import Footprint, kept_nbytes, lagging_nbytes, least_budget, plan_footprint
from tiermem.planner.lines import DriveSpeed
from tiermem.planner.machine import Link, Machine
from tiermem.planner.parts import (
    division_of,
    pages_nbytes,
    reserved_nbytes,
    shard_of,
    unit_pages,
    unit_sizes,
)
from tiermem.planner.resting import resting_units
from tiermem.planner.settings import PlanSettings
from tiermem.planner.steps import plan_step
from tiermem.planner.tilesizes import planned_tile
from tiermem.planner.workload import BACKWARD_SHARE, Workload
from tiermem.zero3.shards import Shard, copies_nbytes

# Seconds of the update's worker for a parameter on a real device: what asking takes beside a computation that asks,
# too, hardly what is asked for. Measured on an H100 (README.md, "How a budget is shared out"); no profile knows it.
_UPDATE_ABOVE = 1.1e-10


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Seconds of one unit: forward and backward of one batch, moving its gradients into pages; between ranks: gathering
    it, and adding its gradients up.
    """

    forward: float
    backward: float
    gradient: float
    gather: float
    exchange: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Everything the simulation needs of one rank.

    Attributes:
        workload: the step, its units whole.
        footprint: how its host budget is shared out.
        times: of each unit.
        update_seconds, tile_seconds: of one element, alone; of each tile besides.
        drive: its share of the drives.
        wires: (bytes a second to the device, to the host), None without a device.
        slower: see `lines.Cores`.
        lease_seconds, step_seconds: of the compute thread, for each lease and each step.
        device: how device memory is shared out; None without one.
        update_above_seconds: as `update_seconds`, where a unit is updated on the device.
        undone: whether updates under backward may have to be undone: the old bytes are in SWAP before, and gradients
            stay until that is known.
        resting: units that are updated as in "forward" though others are in "backward" (resting.py).
    """

    workload: Workload
    settings: PlanSettings
    footprint: Footprint
    times: tuple[UnitTimes, ...]
    update_seconds: float
    drive: DriveSpeed
    wires: tuple[float, float] | None
    slower: tuple[float, float, float, float]
    lease_seconds: float
    step_seconds: float
    tile_seconds: float = 0.0
    device: DeviceFootprint | None = None
    update_above_seconds: float = 0.0
    undone: bool = False
    resting: tuple[int, ...] = ()

    @property
    def update(self) -> str:
        """When units are updated: "backward", "forward" or "step"; "auto" is the first if undoing is reckoned with."""
        if self.settings.acts_as == "auto":
            return "backward" if self.undone else "forward"
        return self.settings.acts_as

    @property
    def device_budget(self) -> int | None:
        """Bytes for pages on the device; None without one."""
        return None if self.device is None else self.device.nbytes

    @property
    def hold_tiles(self) -> bool:
        """Whether a unit's gradient tiles are all leased at once."""
        return (self.device or self.footprint).hold_tiles

    @property
    def beside(self) -> bool:
        """Whether ranks gather the next unit, and add gradients up, beside the computation."""
        return (self.device or self.footprint).beside

    @property
    def several(self) -> bool:
        """Whether a unit is gathered from several ranks."""
        return self.settings.ranks > 1

    @property
    def settled(self) -> frozenset[int]:
        """The units that are updated on the device."""
        return frozenset(self.device.settled if self.device else ())

    @property
    def patient(self) -> frozenset[int]:
        """The units whose update waits for the step where it might have to be undone: as `Blueprint.patient`."""
        return self.settled.union(self.kept, self.resting) if self.undone else frozenset()

    @property
    def schedule(self) -> Schedule:
        """The accesses of a step, as the pager gets them; made anew whenever it is asked for."""
        tiles = {unit: self.tiles(unit) for unit in range(len(self.workload.units))}
        arrivals = {} if self.hold_tiles or self.several else {unit: self.arriving(unit) for unit in tiles}
        return plan_step(
            self.workload.step_order,
            tiles,
            self.update,
            [self.shard(unit) for unit in tiles],
            beside=self.beside,
            two=self.device is None,
            arrivals=arrivals,
            resting=self.resting,
            late=self.settings.division.late,
        )

    def shard(self, unit: int) -> Shard:
        """What this rank keeps of a unit."""
        return shard_of(self.workload, unit, self.settings.division, self.footprint.tile_numel)

    def arriving(self, unit: int) -> Sequence[int]:
        """The tiles of a unit's gradient in the order in which they are leased one after the other."""
        runs = self.workload.units[unit].runs
        return tiles_in_turn(runs, self.footprint.tile_numel) if runs else range(self.tiles(unit))

    def tiles(self, unit: int) -> int:
        """How many tiles a unit's trainable elements make."""
        return self.shard(unit).tiles

    def tile_numel(self, unit: int, tile: int) -> int:
        """Elements of one tile."""
        return self.shard(unit).tile_length(tile)

    def pages(self) -> list[tuple[PageKey, int]]:
        """Every page with its size in bytes, as `runtime.house.Blueprint.pages` lists them."""
        return [page for unit in range(len(self.workload.units)) for page in self.pages_of(unit)]

    def pages_of(self, unit: int) -> list[tuple[PageKey, int]]:
        """The pages of one unit, each with its size in bytes."""
        return unit_pages(self.workload, unit, self.shard(unit))

    @property
    def on_disk_once(self) -> int:
        """Bytes on disk of all pages, with one copy of each."""
        division, tile = self.settings.division, self.footprint.tile_numel
        return reserved_nbytes(self.workload, division, tile, "forward", commits=False)

    def nbytes(self, *kinds: Kind) -> int:
        """Bytes that all pages of these kinds take."""
        return pages_nbytes(self.workload, self.settings.division, self.footprint.tile_numel, kinds)

    def lag_nbytes(self, unit: int) -> int:
        """Bytes a unit keeps in memory from its gradient to the end of its update."""
        return lagging_nbytes(self.shard(unit))

    def lag(self) -> int:
        """Bytes of units whose update may lag behind the computation, as `runtime.house` has it."""
        fits = self.on_disk_once <= self.settings.host_memory
        return sys.maxsize if fits else self.footprint.lag

    @property
    def kept(self) -> frozenset[int]:
        """The units whose parameters stay in host memory by choice."""
        return frozenset(number for number, unit in enumerate(self.workload.units) if unit.kept)

    @property
    def kept_nbytes(self) -> int:
        """Bytes of host memory that those take."""
        return kept_nbytes(unit_sizes(self.workload, self.settings.division))


def make_design(workload: Workload, machine: Machine, settings: PlanSettings) -> Design:
    """What one rank does and has.

    Raises BudgetError where a tier cannot hold what it must at one time, ConfigError for ranks that do not fill nodes,
    or do not divide into copies.
    """
    per_node = machine.on_each_node(settings.ranks)
    budget = device_memory(workload, machine, settings) if machine.device is not None else None
    footprint, device = _shared_out(workload, settings, budget)
    drive, rates = machine.drive, machine.host
    drives = drive.count / per_node
    contended = machine.device is None or machine.device.simulated
    update_seconds = per_node / machine.update_rate(workload.dtype)
    beside = (rates.compute_beside_update, rates.update_beside_compute, rates.compute_beside_io, rates.update_beside_io)
    design = Design(
        workload=workload,
        settings=settings,
        footprint=footprint,
        times=_times(workload, machine, settings),
        update_seconds=update_seconds,
        drive=DriveSpeed(
            read=drive.read * drives,
            write=drive.write * drives,
            mixed=drive.mixed * drives,
            latency=drive.latency,
            depth=max(1, round(settings.queue_depth * max(1.0, drives))),
            block=settings.block_size,
        ),
        wires=(machine.device.to_device, machine.device.to_host) if machine.device else None,
        slower=beside if contended else (0.0, 0.0, 0.0, rates.update_beside_io),
        lease_seconds=rates.lease_seconds,
        step_seconds=rates.step_seconds,
        tile_seconds=rates.tile_seconds,
        device=device,
        update_above_seconds=update_seconds if contended else _UPDATE_ABOVE,
    )
    if settings.acts_as == "backward":
        return replace(design, undone=settings.clips)
    return _early(design) if settings.acts_as == "auto" else design


def _early(design: Design) -> Design:
    """As `runtime.undo.choose_schedule` has it: with updates under backward that may be undone, where that can gain."""
    settings = design.settings
    if design.footprint.serial or design.on_disk_once <= settings.host_memory:
        return design
    sizes = unit_sizes(design.workload, settings.division, each=True)
    resting = resting_units(sizes, design.footprint, settings.host_memory, design.settled)
    return replace(design, undone=True, resting=resting)


def _shared_out(
    workload: Workload, settings: PlanSettings, device: int | None
) -> tuple[Footprint, DeviceFootprint | None]:
    """As `runtime.shares.share_out`."""
    host, ahead = settings.host_memory, settings.look_ahead
    budget, tile = host + settings.beside_pages, settings.tile_nbytes
    settle = device is not None and settings.update_on == "auto"
    sizes = unit_sizes(workload, settings.division, each=settle)
    if device is None:
        return plan_footprint(sizes, host, tile or planned_tile(budget), ahead), None
    tile = tile or wished_tile(unit_sizes(workload, settings.division, each=True), host, budget, settle=settle)
    return plan_tiers(sizes, host, device, tile, ahead, settle=settle)


def device_memory(workload: Workload, machine: Machine, settings: PlanSettings) -> int:
    """Bytes of device memory that one rank uses: as `runtime.devices.device_budget` has it; zero without a device."""
    if machine.device is None:
        return 0
    nbytes = settings.device_memory
    if not nbytes:
        sizes, settle = unit_sizes(workload, settings.division, each=True), settings.update_on == "auto"
        tile, host = settings.tile_nbytes, settings.host_memory
        tile = tile or wished_tile(sizes, host, host + settings.beside_pages, settle=settle)
        nbytes = min(machine.device.memory, device_most(sizes, settle=settle, tile_nbytes=tile))
    return round_down(nbytes, FRAME_ALIGNMENT)


def least_device_memory(workload: Workload, machine: Machine, settings: PlanSettings) -> int:
    """The smallest device budget of one rank that works, bytes; zero without a device."""
    return 0 if machine.device is None else device_least(unit_sizes(workload, settings.division))


def least_host_memory(workload: Workload, ranks: int, *, copies: int = 1, stage: int = 3, device: bool = False) -> int:
    """The smallest host budget of one rank that works, bytes; `device`: beside one."""
    sizes = unit_sizes(workload, division_of(ranks, copies, stage))
    return least_below(sizes) if device else least_budget(sizes)


def swap_nbytes(design: Design, *, commits: bool) -> int:
    """Bytes that one rank's pages take on disk, with as many copies of parameters and states as a run reserves."""
    settings = design.settings
    return reserved_nbytes(
        design.workload, settings.division, design.footprint.tile_numel, settings.acts_as, commits=commits
    )


def _times(workload: Workload, machine: Machine, settings: PlanSettings) -> tuple[UnitTimes, ...]:
    rate = machine.flops(workload.dtype) if any(unit.seconds is None for unit in workload.units) else 1.0
    times = []
    for number, unit in enumerate(workload.units):
        forward, backward = unit.seconds or (unit.flops / rate, unit.flops * BACKWARD_SHARE / rate)
        gradient = unit.trainable * workload.itemsize / machine.host.copy_rate if machine.device is None else 0.0
        between = (0.0, 0.0)
        if settings.ranks > 1 and machine.link is not None:
            shard = shard_of(workload, number, settings.division, max(1, unit.trainable))
            between = _between(shard, machine.link, machine.ranks_per_node, settings)
        times.append(UnitTimes(forward, backward, gradient, *between))
    return tuple(times)


def _between(shard: Shard, link: Link, per_node: int, settings: PlanSettings) -> tuple[float, float]:
    """Seconds of gathering a unit, and of adding its gradients up: see "Several ranks" in README.md.

    The ranks of a copy follow one another, so that a copy is on one node where nodes hold whole copies.
    """
    parts, copies = settings.division.parts, settings.copies
    row = link.of(within=per_node % parts == 0)
    column = link.of(within=settings.ranks <= per_node)
    others = (parts - 1) / parts
    gather = link.latency + others * (shard.gathered_nbytes or shard.bucket_nbytes) / row
    exchange = link.latency + others * shard.bucket_nbytes / row
    if copies > 1:
        numel, itemsize = shard.layout.part_numel, shard.layout.dtype.itemsize
        summed = copies_nbytes(numel, itemsize, copies) // 2 + numel * itemsize
        exchange += 2 * link.latency + (copies - 1) / copies * summed / column
    return gather, exchange
