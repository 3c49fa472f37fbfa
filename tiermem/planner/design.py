"""From a step, a machine and budgets to what will be simulated: pages, footprint, schedule and speeds of one rank.

Owns the arithmetic between what a user asks for and what one rank has. Does not simulate and does no I/O. Guarantees
that pages, tiles and the schedule are those the runtime would make (the same functions make them), and that what does
not fit is a BudgetError that names what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiermem.errors import BudgetError, ConfigError
from tiermem.pager.page import Kind, PageKey
from tiermem.pager.schedule import Schedule
from tiermem.pager.tiling import tile_count, tiles_in_turn
from tiermem.planner.device import DeviceFootprint, device_least, least_below, plan_tiers
from tiermem.planner.footprint import Footprint, UnitSize, kept_nbytes, least_budget, plan_footprint, rounded
from tiermem.planner.lines import DriveSpeed
from tiermem.planner.machine import Machine
from tiermem.planner.resting import resting_units
from tiermem.planner.steps import plan_step
from tiermem.planner.tilesizes import planned_tile
from tiermem.planner.workload import BACKWARD_SHARE, Workload

_PLANE_ALIGNMENT = 64
_BLOCK_ELEMENTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What a user decides, as far as time and bytes depend on it; sizes in bytes, None: planned.

    `host_memory` and `device_memory` are one rank's, for pages. `update`, `update_on`: as `Config` takes them.
    """

    host_memory: int
    device_memory: int | None = None
    update: str = "forward"
    tile_nbytes: int | None = None
    look_ahead: int | None = None
    block_size: int = 8 << 20
    queue_depth: int = 8
    ranks: int = 1
    update_on: str = "host"
    beside_pages: int = 0  # what else is in the host budget


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Seconds of one unit: forward and backward of one batch, moving its gradients into pages, gathering it."""

    forward: float
    backward: float
    gradient: float
    gather: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Everything the simulation needs of one rank.

    Attributes:
        workload: the rank's share.
        footprint: how its host budget is shared out.
        times: of each unit.
        update_seconds, tile_seconds: of one element, alone; of each tile besides.
        drive: its share of the drives.
        wires: (bytes a second to the device, to the host), None without a device.
        slower: see `lines.Cores`.
        lease_seconds, step_seconds: of the compute thread, for each lease and each step.
        device_budget: bytes for pages there, None without a device.
        device: how they are shared out; None without one, and over ranks.
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
    device_budget: int | None
    tile_seconds: float = 0.0
    device: DeviceFootprint | None = None
    update_above_seconds: float = 0.0
    undone: bool = False
    resting: tuple[int, ...] = ()

    @property
    def update(self) -> str:
        """When units are updated: "backward", "forward" or "step"; "auto" is the first if undoing is reckoned with."""
        if self.settings.update == "auto":
            return "backward" if self.undone else "forward"
        return self.settings.update

    @property
    def hold_tiles(self) -> bool:
        """Whether a unit's gradient tiles are all leased at once."""
        return (self.device or self.footprint).hold_tiles

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
        arrivals = {} if self.hold_tiles else {unit: self.arriving(unit) for unit in tiles}
        return plan_step(self.workload.step_order, tiles, self.update, arrivals=arrivals, resting=self.resting)

    def arriving(self, unit: int) -> Sequence[int]:
        """The tiles of a unit's gradient in the order in which they are leased one after the other."""
        runs = self.workload.units[unit].runs
        return tiles_in_turn(runs, self.footprint.tile_numel) if runs else range(self.tiles(unit))

    def tiles(self, unit: int) -> int:
        """How many tiles a unit's trainable elements make."""
        return tile_count(self.workload.units[unit].trainable, self.footprint.tile_numel)

    def tile_numel(self, unit: int, tile: int) -> int:
        """Elements of one tile."""
        size = self.footprint.tile_numel
        return min(size, self.workload.units[unit].trainable - tile * size)

    def pages(self) -> list[tuple[PageKey, int]]:
        """Every page with its size in bytes, as `runtime.house.Blueprint.pages` lists them."""
        return [page for unit in range(len(self.workload.units)) for page in self.pages_of(unit)]

    def pages_of(self, unit: int) -> list[tuple[PageKey, int]]:
        """The pages of one unit, each with its size in bytes."""
        work, itemsize = self.workload.units[unit], self.workload.itemsize
        found = [(PageKey(unit, Kind.PARAM), max(1, work.numel * itemsize))]
        for tile in range(self.tiles(unit)):
            numel = self.tile_numel(unit, tile)
            found.append((PageKey(unit, Kind.GRAD, tile), numel * itemsize))
            found.append((PageKey(unit, Kind.STATE, tile), state_nbytes(self.workload, numel)))
        return found

    def nbytes(self, *kinds: Kind) -> int:
        """Bytes that all pages of these kinds take."""
        of_shape: dict[tuple[int, int], int] = {}  # units of one shape have pages of the same sizes
        total = 0
        for number, unit in enumerate(self.workload.units):
            shape = unit.numel, unit.trainable
            if shape not in of_shape:
                of_shape[shape] = sum(rounded(nbytes) for key, nbytes in self.pages_of(number) if key.kind in kinds)
            total += of_shape[shape]
        return total

    def lag_nbytes(self, unit: int) -> int:
        """Bytes a unit keeps in memory from its gradient to the end of its update."""
        work = self.workload.units[unit]
        page = 0 if work.kept else rounded(work.numel * self.workload.itemsize)
        return page + work.trainable * self.workload.itemsize

    @property
    def kept(self) -> frozenset[int]:
        """The units whose parameters stay in host memory by choice."""
        return frozenset(number for number, unit in enumerate(self.workload.units) if unit.kept)

    @property
    def kept_nbytes(self) -> int:
        """Bytes of host memory that those take."""
        return kept_nbytes(unit_sizes(self.workload))


def state_nbytes(workload: Workload, numel: int) -> int:
    """Bytes of a STATE tile of `numel` elements: each plane begins at a multiple of 64 bytes."""
    planes = {"bfloat16": [2 * numel], "float16": [4 * numel], "float32": []}[workload.dtype]
    if workload.moments == "int8":  # as if all were in blocks: what is kept in float32 (embeddings) is not known here
        scales = -(-numel // _BLOCK_ELEMENTS) * 4
        planes += [numel, numel, scales, scales] + ([numel // 8] if workload.dtype == "bfloat16" else [])
    else:
        planes += [4 * numel, 4 * numel]
    return sum(-(-nbytes // _PLANE_ALIGNMENT) * _PLANE_ALIGNMENT for nbytes in planes)


def unit_sizes(workload: Workload, *, each: bool = False) -> list[UnitSize]:
    """The units as the budget sees them; of several with the same sizes the first, since only the largest count.

    But every one that is kept in memory by choice: of those the sum counts. `each`: and all others as well.
    """
    alike = {
        (unit.numel, unit.trainable, unit.nested_nbytes, unit.nested_count, number if unit.kept or each else -1): unit
        for number, unit in reversed(list(enumerate(workload.units)))
    }
    return [
        UnitSize(
            name=unit.name,
            param_nbytes=max(1, unit.numel * workload.itemsize),
            trainable_numel=unit.trainable,
            grad_itemsize=workload.itemsize,
            state_itemsize=workload.state_itemsize,
            nested_nbytes=unit.nested_nbytes,
            nested_count=unit.nested_count,
            kept=unit.kept,
        )
        for unit in reversed(alike.values())
    ]


def make_design(workload: Workload, machine: Machine, settings: PlanSettings) -> Design:
    """What one rank does and has.

    Raises BudgetError where a tier cannot hold what it must at one time, ConfigError for ranks that do not fill nodes.
    """
    _, per_node = divided(settings.ranks, machine)
    share = workload.sharded(settings.ranks)
    budget = _device_budget(workload, machine, settings)
    footprint, device = _shared_out(share, settings, budget)
    drive, rates = machine.drive, machine.host
    drives = drive.count / per_node
    contended = machine.device is None or machine.device.simulated
    update_seconds = per_node / machine.update_rate(workload.dtype)
    beside = (rates.compute_beside_update, rates.update_beside_compute, rates.compute_beside_io, rates.update_beside_io)
    design = Design(
        workload=share,
        settings=settings,
        footprint=footprint,
        times=_times(workload, share, machine, settings),
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
        device_budget=budget,
        tile_seconds=rates.tile_seconds,
        device=device,
        # A real device's takes a small part of what the computation does, and no profile knows its rate.
        update_above_seconds=update_seconds if contended else 0.0,
    )
    return _early(design) if settings.update == "auto" else design


def _early(design: Design) -> Design:
    """As `runtime.undo.choose_schedule` has it: with updates under backward that may be undone, where that can gain."""
    if design.footprint.serial or design.nbytes(*Kind) <= design.settings.host_memory:
        return design
    sizes, budget = unit_sizes(design.workload, each=True), design.settings.host_memory
    return replace(design, undone=True, resting=resting_units(sizes, design.footprint, budget, design.settled))


def _shared_out(
    share: Workload, settings: PlanSettings, device: int | None
) -> tuple[Footprint, DeviceFootprint | None]:
    """As `runtime.shares.share_out`; over ranks the device's transient pages are counted apart (`gathered_nbytes`)."""
    host, ahead = settings.host_memory, settings.look_ahead
    tile = settings.tile_nbytes or planned_tile(host + settings.beside_pages)
    if device is None or settings.ranks > 1:
        return plan_footprint(unit_sizes(share), host, tile, ahead), None
    settle = settings.update_on == "auto"
    return plan_tiers(unit_sizes(share, each=settle), host, device, tile, ahead, settle=settle)


def divided(ranks: int, machine: Machine) -> tuple[int, int]:
    """(nodes, ranks on each) for so many ranks. Raises ConfigError if nodes would differ."""
    per_node = min(ranks, machine.ranks_per_node)
    if ranks % per_node:
        raise ConfigError(f"expected a multiple of the node's {per_node} ranks, found {ranks}")
    if ranks > 1 and machine.link is None:
        raise ConfigError(f"{machine.name}: {ranks} ranks need a [link] in the profile: its rate in bytes a second")
    return ranks // per_node, per_node


def device_memory(machine: Machine, settings: PlanSettings) -> int:
    """Bytes of device memory that one rank may use; zero without a device."""
    return 0 if machine.device is None else settings.device_memory or machine.device.memory


def least_device_memory(workload: Workload, machine: Machine, settings: PlanSettings) -> int:
    """The smallest device budget of one rank that works, bytes; zero without a device."""
    if machine.device is None:
        return 0
    share = workload.sharded(settings.ranks)
    if settings.ranks == 1:
        return device_least(unit_sizes(share))
    # The unit that is used, the one that comes next, and gradients on their way out.
    held = max(
        2 * rounded(unit.numel * share.itemsize) + rounded(unit.trainable * share.itemsize) for unit in share.units
    )
    return gathered_nbytes(workload, settings) + held


def gathered_nbytes(workload: Workload, settings: PlanSettings) -> int:
    """Bytes of device memory outside pages: a gathered unit, the one gathered ahead of it, and a whole gradient.

    Alone a rank computes in its pages.
    """
    largest = max(unit.numel for unit in workload.units)
    return 3 * largest * workload.itemsize if settings.ranks > 1 else 0


def _device_budget(workload: Workload, machine: Machine, settings: PlanSettings) -> int | None:
    """Bytes of device memory for pages. Raises BudgetError if they do not hold what is used at one time."""
    if machine.device is None:
        return None
    asked, least = device_memory(machine, settings), least_device_memory(workload, machine, settings)
    if asked < least:
        raise BudgetError(
            f"device_memory is {asked} bytes, but the largest unit needs {least} bytes, {least - asked} more; "
            f"set device_memory to {least} bytes or more, or pass smaller units"
        )
    return asked - gathered_nbytes(workload, settings)


def _times(whole: Workload, share: Workload, machine: Machine, settings: PlanSettings) -> tuple[UnitTimes, ...]:
    rate = machine.flops(whole.dtype) if any(unit.seconds is None for unit in whole.units) else 1.0
    times = []
    for unit, own in zip(whole.units, share.units, strict=True):
        forward, backward = unit.seconds or (unit.flops / rate, unit.flops * BACKWARD_SHARE / rate)
        gather = 0.0
        if settings.ranks > 1 and machine.link is not None:
            gather = machine.link.latency + (unit.numel - own.numel) * whole.itemsize / machine.link.rate
        gradient = unit.trainable * whole.itemsize / machine.host.copy_rate if machine.device is None else 0.0
        times.append(UnitTimes(forward, backward, gradient, gather))
    return tuple(times)


def least_host_memory(workload: Workload, ranks: int, *, device: bool = False) -> int:
    """The smallest host budget of one rank that works, bytes; `device`: beside one."""
    sizes = unit_sizes(workload.sharded(ranks))
    return least_below(sizes) if device and ranks == 1 else least_budget(sizes)


def swap_nbytes(design: Design, *, commits: bool) -> int:
    """Bytes that one rank's pages take on disk; with `commits` two copies of parameters and states."""
    return (2 if commits else 1) * design.nbytes(Kind.PARAM, Kind.STATE) + design.nbytes(Kind.GRAD)
