"""Will it fit, how fast will it be, what holds it up, and what would help most.

Owns the answer to those questions as a value, made by simulating a step and then the same step with each resource
doubled. Does not measure, print or draw. Guarantees that a number is either simulated, or arithmetic on the record of
the machine; and that what does not fit is named with the bytes that are missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tiermem.planner.batches import COARSE, FINE, Excerpt, with_batches
from tiermem.planner.design import (
    Design,
    device_memory,
    least_device_memory,
    least_host_memory,
    make_design,
    swap_nbytes,
)
from tiermem.planner.footprint import mean_state_itemsize
from tiermem.planner.machine import Machine
from tiermem.planner.parts import reserved_nbytes, unit_sizes
from tiermem.planner.retile import retiled
from tiermem.planner.settings import PlanSettings
from tiermem.planner.simulate import Simulation, simulate
from tiermem.planner.thin import drawn_out, thinned
from tiermem.planner.tilesizes import planned_tile, tile_sizes
from tiermem.planner.workload import Workload
from tiermem.wear import SECONDS_PER_DAY

# A step with more units is simulated by two with about so many; more tiles than so many are taken larger.
_LONGER, _SHORTER = 72, 24
_TILES, _COARSE_TILES = 360, 96


@dataclass(frozen=True, slots=True)
class Relief:
    """A resource doubled: what it is, and the seconds of a step then."""

    resource: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step will be like. Bytes are of one rank, seconds of a step.

    Attributes:
        missing: what lacks, for each tier that is too small: bytes.
        host_least: the smallest host budget that works.
        swap_bytes: disk bytes of one rank, with the copies of parameters and states that a run reserves (reserved.py).
        coarse: whether fewer units or batches, or larger tiles, stood for the real ones.
        simulation: None where it does not fit.
        relief: what doubling each resource would bring, best first.
        drive_days: days until what the makers allow to be written is written; None: not known, or nothing is written.
    """

    workload: Workload
    machine: Machine
    settings: PlanSettings
    missing: Mapping[str, int]
    host_least: int
    swap_bytes: int
    coarse: bool = False
    design: Design | None = None
    simulation: Simulation | None = None
    relief: tuple[Relief, ...] = ()
    drive_days: float | None = None

    @property
    def fits(self) -> bool:
        """Whether every tier is large enough."""
        return not self.missing

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        if self.simulation is None:
            return 0.0
        tokens = self.workload.tokens * self.workload.batches * self.settings.ranks
        return tokens / self.simulation.seconds

    @property
    def bottleneck(self) -> str | None:
        """The resource of which twice as much would help most; None where it does not fit."""
        return self.relief[0].resource if self.relief else None


def predict(
    workload: Workload, machine: Machine, settings: PlanSettings, *, commits: bool = False, with_plan: bool = False
) -> Prediction:
    """Simulate the step of `workload` (of one rank's batch) on `machine`.

    Args:
        workload: the step.
        machine: one node.
        settings: budgets of one rank and how to update.
        commits: whether there are to be commits, which take another copy on disk.
        with_plan: also write down what a step does.

    Raises ConfigError for ranks that do not fill nodes, or a dtype whose speed is not known.
    """
    per_node = machine.on_each_node(settings.ranks)
    device = machine.device is not None
    least = least_host_memory(workload, settings.ranks, copies=settings.copies, stage=settings.stage, device=device)
    lacks = {
        "host_memory": least - settings.host_memory,
        "device_memory": least_device_memory(workload, machine, settings) - device_memory(workload, machine, settings),
    }
    missing = {tier: nbytes for tier, nbytes in lacks.items() if nbytes > 0}
    known = functools.partial(Prediction, workload=workload, machine=machine, settings=settings, host_least=least)
    if missing:
        return known(missing=missing, swap_bytes=_swap_with_enough(workload, settings, least, commits=commits))
    design = make_design(workload, machine, settings)
    swap = swap_nbytes(design, commits=commits)
    capacity = machine.drive.capacity
    lacking = 0 if capacity is None else swap * per_node - capacity * machine.drive.count
    if lacking > 0:
        return known(missing={"swap": lacking}, swap_bytes=swap)
    simulated = functools.cache(simulate)  # the short one of two steps is also what doubling is compared with
    simulation, coarse = simulate_quickly(design, with_plan=with_plan, simulated=simulated)
    return known(
        missing={},
        swap_bytes=swap,
        coarse=coarse,
        design=design,
        simulation=simulation,
        relief=_relief(workload, machine, settings, simulation.seconds, simulated),
        drive_days=_drive_days(machine, simulation.bytes_written / simulation.seconds * per_node),
    )


def simulate_quickly(
    exact: Design, *, with_plan: bool = False, simulated: Callable[..., Simulation] = simulate
) -> tuple[Simulation, bool]:
    """Simulate a step, and say whether others stood for it; `simulated`: how, such as with an eye on what is known.

    Where there are many units: two steps of fewer, see `thin`. Where there are many batches: a step of fewer, see
    `batches`. Where there are many tiles: larger ones, see `retiled`. Raises CapacityError as `simulate` does.
    """
    longer = thinned(exact, _LONGER)
    factor = _enlargement(longer, _TILES)
    designs = [each if factor == 1 else retiled(each, factor) for each in (thinned(exact, _SHORTER), longer)]
    found = _with_all_batches(designs[1], FINE, simulated, with_plan=with_plan)
    if longer is exact:
        return found, factor > 1 or exact.workload.batches > FINE.batches(designs[1])
    if designs[0].workload.parameters == longer.workload.parameters:
        return found, True
    shorter = _with_all_batches(designs[0], FINE, simulated)
    return drawn_out((designs[0], shorter), (designs[1], found), exact), True


def _with_all_batches(
    design: Design, excerpt: Excerpt, simulated: Callable[..., Simulation], *, with_plan: bool = False
) -> Simulation:
    """Simulate a step; if it has many batches, through a shorter one."""
    batches, fewer = design.workload.batches, excerpt.batches(design)
    if batches <= fewer:
        return simulated(design, with_plan=with_plan)
    return excerpt.continued(simulated(with_batches(design, fewer), with_plan=with_plan), batches)


def _enlargement(design: Design, most: int) -> int:
    """How much larger tiles have to be for there to be no more than `most`; 1: they are few enough."""
    tiles = sum(design.tiles(unit) for unit in range(len(design.workload.units)))
    return max(1, -(-tiles // most))


def seconds_of_step(
    workload: Workload, machine: Machine, settings: PlanSettings, simulated: Callable[..., Simulation] = simulate
) -> float:
    """Simulated seconds of a step, coarsely: of one with fewer units and batches.

    Raises CapacityError where it does not fit.
    """
    coarse, share = coarsened(make_design(workload, machine, settings))
    return _with_all_batches(coarse, COARSE, simulated).seconds / share


def coarsened(exact: Design) -> tuple[Design, float]:
    """A step that is simulated quickly, with few units and tiles, and the share of the whole step that it is."""
    short = thinned(exact, _SHORTER)
    factor = _enlargement(short, _COARSE_TILES)
    share = short.workload.parameters / exact.workload.parameters
    return (short if factor == 1 else retiled(short, factor)), share


def _relief(
    workload: Workload, machine: Machine, settings: PlanSettings, seconds: float, simulated: Callable[..., Simulation]
) -> tuple[Relief, ...]:
    """What doubling brings, as a share of the coarse step's seconds, applied to the fine one's."""
    now = seconds_of_step(workload, machine, settings, simulated)
    found = [
        Relief(resource, seconds * seconds_of_step(workload, more, budgets, simulated) / now)
        for resource, (more, budgets) in _doubled(machine, settings).items()
    ]
    return tuple(sorted(found, key=lambda relief: relief.seconds))


def _doubled(machine: Machine, settings: PlanSettings) -> dict[str, tuple[Machine, PlanSettings]]:
    """Each resource with the machine and settings that have twice of it."""
    host, drive = machine.host, machine.drive
    faster = replace(drive, read=2 * drive.read, write=2 * drive.write, mixed=2 * drive.mixed)
    updates = {dtype: 2 * rate for dtype, rate in host.update_rate.items()}
    found = {
        "drive": (replace(machine, drive=faster), settings),
        "host memory": (machine, replace(settings, host_memory=2 * settings.host_memory)),
        "update": (replace(machine, host=replace(host, update_rate=updates)), settings),
    }
    device = machine.device
    if device is None:
        products = {dtype: 2 * rate for dtype, rate in host.flops.items()}
        found["compute"] = (replace(machine, host=replace(host, flops=products)), settings)
        return found
    products = {dtype: 2 * rate for dtype, rate in device.flops.items()}
    found["compute"] = (replace(machine, device=replace(device, flops=products)), settings)
    wires = replace(device, to_device=2 * device.to_device, to_host=2 * device.to_host)
    found["device wires"] = (replace(machine, device=wires), settings)
    memory = 2 * (settings.device_memory or device.memory)
    found["device memory"] = (machine, replace(settings, device_memory=memory))
    if settings.ranks > 1 and machine.link is not None:
        link = replace(machine.link, rate=2 * machine.link.rate, node_rate=2 * machine.link.node_rate)
        found["link"] = (replace(machine, link=link), settings)
    return found


def _swap_with_enough(workload: Workload, settings: PlanSettings, least: int, *, commits: bool) -> int:
    """Bytes on disk of what does not fit into memory, with tiles as large as with enough of what is missing."""
    wished = settings.tile_nbytes or planned_tile(max(settings.host_memory + settings.beside_pages, least))
    tile = tile_sizes(wished, mean_state_itemsize(unit_sizes(workload, settings.division, each=True)))[0]
    return reserved_nbytes(workload, settings.division, tile, settings.acts_as, commits=commits)


def _drive_days(machine: Machine, written_per_second: float) -> float | None:
    drive = machine.drive
    if not drive.endurance or written_per_second <= 0:
        return None
    return drive.endurance * drive.count / written_per_second / SECONDS_PER_DAY
