"""What some steps of training show: their seconds, and from their timelines the rates that the planner takes.

Owns the training of a few steps and what is made of its timeline. Does not choose models or budgets, and does not
judge predictions. Guarantees that each training leaves nothing behind, that what a kernel and moving bytes take from
the computation is counted once, and that a step simulated by these rates takes as long as the one they come from, as
far as bytes that move explain it.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import tiermem
from tiermem.cli.disk import new_folders
from tiermem.config import Config
from tiermem.overlap import explain_stalls
from tiermem.planner.design import make_design
from tiermem.planner.machine import Machine
from tiermem.planner.observed import Observed, bandwidths_by_stretch, observe, whole_steps
from tiermem.planner.settings import PlanSettings
from tiermem.planner.simulate import simulate
from tiermem.planner.workload import Workload
from tiermem.stats import READ_EDGE, WRITE_EDGE
from tiermem.timeline import UPDATE_LANE, Event

# After them a step moves what later ones do.
_WARM_UP = 3
# Computation beside bytes that move takes three times as long at most, and is known to a part in 256 of that.
_MOST_BESIDE, _HALVINGS = 2.0, 8


@dataclass(frozen=True, slots=True)
class Measured:
    """Some steps: seconds, bytes read and written of each; what the timeline says of them.

    Attributes:
        observed: the typical step: the median of seconds, bandwidths over all of them.
        kernels: calls of the update kernel in a step.
        beside: seconds of a step in which update kernels ran beside the computation.
        stalls: seconds of a step in which the computation waited, by cause (`tiermem.overlap.Cause`).
    """

    seconds: tuple[float, ...]
    read: tuple[int, ...]
    written: tuple[int, ...]
    observed: Observed
    kernels: int
    beside: float
    stalls: Mapping[str, float]

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Rates:
    """What two trainings show of a processor and its drives; as in `planner.machine.Host` and `Drive`."""

    update_rate: float
    tile_seconds: float
    step_seconds: float
    read: float
    write: float
    mixed: float


def train_steps(
    make: Callable[[], nn.Module],
    backward: Callable[[int, nn.Module], object],
    optimizer: Callable[[nn.Module], tiermem.AdamW],
    config: Config,
    steps: int,
    **offloading: Any,
) -> Measured:
    """Train a model under `config` in new folders of its swap directories, and measure `steps` steps.

    Args:
        make: the model; called under `tiermem.deferred_init`.
        backward: forward and backward of a step, given its number and the model.
        optimizer: of the offloaded model.
        config: the settings; `swap_dirs` exist.
        steps: how many are measured, after three that are not.
        offloading: what else `tiermem.offload` takes.

    Raises what training raises.
    """
    found: list[tuple[float, int, int]] = []
    with new_folders(config.swap_paths, prefix="tiermem-measure-") as made:
        with tiermem.deferred_init():
            model = make()
        with tiermem.offload(model, dataclasses.replace(config, swap_dirs=made), **offloading) as runtime:
            stepping = optimizer(model)
            for number in range(_WARM_UP + steps):
                started = time.perf_counter()
                backward(number, model)
                stepping.step()
                stepping.zero_grad()
                seconds = time.perf_counter() - started
                last = runtime.statistics().last
                found.append((seconds, last.bytes_read if last else 0, last.bytes_written if last else 0))
            trace = made[0] / "timeline.json"
            runtime.timeline(trace)
        taken, read, written = zip(*found[_WARM_UP:], strict=True)
        return Measured(taken, read, written, **seen_in(trace, steps))


def rates_of(alone: Measured, paged: Measured, numel: int, beside: float) -> Rates:
    """The rates behind two trainings of a model of `numel` elements.

    Args:
        alone: where everything stays in memory, with `update="step"`: computation and kernel one after the other.
        paged: of the same model, with a budget that makes bytes move.
        numel: elements of all units.
        beside: how much longer the update takes beside the computation.
    """
    seen, moving = alone.observed, paged.observed
    # What the computation took from the kernels is taken off; what remains is the tiles' doing.
    kernel = moving.updating - paged.beside * beside / (1 + beside)
    # Where nothing but tiles seemed to take time, elements take half of it all the same.
    most = seen.updating / max(1, 2 * alone.kernels)
    tile_seconds = min(most, max(0.0, (kernel - seen.updating) / max(1, paged.kernels - alone.kernels)))
    return Rates(
        update_rate=numel / (seen.updating - tile_seconds * alone.kernels),
        tile_seconds=tile_seconds,
        step_seconds=seen.elsewhere,
        read=moving.read,
        write=moving.write,
        mixed=moving.mixed,
    )


def beside_io(alone: Measured, paged: Measured, work: Workload, machine: Machine, settings: PlanSettings) -> float:
    """How much longer computation takes while bytes move, as in `planner.machine.Host`.

    It is what makes a simulated step take as long as the `paged` one. A timeline does not tell which seconds were lost
    to bytes and which to the update that came with them, nor what else the simulation leaves out.

    Args:
        alone: where everything stays in memory, with `update="step"`: what units take.
        paged: with the budget and the update schedule of `settings`.
        work: the step that was trained.
        machine: the other rates.
        settings: of `paged`.

    From 0 to 2; a step that took less than any in which bytes cost nothing gives 0. Raises what `make_design` raises.
    """
    seen, wanted = alone.observed, paged.median
    units = tuple(
        dataclasses.replace(unit, seconds=(seen.forward.get(number, 0.0), seen.backward.get(number, 0.0)))
        for number, unit in enumerate(work.units)
    )
    # Moving gradients into pages is in the seconds of backward.
    machine = dataclasses.replace(machine, host=dataclasses.replace(machine.host, copy_rate=float("inf")))
    design = make_design(dataclasses.replace(work, units=units), machine, settings)
    least, most = 0.0, _MOST_BESIDE
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        slower = (*design.slower[:2], middle, design.slower[3])
        if simulate(dataclasses.replace(design, slower=slower)).seconds < wanted:
            least = middle
        else:
            most = middle
    return least


def seen_in(trace: Path, steps: int) -> dict[str, Any]:
    """What the last steps of a timeline were like: the rest of `Measured`."""
    events = [
        Event(each["name"], each["cat"], each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6, each["args"])
        for each in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        if each["ph"] == "X"
    ]
    events.sort(key=lambda event: event.end)
    whole = whole_steps(events, steps)
    since = [event for event in events if event.start >= whole[0].start]
    report = explain_stalls(since)
    use = next((use for use in report.edges if use.name == UPDATE_LANE), None)
    share = use.hidden_share if use is not None else 0.0
    mean = observe(events, steps)
    each = [observe([event for event in events if event.end <= step.end], 1) for step in whole]
    edges = ([event for event in since if event.lane == edge] for edge in (READ_EDGE, WRITE_EDGE))
    read, write, mixed = bandwidths_by_stretch(*edges)
    typical = dataclasses.replace(
        mean,
        read=read,
        write=write,
        mixed=mixed,
        forward={unit: statistics.median(one.forward.get(unit, 0.0) for one in each) for unit in mean.forward},
        backward={unit: statistics.median(one.backward.get(unit, 0.0) for one in each) for unit in mean.backward},
        elsewhere=statistics.median(one.elsewhere for one in each),
        updating=statistics.median(one.updating for one in each),
    )
    kernels = sum(event.lane == UPDATE_LANE for event in since)
    return {
        "observed": typical,
        "kernels": kernels // len(whole),
        "beside": typical.updating * share,
        "stalls": {cause.name.lower(): seconds / report.steps for cause, seconds in report.by_cause().items()},
    }
