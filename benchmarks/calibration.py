"""What training takes: configurations, their simulation and their measurement, and the rates between the two.

Owns the calibration (same process, same minutes: drives, the plain model's forward and backward, and what training
shows where everything fits in memory) and the training of a configuration. Does not judge how near the two come.
Guarantees that every prediction is made from the calibration alone, and that each measurement leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from workloads import BETAS, LEARNING_RATE, WEIGHT_DECAY, Workload

import tiermem
from tiermem.cli.measure import measure_machine
from tiermem.cli.modelwork import workload_of
from tiermem.memory.links import parse_link
from tiermem.overlap import OverlapReport
from tiermem.planner import workload as planned
from tiermem.planner.design import PlanSettings, make_design, unit_sizes
from tiermem.planner.device import device_least
from tiermem.planner.machine import Device, Machine
from tiermem.planner.simulate import Simulation, simulate

MODELS = {
    "compute-bound": Workload(layers=6, width=512, mlp_width=1376, heads=8, vocabulary=2048, rows=4, length=256),
    "io-bound": Workload(layers=6, width=896, mlp_width=2400, heads=14, vocabulary=4096, rows=1, length=48),
}
TINY = {"tiny": Workload(layers=3, width=128, mlp_width=344, heads=4, vocabulary=512, rows=1, length=32)}
ROOMY = 8 << 30
WARM_UP = 3


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
    """What predictions are made from, for each (model, dtype): the machine, and the step with its units' seconds."""

    machines: dict[tuple[str, str], Machine]
    work: dict[tuple[str, str], planned.Workload]


@dataclass(frozen=True, slots=True)
class Measured:
    """Some steps: seconds, bytes read and written of each; of the mean step, seconds that update kernels ran

    (`updating`), and of those the ones beside the computation (`beside`).
    """

    seconds: tuple[float, ...]
    read: tuple[int, ...]
    written: tuple[int, ...]
    updating: float
    beside: float

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)


def calibrate(models: dict[str, Workload], wanted: Sequence[tuple[str, str]], folder: Path, quick: bool) -> Calibration:
    """Measure what predictions need: the drives, and for each model and dtype what training takes where all fits."""
    seconds = (0.01, 0.05) if quick else (0.3, 2.0)
    machine = measure_machine([folder], seconds=seconds[0], drive_seconds=seconds[1])
    times = 2 if quick else 6
    work = {(name, dtype): plain_step(models[name], name, dtype, times) for name, dtype in wanted}
    found = Calibration(dict.fromkeys(work, machine), work)
    machines = {key: with_training_rates(models[key[0]], key, found, folder, times) for key in work}
    return dataclasses.replace(found, machines=machines)


def with_training_rates(model: Workload, key: tuple[str, str], found: Calibration, folder: Path, times: int) -> Machine:
    """The machine with the rates that training itself shows where everything fits in memory and no byte moves.

    Kernels alone and what each access costs the computation besides come from update="step", where one runs after the
    other; how much each slows the other down comes from "backward", where they run side by side.
    """
    work, machine = found.work[key], found.machines[key]
    in_turn, together = (
        measure(model, Case(*key, update, math.inf), found, folder, times) for update in ("step", "backward")
    )
    rate = sum(unit.trainable for unit in work.units) / in_turn.updating
    host = dataclasses.replace(machine.host, update_rate={**machine.host.update_rate, key[1]: rate})
    known = predict(Case(*key, "step", math.inf), with_machine(found, key, dataclasses.replace(machine, host=host)))
    lease = (in_turn.median - known.seconds) / len(work.order) + host.lease_seconds
    computing = in_turn.median - in_turn.updating
    waiting = together.updating - together.beside
    slower = (
        beside(computing, together.median - waiting, together.beside),
        beside(in_turn.updating, together.updating, together.beside),
    )
    host = dataclasses.replace(
        host,
        lease_seconds=max(1e-6, lease),
        compute_beside_update=slower[0],
        update_beside_compute=slower[1],
    )
    return dataclasses.replace(machine, host=host)


def with_machine(found: Calibration, key: tuple[str, str], machine: Machine) -> Calibration:
    """The calibration with another machine for one model and dtype."""
    return dataclasses.replace(found, machines=found.machines | {key: machine})


def beside(alone: float, running: float, shared: float) -> float:
    """How much longer work takes beside other work, from its seconds alone, and with `shared` of them beside the other.

    In the shared seconds it gets done what it did not get done in the others; see `planner.lines.Cores`.
    """
    done = alone - (running - shared)
    return max(0.0, shared / done - 1) if done > 0 and shared > 0 else 0.0


def plain_step(model: Workload, name: str, dtype: str, times: int) -> planned.Workload:
    """The model's step with the seconds its forward and backward take in memory, divided by operations."""
    torch.manual_seed(0)
    plain = model.model().to(getattr(torch, dtype))
    work = workload_of(plain, name, batch=model.rows, seq=model.length, batches=1, dtype=dtype, width=model.width)
    taken: list[tuple[float, float]] = []
    for number in range(times):
        tokens = model.tokens(seed=0, step=number)
        started = time.perf_counter()
        loss = plain(input_ids=tokens, labels=tokens).loss
        middle = time.perf_counter()
        loss.backward()
        taken.append((middle - started, time.perf_counter() - middle))
        for parameter in plain.parameters():
            parameter.grad = None
    forward, backward = (statistics.median(column) for column in zip(*taken, strict=True))
    total = sum(unit.flops for unit in work.units)
    shares = [unit.flops / total for unit in work.units]
    units = [
        dataclasses.replace(unit, seconds=(forward * share, backward * share))
        for unit, share in zip(work.units, shares, strict=True)
    ]
    return dataclasses.replace(work, units=tuple(units))


def host_bytes(case: Case, work: planned.Workload) -> int:
    """The host budget of a configuration."""
    if math.isinf(case.share):
        return ROOMY
    return round(work.parameters * (work.itemsize + work.state_itemsize) * case.share) // 4096 * 4096


def predict(case: Case, calibration: Calibration) -> Simulation:
    """Simulate a configuration's step."""
    work = calibration.work[case.model, case.dtype]
    settings = PlanSettings(host_memory=host_bytes(case, work), update=case.update)
    return simulate(make_design(work, machine_with(case, calibration), settings))


def machine_with(case: Case, calibration: Calibration) -> Machine:
    """The machine, and what plays the device."""
    link = parse_link(case.device)
    if link is None:
        return calibration.machines[case.model, case.dtype]
    memory = device_bytes(calibration.work[case.model, case.dtype])
    device = Device(memory=memory, flops={}, to_device=link.up, to_host=link.down, simulated=True)
    return dataclasses.replace(calibration.machines[case.model, case.dtype], device=device)


def device_bytes(work: planned.Workload) -> int:
    """The budget of a device: twice the least that works."""
    return 2 * device_least(unit_sizes(work))


def measure(model: Workload, case: Case, calibration: Calibration, folder: Path, steps: int) -> Measured:
    """Train a configuration."""
    work = calibration.work[case.model, case.dtype]
    settings = {
        "device": case.device,
        "device_memory": "auto" if case.device == "cpu" else device_bytes(work),
        "host_memory": host_bytes(case, work),
        "param_dtype": case.dtype,
        "update": case.update,
        "commits": False,
    }
    with tempfile.TemporaryDirectory(dir=folder) as name:
        directories = [Path(name) / str(number) for number in range(case.directories)]
        return train_steps(model, settings, directories, steps)


def train_steps(model: Workload, settings: dict[str, Any], directories: Sequence[Path], steps: int) -> Measured:
    """Train under these settings of `tiermem.Config`, and measure `steps` steps after the first few."""
    torch.manual_seed(0)
    for directory in directories:
        directory.mkdir(exist_ok=True)
    config = tiermem.Config(swap_dirs=list(directories), **settings)
    with tiermem.deferred_init():
        trained = model.model()
    found: list[tuple[float, int, int]] = []
    with tiermem.offload(trained, config) as runtime:
        optimizer = tiermem.AdamW(trained.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
        for number in range(WARM_UP + steps):
            if number == WARM_UP:
                before = kernel_use(runtime.timeline())
            tokens = model.tokens(seed=0, step=number)
            started = time.perf_counter()
            trained(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - started
            last = runtime.statistics().last
            found.append((seconds, last.bytes_read if last else 0, last.bytes_written if last else 0))
        after = kernel_use(runtime.timeline())
    taken, read, written = zip(*found[WARM_UP:], strict=True)
    updating, shared = ((late - early) / steps for late, early in zip(after, before, strict=True))
    return Measured(taken, read, written, updating, shared)


def kernel_use(report: OverlapReport) -> tuple[float, float]:
    """Seconds that update kernels ran so far, and those of them in which the computation ran too."""
    return next(((use.busy_seconds, use.hidden_seconds) for use in report.edges if use.name == "update"), (0.0, 0.0))
