"""What training takes: configurations, their simulation and their measurement, and the rates between the two.

Owns the calibration (what training shows where everything fits in memory, and of the drive with a budget that no
configuration has) and the training of a configuration. Does not judge how near the two come. Guarantees that every
prediction is made from the calibration alone, which sees no configuration, and that each measurement leaves nothing
behind.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from workloads import BETAS, LEARNING_RATE, WEIGHT_DECAY, Workload

import tiermem
from tiermem.cli.measure import slower_together
from tiermem.cli.modelwork import workload_of
from tiermem.memory.links import parse_link
from tiermem.overlap import explain_stalls
from tiermem.planner import workload as planned
from tiermem.planner.design import Design, PlanSettings, make_design
from tiermem.planner.device import device_least
from tiermem.planner.footprint import plan_footprint
from tiermem.planner.machine import Device, Drive, Host, Machine
from tiermem.planner.observed import Observed, observe
from tiermem.planner.parts import unit_sizes
from tiermem.planner.simulate import Simulation, simulate
from tiermem.planner.tilesizes import planned_tile
from tiermem.stats import READ_EDGE, WRITE_EDGE
from tiermem.timeline import STALL, STEP_LANE, UPDATE_LANE, Event

MODELS = {
    "compute-bound": Workload(layers=6, width=512, mlp_width=1376, heads=8, vocabulary=2048, rows=2, length=256),
    "io-bound": Workload(layers=6, width=896, mlp_width=2400, heads=14, vocabulary=4096, rows=1, length=48),
}
TINY = {"tiny": Workload(layers=2, width=64, mlp_width=172, heads=4, vocabulary=256, rows=1, length=8)}
ROOMY = 8 << 30
PAGED = 0.25
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


@dataclass(frozen=True, slots=True)
class Measured:
    """Some steps: seconds, bytes read and written of each; what the timeline says of them.

    Attributes:
        observed: the typical step: the median of seconds, bandwidths over all of them.
        kernels: calls of the update kernel in a step.
        beside: seconds of a step in which update kernels ran beside the computation.
        moving: seconds of a step in which bytes moved to or from the drives beside the computation.
        stalls: seconds of a step in which the computation waited, by cause (`tiermem.overlap.Cause`).
    """

    seconds: tuple[float, ...]
    read: tuple[int, ...]
    written: tuple[int, ...]
    observed: Observed
    kernels: int
    beside: float
    moving: float
    stalls: Mapping[str, float]

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)


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
    seen, moving = alone.observed, paged.observed
    units = tuple(
        dataclasses.replace(unit, seconds=(seen.forward.get(number, 0.0), seen.backward.get(number, 0.0)))
        for number, unit in enumerate(work.units)
    )
    # What the other took from each of them is taken off; what remains is the bytes' and the tiles' doing.
    kernel, computed = (
        found - paged.beside * slower / (1 + slower)
        for found, slower in ((moving.updating, beside_compute), (computing(moving), beside_update))
    )
    tile_seconds = max(0.0, (kernel - seen.updating) / max(1, paged.kernels - alone.kernels))
    host = Host(
        update_rate={work.dtype: work.parameters / max(1e-9, seen.updating - tile_seconds * alone.kernels)},
        copy_rate=1e15,  # is in the seconds of backward
        lease_seconds=0.0,  # the same
        step_seconds=seen.elsewhere,
        tile_seconds=tile_seconds,
        compute_beside_update=beside_update,
        update_beside_compute=beside_compute,
        compute_beside_io=slower_beside(computing(seen), computed, paged.moving),
    )
    drive = Drive(read=moving.read, write=moving.write, mixed=moving.mixed)
    machine = Machine(name="this machine", source="calibrated in training", host=host, drive=drive)
    return Calibration(machine, dataclasses.replace(work, units=units))


def slower_beside(alone: float, found: float, beside: float) -> float:
    """How much longer computation takes beside something that was there for `beside` of its `found` seconds.

    What it takes otherwise, `alone` seconds, is what is left without.
    """
    lost = max(0.0, found - alone)
    # Of the seconds beside it, the rest was computation as ever; never less than half of them.
    share = min(0.5, lost / max(1e-9, min(beside, found)))
    return share / (1 - share)


def train_once(model: Workload, work: planned.Workload, folder: Path) -> None:
    """Some steps that nobody looks at: the first training of a model in a process was seen to compute more slowly."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        train_steps(model, settings_of(work, "backward", ROOMY), [Path(place) / "0"], 2)


def work_of(model: Workload, name: str, dtype: str) -> planned.Workload:
    """The step of a model as the planner sees it, without seconds."""
    plain = model.model().to(getattr(torch, dtype))
    return workload_of(plain, name, batch=model.rows, seq=model.length, batches=1, dtype=dtype, width=model.width)


def computing(seen: Observed) -> float:
    """Seconds of a step that are neither stalls nor kernels."""
    return sum(seen.forward.values()) + sum(seen.backward.values()) + seen.elsewhere


def share_bytes(share: float, work: planned.Workload) -> int:
    """So much of parameters and state."""
    return round(work.parameters * (work.itemsize + work.state_itemsize) * share) // 4096 * 4096


def host_bytes(case: Case, work: planned.Workload) -> int:
    """The host budget of a configuration."""
    return share_bytes(case.share, work)


def designed(case: Case, calibration: Calibration) -> Design:
    """A configuration as the simulation has it."""
    work = calibration.work
    settings = PlanSettings(host_memory=host_bytes(case, work), update=case.update)
    return make_design(work, machine_with(case, calibration), settings)


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
    for directory in directories:
        directory.mkdir(exist_ok=True)
    config = tiermem.Config(swap_dirs=list(directories), **settings)
    with tiermem.deferred_init():
        trained = model.model()
    found: list[tuple[float, int, int]] = []
    with tiermem.offload(trained, config) as runtime:
        optimizer = tiermem.AdamW(trained.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
        for number in range(WARM_UP + steps):
            tokens = model.tokens(seed=0, step=number)
            started = time.perf_counter()
            trained(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - started
            last = runtime.statistics().last
            found.append((seconds, last.bytes_read if last else 0, last.bytes_written if last else 0))
        trace = directories[0] / "timeline.json"
        runtime.timeline(trace)
    taken, read, written = zip(*found[WARM_UP:], strict=True)
    return Measured(taken, read, written, **seen_in(trace, steps))


def seen_in(trace: Path, steps: int) -> dict[str, Any]:
    """What the last steps of a timeline were like: the rest of `Measured`."""
    events = [
        Event(each["name"], each["cat"], each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6, each["args"])
        for each in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        if each["ph"] == "X"
    ]
    events.sort(key=lambda event: event.end)
    whole = [event for event in events if event.lane == STEP_LANE and event.start >= events[0].end][-steps:]
    report = explain_stalls([event for event in events if event.start >= whole[0].start])
    use = next((use for use in report.edges if use.name == UPDATE_LANE), None)
    share = use.hidden_share if use is not None else 0.0
    mean = observe(events, steps)
    each = [observe([event for event in events if event.end <= step.end], 1) for step in whole]
    typical = dataclasses.replace(
        mean,
        forward={unit: statistics.median(one.forward.get(unit, 0.0) for one in each) for unit in mean.forward},
        backward={unit: statistics.median(one.backward.get(unit, 0.0) for one in each) for unit in mean.backward},
        elsewhere=statistics.median(one.elsewhere for one in each),
        updating=statistics.median(one.updating for one in each),
    )
    kernels = sum(event.lane == UPDATE_LANE and event.start >= whole[0].start for event in events)
    return {
        "observed": typical,
        "kernels": kernels // len(whole),
        "beside": typical.updating * share,
        "moving": moving_beside(events, whole) / len(whole),
        "stalls": {cause.name.lower(): seconds / report.steps for cause, seconds in report.by_cause().items()},
    }


def moving_beside(events: Sequence[Event], steps: Sequence[Event]) -> float:
    """Seconds of these steps in which bytes moved to or from the drives while the computation did not stand still."""
    turns = []
    for event in events:
        kind = 0 if event.lane in (READ_EDGE, WRITE_EDGE) else 1 if event.name == STALL else None
        if kind is not None:
            turns += [(event.start, kind, 1), (event.end, kind, -1)]
    turns += [(moment, 2, way) for step in steps for moment, way in ((step.start, 1), (step.end, -1))]
    now, before, found = [0, 0, 0], 0.0, 0.0
    for moment, kind, way in sorted(turns):
        if now[0] and not now[1] and now[2]:
            found += moment - before
        now[kind] += way
        before = moment
    return found
