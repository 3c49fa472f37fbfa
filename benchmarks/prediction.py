"""How near the simulated step comes to the measured one.

Owns the configurations, the calibration (same process, same minutes: drives, kernels, the plain model's forward and
backward) and the table. Does not simulate or train by itself. Guarantees that every prediction is made from the
calibration alone, before its configuration is measured, and that each measurement is the median of at least five steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, describe_surroundings, earlier_result, write_result
from workloads import BETAS, LEARNING_RATE, WEIGHT_DECAY, Workload

import tiermem
from tiermem.cli.measure import measure_machine
from tiermem.cli.modelwork import workload_of
from tiermem.memory.links import parse_link
from tiermem.planner import workload as planned
from tiermem.planner.design import PlanSettings, make_design, unit_sizes
from tiermem.planner.device import device_least
from tiermem.planner.machine import Device, Machine
from tiermem.planner.simulate import Simulation, simulate

THEME = "prediction"
PACKAGES = ("torch", "transformers", "numpy")
MODELS = {
    "compute-bound": Workload(layers=6, width=512, mlp_width=1376, heads=8, vocabulary=2048, rows=4, length=256),
    "io-bound": Workload(layers=8, width=1024, mlp_width=2728, heads=16, vocabulary=4096, rows=1, length=48),
}
TINY = {"tiny": Workload(layers=3, width=128, mlp_width=344, heads=4, vocabulary=512, rows=1, length=32)}
DEVICES = tuple(f"simulated:bandwidth={speed}GB/s" for speed in (1, 4, 16))
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


def cases(*, quick: bool) -> list[Case]:
    """The configurations, cheapest to explain first."""
    if quick:
        return [Case("tiny", "bfloat16", update, 0.5) for update in ("forward", "backward", "step")]
    product = itertools.product(MODELS, ("bfloat16", "float32"), ("forward", "backward", "step"), (0.15, 0.6))
    found = [Case(model, dtype, update, share) for model, dtype, update, share in product]
    found += [Case(model, "bfloat16", update, 0.15, 2) for model in MODELS for update in ("forward", "backward")]
    found += [Case(model, "bfloat16", "forward", 0.3, device=device) for model in MODELS for device in DEVICES]
    return found


@dataclass(frozen=True, slots=True)
class Calibration:
    """What predictions are made from: the machine, and each (model, dtype)'s step with its units' measured seconds."""

    machine: Machine
    work: dict[tuple[str, str], planned.Workload]


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, predict, measure; print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, three configurations, no result file")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each configuration, at least five")
    parser.add_argument("--only", nargs="+", default=(), metavar="WORD", help="configurations with all of these words")
    parser.add_argument("--add", action="store_true", help="only what today's result lacks, and add it there")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no configuration after so long")
    parser.add_argument("--directory", type=Path, default=Path(), help="where swap files go (default: here)")
    parser.add_argument("--results", type=Path, help=f"where the result goes (default: {RESULTS.name}/)")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    surroundings = describe_surroundings(PACKAGES)
    results = options.results or (None if options.quick else RESULTS)
    earlier = earlier_result(THEME, surroundings, results) if options.add and results is not None else {}
    rows = list(earlier.get("rows", []))
    done = {describe_row(line) for line in rows}
    models = TINY if options.quick else MODELS
    chosen = [case for case in cases(quick=options.quick) if all(word in describe(case) for word in options.only)]
    chosen = [case for case in chosen if describe(case) not in done]
    if not chosen:
        print("nothing is left to be measured")
        return 0
    steps = 2 if options.quick else max(5, options.steps)
    with tempfile.TemporaryDirectory(prefix="tiermem-prediction-", dir=options.directory) as name:
        folder = Path(name)
        calibration = calibrate(models, sorted({(case.model, case.dtype) for case in chosen}), folder, options.quick)
        for case in chosen:
            if time.monotonic() - began > options.seconds:
                print(f"not begun: {describe(case)}")
                continue
            foreseen = predict(case, calibration)
            measured = measure(models[case.model], case, calibration, folder, steps)
            rows.append(row(case, foreseen, measured))
            print(
                f"{describe(case)}: {rows[-1]['predicted']:.3f} s foreseen, {rows[-1]['measured']:.3f} s measured",
                flush=True,
            )
    machines = [*earlier.get("machines", []), dataclasses.asdict(calibration.machine)]
    body = table(rows, machines)
    print(body)
    if results is not None:
        raw = {"surroundings": surroundings.to_markdown(), "machines": machines, "rows": rows}
        print(f"\nwritten: {write_result(THEME, surroundings, body, raw, results)}")
    return 0


def calibrate(models: dict[str, Workload], wanted: Sequence[tuple[str, str]], folder: Path, quick: bool) -> Calibration:
    """Measure what predictions need."""
    seconds = (0.01, 0.05) if quick else (0.5, 3.0)
    machine = measure_machine([folder], seconds=seconds[0], drive_seconds=seconds[1])
    work = {(name, dtype): plain_step(models[name], name, dtype, 2 if quick else 7) for name, dtype in wanted}
    found = Calibration(machine, work)
    leases = [lease_seconds(models[name], (name, dtype), found, folder, 2 if quick else 7) for name, dtype in wanted]
    host = dataclasses.replace(machine.host, lease_seconds=max(1e-5, statistics.median(leases)))
    return dataclasses.replace(found, machine=dataclasses.replace(machine, host=host))


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


def lease_seconds(model: Workload, key: tuple[str, str], found: Calibration, folder: Path, times: int) -> float:
    """What each access costs the computation besides: a step where everything fits, less what it is known to need."""
    case = Case(key[0], key[1], "step", float("inf"))
    measured = statistics.median(second for second, _, _ in measure(model, case, found, folder, times))
    simulation = predict(case, found)
    work = found.work[key]
    known = simulation.seconds - len(work.order) * found.machine.host.lease_seconds
    return (measured - known) / len(work.order)


def host_bytes(case: Case, work: planned.Workload) -> int:
    """The host budget of a configuration."""
    if case.share == float("inf"):
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
        return calibration.machine
    memory = device_bytes(calibration.work[case.model, case.dtype])
    device = Device(memory=memory, flops={}, to_device=link.up, to_host=link.down, simulated=True)
    return dataclasses.replace(calibration.machine, device=device)


def device_bytes(work: planned.Workload) -> int:
    """The budget of a device: twice the least that works."""
    return 2 * device_least(unit_sizes(work))


def measure(
    model: Workload, case: Case, calibration: Calibration, folder: Path, steps: int
) -> list[tuple[float, int, int]]:
    """Train; (seconds, bytes read, bytes written) of each step after the first few."""
    torch.manual_seed(0)
    work = calibration.work[case.model, case.dtype]
    with tempfile.TemporaryDirectory(dir=folder) as name:
        directories = [Path(name) / str(number) for number in range(case.directories)]
        for directory in directories:
            directory.mkdir()
        config = tiermem.Config(
            device=case.device,
            device_memory="auto" if case.device == "cpu" else device_bytes(work),
            host_memory=host_bytes(case, work),
            swap_dirs=directories,
            param_dtype=case.dtype,  # type: ignore[arg-type]
            update=case.update,  # type: ignore[arg-type]
            commits=False,
        )
        with tiermem.deferred_init():
            trained = model.model()
        found = []
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
    return found[WARM_UP:]


def row(case: Case, foreseen: Simulation, measured: Sequence[tuple[float, int, int]]) -> dict[str, Any]:
    """One line of the result."""
    seconds, read, written = (statistics.median(column) for column in zip(*measured, strict=True))
    return {
        **dataclasses.asdict(case),
        "measured": seconds,
        "all": [second for second, _, _ in measured],
        "predicted": foreseen.seconds,
        "error": foreseen.seconds / seconds - 1,
        "measured_read": read,
        "predicted_read": foreseen.bytes_read,
        "measured_written": written,
        "predicted_written": foreseen.bytes_written,
        "stalls": dict(foreseen.stalls),
    }


def describe(case: Case) -> str:
    """A configuration in words."""
    return (
        f"{case.model}, {case.dtype}, {case.update}, {case.share:.0%} of the state, {case.directories} directories, "
        f"{case.device}"
    )


def describe_row(line: dict[str, Any]) -> str:
    """The configuration of a line of the result, in words."""
    return describe(Case(**{item.name: line[item.name] for item in dataclasses.fields(Case)}))


def table(rows: Sequence[dict[str, Any]], machines: Sequence[dict[str, Any]]) -> str:
    """The result as Markdown."""
    errors = [abs(line["error"]) for line in rows]
    drives = "; ".join(
        f"{drive['read'] / 1e9:.2f}, {drive['write'] / 1e9:.2f}, {drive['mixed'] / 1e9:.2f}"
        for drive in (machine["drive"] for machine in machines)
    )
    leases = ", ".join(f"{machine['host']['lease_seconds'] * 1e3:.2f}" for machine in machines)
    intro = (
        f"{sum(error <= 0.1 for error in errors)} of {len(rows)} configurations within 10 %, median error "
        f"{statistics.median(errors):.1%}, largest {max(errors):.1%}. Calibrated in the same process as measured; the "
        f"drive read, wrote, did both in GB/s: {drives}; ms of the compute thread for an access: {leases}. "
        f"Measured: median of the steps (fastest to slowest). Bytes: measured / predicted."
    )
    lines = [
        intro,
        "",
        "| model | dtype | update | budget | files | device | measured s | predicted s | error | read GB | wrote GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in rows:
        read = f"{line['measured_read'] / 1e9:.3f} / {line['predicted_read'] / 1e9:.3f}"
        written = f"{line['measured_written'] / 1e9:.3f} / {line['predicted_written'] / 1e9:.3f}"
        spread = f"{min(line['all']):.2f} to {max(line['all']):.2f}"
        lines.append(
            f"| {line['model']} | {line['dtype']} | {line['update']} | {line['share']:.0%} | {line['directories']} "
            f"| {line['device'].removeprefix('simulated:bandwidth=')} | {line['measured']:.3f} ({spread}) "
            f"| {line['predicted']:.3f} | {line['error']:+.1%} | {read} | {written} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
