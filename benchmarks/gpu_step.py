"""A training step with the model's state beyond the GPU: tiermem beside PyTorch in memory, FSDP2 and DeepSpeed.

Owns the choice of the model and of budgets for the machine it finds itself on, and the tables. Does not train: each
contender is a process of its own (see train_step.py). Guarantees to end in the time it is given: what does not fit in
is reported as not measured. `--simulated` runs all of it on a tiny model without a GPU, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from common import RESULTS, describe_surroundings, write_result
from gpu_prediction import predict_steps
from train_step import PACKAGES, Contender, Plan, run_one
from workloads import WORKLOADS

THEME = "gpu_step"
WARM_UP, STEPS = 2, 5
PEER = "FSDP2, CPUOffloadPolicy"
_OURS, _DEEPSPEED = "tiermem_contender.py", "deepspeed_contender.py"
GIB = 1 << 30
# What a contender is given at least, while there is that much, and from when on larger models are worth beginning.
_LEAST_SECONDS, _MIDDLE_SECONDS, _LARGE_SECONDS = 45.0, 600.0, 1200.0
_MORE = 1.3  # times an equal part of what is left
_PREDICTION_SECONDS = 40.0  # to measure the machine, and to simulate
_LATE = 5.0  # by which the last contender may end after its time
# What training in bf16 with fp32 masters and moments holds, bytes for each parameter (`tiermem/optim/README.md`).
_PARAMETER, _GRADIENT, _STATE = 2, 2, 10
# FSDP2 holds fp32 parameters, gradients and two moments in host memory.
_PEER_BYTES = 16


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is: bytes of host memory free, bytes of the device (zero without one), bytes free for swap files."""

    host: int
    device: int
    disk: int = 1 << 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says; print the table, write the result; return the exit code."""
    options = parse(arguments)
    ends = time.monotonic() + options.seconds
    machine = Machine(0, 0) if options.simulated else look(options.directory)
    if not machine.device and not options.simulated:
        print("no CUDA device; --simulated shows whether this script runs", file=sys.stderr)
        return 2
    workload = "quick" if options.simulated else choose_workload(machine, options.seconds)
    parameters = count_parameters(workload)
    runs: list[dict[str, Any]] = []
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)  # now: a run is measured before its timeline is written
    all_of_them = contenders(parameters, machine, options.deepspeed)
    wanted = [each for each in all_of_them if re.search(options.only, each.name)]
    ours = [contender for contender in wanted if contender.script == _OURS]
    reserved = _PREDICTION_SECONDS + _LATE if ours and not options.simulated else 0.0
    for number, contender in enumerate(wanted):
        print(f"{workload}: {contender.name}", file=sys.stderr)
        if options.traces is not None and contender.script == _OURS:
            trace = options.traces / f"{re.sub(r'[^a-z]+', '-', contender.name).strip('-')}.json"
            contender = replace(contender, settings={**contender.settings, "trace": str(trace)})  # noqa: PLW2901
        left = ends - time.monotonic() - reserved
        # One that takes long leaves something to those behind it.
        share = min(left, max(_LEAST_SECONDS, _MORE * left / (len(wanted) - number)))
        warm_up = WARM_UP if contender.script != _DEEPSPEED else 1  # it learns nothing in a second step
        plan = Plan((workload,), (contender,), 1, warm_up, STEPS, options.directory, timeout=share)
        run = run_one(plan, workload, contender) if left > 0 else {"error": "not run: the time was up"}
        runs.append({"contender": contender.name, "settings": contender.settings, **run})
        if options.json is not None:  # as each ends: whoever started this may end it
            report(options, *summed_up(workload, parameters, runs))
    machine_found: dict[str, object] = {}
    if ours and (options.simulated or ends - time.monotonic() > _PREDICTION_SECONDS):
        print(f"{workload}: what tiermem plan says", file=sys.stderr)
        predicted, machine_found = predict_steps(ours, workload, options.directory, quick=options.simulated)
        runs = [{**run, "predicted": predicted.get(run["contender"])} for run in runs]
    body, raw = summed_up(workload, parameters, runs)
    print(body)
    report(options, body, {**raw, "machine": machine_found})
    return 0 if all(run["error"] is None for run in runs) else 1


def summed_up(workload: str, parameters: int, runs: Sequence[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return what was measured as text and as numbers."""
    body = f"Model: {parameters:,} parameters, {tokens_of(workload)} tokens a step, bf16.\n\n{table(runs, workload)}"
    return body, {"workload": workload, "parameters": parameters, "runs": runs}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", help="a tiny model, no GPU, no result file")
    parser.add_argument("--seconds", type=float, default=330.0, help="for everything together")
    parser.add_argument("--only", default="", metavar="REGEX", help="only contenders in whose name this is found")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter that has deepspeed (see README.md)")
    parser.add_argument("--directory", type=Path, default=Path(), help="where swap files go (default: here)")
    parser.add_argument("--traces", type=Path, help="where the timelines of tiermem's runs go")
    parser.add_argument("--json", type=Path, help="write what was measured here instead of a result file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result goes")
    return parser.parse_args(arguments)


def report(options: argparse.Namespace, body: str, raw: dict[str, Any]) -> None:
    """Write what was measured where the command line says."""
    if options.json is not None:
        options.json.write_text(json.dumps({"body": body, **raw}) + "\n", encoding="utf-8")
    elif not options.simulated:
        surroundings = describe_surroundings(PACKAGES)
        raw = {"surroundings": surroundings.to_markdown(), "device": torch.cuda.get_device_name(), **raw}
        body = f"- GPU: {raw['device']}, CUDA {torch.version.cuda}\n\n{body}"
        print(f"written: {write_result(THEME, surroundings, body, raw, options.results)}")


def look(directory: Path) -> Machine:
    """Return what this machine has, with swap files in `directory`."""
    device = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    return Machine(psutil.virtual_memory().available, device, shutil.disk_usage(directory).free)


def choose_workload(machine: Machine, seconds: float) -> str:
    """Return the largest model whose states the peer can hold in host memory and tiermem on disk, to compare both.

    In a few minutes only a small one: to fill its weights takes each contender of a large one a minute.
    """
    names = ("gpu-large",) * (seconds >= _LARGE_SECONDS) + ("gpu",) * (seconds >= _MIDDLE_SECONDS) + ("gpu-small",)
    state = _PARAMETER + _GRADIENT + _STATE
    for name in names:
        numel = count_parameters(name)
        if numel * _PEER_BYTES * 1.4 < machine.host and numel * state * 1.1 < machine.disk:
            return name
    return "io-bound"


def count_parameters(workload: str) -> int:
    """Return the number of parameters; builds the model without memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in WORKLOADS[workload].model().parameters())


def tokens_of(workload: str) -> int:
    """Return the tokens of a step."""
    return WORKLOADS[workload].rows * WORKLOADS[workload].length


def contenders(parameters: int, machine: Machine, deepspeed: str | None = None) -> list[Contender]:
    """Return who takes part, and with which budgets.

    The device budget is an eighth of the state at most, so that paging is what is measured, however large the GPU; with
    everything on swap, less than a fortieth. Two have four times that, and the GPU update what then fits there.
    """
    state = parameters * (_PARAMETER + _GRADIENT + _STATE)
    place: dict[str, Any] = {"device": "cuda"}
    paged: dict[str, Any] = {"device": "cuda", "commits": False}
    if not machine.device:
        place, paged = {"device": "cpu"}, {"device": "simulated:bandwidth=2GB/s,latency=20us", "commits": False}
    floor = 2 * GIB if machine.device else 4 << 20
    usual = max(floor, state // 8)
    least = max(floor // 16 if machine.device else floor, state // 42)
    host, moments = state * 5 // 4 + floor, parameters * (_PARAMETER + _GRADIENT) * 5 // 4 + floor
    # Nothing is clipped here: with "backward" an update is begun there, for good.
    budgets: dict[str, dict[str, Any]] = {
        "states on host": {"host_memory": host, "device_memory": usual},
        'states on host, update="backward"': {"host_memory": host, "device_memory": usual, "update": "backward"},
        'states on host, update_on="auto"': {"host_memory": host, "device_memory": 4 * usual, "update_on": "auto"},
        'states on host, update="backward", update_on="auto"': {
            "host_memory": host,
            "device_memory": 4 * usual,
            "update": "backward",
            "update_on": "auto",
        },
        "moments on swap": {"host_memory": moments, "device_memory": usual, "update": "backward"},
        "everything on swap": {"host_memory": floor, "device_memory": least, "update": "backward"},
    }
    ours = [Contender(f"tiermem, {name}", _OURS, sys.executable, {**paged, **own}) for name, own in budgets.items()]
    offload = {"device": "cpu", "pin_memory": bool(machine.device)}
    in_memory = {"sub_group_size": 10**9, "offload_param": offload, "offload_optimizer": offload}
    settings = {"CPU offload": {**place, "zero_optimization": in_memory}, "NVMe offload": place}
    peers = [
        Contender(f"DeepSpeed ZeRO-3, {name}", _DEEPSPEED, deepspeed, own)
        for name, own in settings.items()
        if deepspeed is not None
    ]
    return [
        Contender("PyTorch, all on the device", "plain_contender.py", sys.executable, place),
        Contender(PEER, "fsdp_contender.py", sys.executable, place),
        *peers[:1],
        *ours,
        *peers[1:],  # last: it takes as long as all others together
    ]


def table(runs: Sequence[dict[str, Any]], workload: str) -> str:
    """Return the runs as a Markdown table of medians. TFLOP/s counts six operations a parameter and token.

    "As planned" is what `tiermem plan` says of the step on this machine.
    """
    peer = next((statistics.median(run["seconds"]) for run in runs if run["contender"] == PEER and not run["error"]), 0)
    columns = "contender | s/step | tokens/s | TFLOP/s | times FSDP2 | stall | GB/s per edge | peak device | peak host"
    lines = [f"| {columns} | as planned |", "|---|---|---|---|---|---|---|---|---|---|"]
    for run in runs:
        if run["error"] is not None:
            lines.append(f"| {run['contender']} | {run['error']} | | | | | | | | |")
            continue
        seconds, details = statistics.median(run["seconds"]), run["details"]
        speed = tokens_of(workload) / seconds
        stall = details.get("stall_seconds", [])[-STEPS:]
        edges = ", ".join(
            f"{name} {statistics.median(nbytes[-STEPS:]) / seconds / 1e9:.2f}"
            for name, nbytes in details.get("edges", {}).items()
        )
        measured = f"{min(run['seconds']):.3f} to {max(run['seconds']):.3f}"
        if len(run["seconds"]) < STEPS:
            measured += f", {len(run['seconds'])} of {STEPS} steps"
        lines.append(
            f"| {run['contender']} | {seconds:.3f} ({measured}) "
            f"| {speed:.0f} | {6 * run['parameters'] * speed / 1e12:.2f} | {peer / seconds if peer else 0:.2f} "
            f"| {f'{statistics.median(stall):.3f} s' if stall else ''} | {edges} "
            f"| {details.get('peak_device_bytes', 0) / 1e9:.2f} GB | {run['peak_rss_bytes'] / 1e9:.2f} GB "
            f"| {'' if run.get('predicted') is None else format(run['predicted'], '.3f') + ' s'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
