"""What training takes: configurations, their simulation and their measurement, and the rates between the two.

Owns the calibration (what training shows where everything fits in memory, and of the drive with a budget that no
configuration has; `tiermem.cli.measure_training` makes rates of it) and the training of a configuration. Does not judge
how near the two come. Guarantees that every prediction is made from the calibration alone, which sees no configuration,
and that each measurement leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from workloads import BETAS, LEARNING_RATE, WEIGHT_DECAY, Workload

import tiermem
from tiermem.cli import measure_training as training
from tiermem.cli.measure import slower_together
from tiermem.cli.measure_training import Measured, beside_io, rates_of
from tiermem.cli.modelwork import workload_of
from tiermem.memory.links import parse_link
from tiermem.optim.compiled import are_wanted
from tiermem.planner import workload as planned
from tiermem.planner.design import Design, PlanSettings, least_host_memory, make_design
from tiermem.planner.device import device_least
from tiermem.planner.footprint import plan_footprint
from tiermem.planner.machine import Device, Drive, Host, Machine
from tiermem.planner.overhead import split_budget
from tiermem.planner.parts import unit_sizes
from tiermem.planner.simulate import Simulation, simulate
from tiermem.planner.tilesizes import planned_tile

MODELS = {
    "compute-bound": Workload(layers=6, width=512, mlp_width=1376, heads=8, vocabulary=2048, rows=2, length=256),
    "io-bound": Workload(layers=6, width=896, mlp_width=2400, heads=14, vocabulary=4096, rows=1, length=48),
}
TINY = {"tiny": Workload(layers=2, width=64, mlp_width=172, heads=4, vocabulary=256, rows=1, length=8)}
ROOMY = 8 << 30
PAGED = 0.25
# Where everything fits a unit is leased as a whole; with a budget its gradients may come tile by tile, with a lease
# each (`tiermem/planner/README.md`, "The plan, and who carries it out").
LEASE_SECONDS = 2.5e-4


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration. `share`: the host budget as a share of parameters and state; `device` as in Config."""

    model: str
    dtype: str
    update: str
    share: float
    directories: int = 1
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What predictions are made from, for a model and dtype.

    Attributes:
        machine: its rates.
        work: the step, with the seconds of its units.
    """

    machine: Machine
    work: planned.Workload

    @property
    def rates(self) -> dict[str, Any]:
        """All that was measured; `seconds`: forward and backward of each unit."""
        machine, seconds = self.machine, [unit.seconds for unit in self.work.units]
        return {**dataclasses.asdict(machine.drive), **dataclasses.asdict(machine.host), "seconds": seconds}


def calibrate(model: Workload, work: planned.Workload, folder: Path, *, quick: bool = False) -> Calibration:
    """Measure what predictions need, in training; the configurations themselves are never among what is trained here.

    Computation and kernel alone, unit by unit, come from update="step" where everything fits and one runs after the
    other. What these two take from each other is timed by itself. What the drive gives to requests like those of
    training, and what a tile and moving bytes cost besides, comes from "backward" with `PAGED` of the state, a budget
    that no configuration has.
    """
    steps, share = 2 if quick else 8, share_bytes(PAGED, work)
    short = {"seconds": 0.01} if quick else {}
    beside_update, beside_compute = slower_together(getattr(torch, work.dtype), **short)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        alone, paged = (
            train_steps(model, settings_of(work, update, nbytes), [Path(place) / update], steps)
            for update, nbytes in (("step", ROOMY), ("backward", share))
        )
    seen, rates = alone.observed, rates_of(alone, paged, work.parameters, beside_compute)
    units = tuple(
        dataclasses.replace(unit, seconds=(seen.forward.get(number, 0.0), seen.backward.get(number, 0.0)))
        for number, unit in enumerate(work.units)
    )
    host = Host(
        update_rate={work.dtype: rates.update_rate},
        copy_rate=1e15,  # is in the seconds of backward
        lease_seconds=LEASE_SECONDS,
        step_seconds=rates.step_seconds,
        tile_seconds=rates.tile_seconds,
        compute_beside_update=beside_update,
        update_beside_compute=beside_compute,
    )
    drive = Drive(read=rates.read, write=rates.write, mixed=rates.mixed)
    machine = Machine(name="this machine", source="calibrated in training", host=host, drive=drive)
    slower = beside_io(alone, paged, work, machine, plan_settings(share, "backward", work))
    machine = dataclasses.replace(machine, host=dataclasses.replace(host, compute_beside_io=slower))
    return Calibration(machine, dataclasses.replace(work, units=units))


def train_once(model: Workload, work: planned.Workload, folder: Path) -> None:
    """Some steps that nobody looks at: the first training of a model in a process was seen to compute more slowly."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        train_steps(model, settings_of(work, "backward", ROOMY), [Path(place) / "0"], 2)


def work_of(model: Workload, name: str, dtype: str) -> planned.Workload:
    """The step of a model as the planner sees it, without seconds."""
    plain = model.model().to(getattr(torch, dtype))
    return workload_of(plain, name, batch=model.rows, seq=model.length, batches=1, dtype=dtype, width=model.width)


def share_bytes(share: float, work: planned.Workload) -> int:
    """So much of parameters and state."""
    return round(work.parameters * (work.itemsize + work.state_itemsize) * share) // 4096 * 4096


def host_bytes(case: Case, work: planned.Workload) -> int:
    """The host budget of a configuration."""
    return share_bytes(case.share, work)


def designed(case: Case, calibration: Calibration) -> Design:
    """A configuration as the simulation has it."""
    work = calibration.work
    settings = plan_settings(host_bytes(case, work), case.update, work)
    return make_design(work, machine_with(case, calibration), settings)


def plan_settings(nbytes: int, update: str, work: planned.Workload) -> PlanSettings:
    """What a training with this host budget is simulated by."""
    least = least_host_memory(work, 1)
    pages, beside = split_budget(nbytes, least, compiled=are_wanted(getattr(torch, work.dtype), work.moments))
    return PlanSettings(host_memory=pages, beside_pages=beside, update=update)


def predict(case: Case, calibration: Calibration) -> Simulation:
    """Simulate a configuration's step."""
    return simulate(designed(case, calibration))


def machine_with(case: Case, calibration: Calibration) -> Machine:
    """The machine, and what plays the device."""
    link = parse_link(case.device)
    if link is None:
        return calibration.machine
    memory = device_bytes(calibration.work)
    flops = calibration.machine.host.flops
    device = Device(memory=memory, flops=flops, efficiency=1.0, to_device=link.up, to_host=link.down, simulated=True)
    return dataclasses.replace(calibration.machine, device=device)


def device_bytes(work: planned.Workload) -> int:
    """The budget of a device: four times the least that works, so that one unit is fetched beside another."""
    return 4 * device_least(unit_sizes(work))


def measure(model: Workload, case: Case, calibration: Calibration, folder: Path, steps: int) -> Measured:
    """Train a configuration."""
    work = calibration.work
    settings = settings_of(work, case.update, host_bytes(case, work))
    if case.device != "cpu":
        settings |= {"device": case.device, "device_memory": device_bytes(work)}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        directories = [Path(name) / str(number) for number in range(case.directories)]
        return train_steps(model, settings, directories, steps)


def settings_of(work: planned.Workload, update: str, nbytes: int) -> dict[str, Any]:
    """Settings of a training on the processor, with the look-ahead that "auto" begins with: it is not refined."""
    return {
        "device": "cpu",
        "host_memory": nbytes,
        "look_ahead": plan_footprint(unit_sizes(work), nbytes, planned_tile(nbytes)).look_ahead,
        "param_dtype": work.dtype,
        "update": update,
        "commits": update == "auto",  # for the room on disk to take updates back
    }


def train_steps(model: Workload, settings: dict[str, Any], directories: Sequence[Path], steps: int) -> Measured:
    """Train under these settings of `tiermem.Config`, and measure `steps` steps after the first few."""
    torch.manual_seed(0)

    def backward(number: int, trained: nn.Module) -> None:
        tokens = model.tokens(seed=0, step=number)
        trained(input_ids=tokens, labels=tokens).loss.backward()

    def optimizer(trained: nn.Module) -> tiermem.AdamW:
        return tiermem.AdamW(trained.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)

    for directory in directories:
        directory.mkdir(exist_ok=True)
    config = tiermem.Config(swap_dirs=list(directories), **settings)
    return training.train_steps(model.model, backward, optimizer, config, steps)
