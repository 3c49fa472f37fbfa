"""Every figure that tiermem is to reach, measured in one go on one machine, beside its goal: one result file.

Owns the list of goals and which runs show each. Runs them with `train_step.py`'s contenders, all that are compared
alive together and in turns, and one training under a memory limit that the kernel enforces. Guarantees that each
figure is the median over blocks of a ratio within a block, with the lowest and highest beside it, and that a part that
could not be run is said to be missing.

In four parts, which may be run one by one and join today's result: `compute`, `drive`, `batches`, `memory`. In
bfloat16, or in float32, for processors without instructions for it: that is a result of its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import memory_group
from common import (
    arguments_of,
    describe_surroundings,
    earlier_result,
    end_on_sigterm,
    peak_resident_bytes,
    result_folder,
    write_result,
)
from train_step import DRIVE, DTYPES, IDEAL, Contender, Plan, held_against, profile, rate_of, run_all, table

THEME = "goals"
REST = 20.0  # seconds in which a drive gets what ZeRO-Infinity has left to its cache out of the way
PACKAGES = ("torch", "transformers", "numpy")
PARTS = ("compute", "drive", "batches", "memory")
PEER = "deepspeed nvme"
LIMIT = 1 << 30
Runs = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result. `values` are of blocks, or a single one; empty if not measured."""

    what: str
    goal: str
    least: bool  # whether the goal is a lower bound
    bound: float | None  # None: nothing is asked
    values: Sequence[float]
    unit: str = ""

    def line(self) -> str:
        """Return the line of the table."""
        if not self.values:
            return f"| {self.what} | {self.goal} | not measured | |"
        middle = statistics.median(self.values)
        spread = f" ({min(self.values):.2f} to {max(self.values):.2f})" if len(self.values) > 1 else ""
        return f"| {self.what} | {self.goal} | {middle:.2f}{self.unit}{spread} | {self._judged(round(middle, 2))} |"

    def _judged(self, value: float) -> str:
        if self.bound is None:
            return ""
        return "yes" if (value >= self.bound if self.least else value <= self.bound) else "no"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for; print the tables, write the result; return the exit code."""
    parser = arguments_of(__doc__, quick="tiny models")
    parser.add_argument("--part", action="append", choices=PARTS, help="repeatable; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of two steps each, at least five")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter that has deepspeed (see README.md)")
    parser.add_argument("--param-dtype", choices=DTYPES, help="default: bfloat16, with --quick float32")
    parser.add_argument("--activations", metavar="WORKLOAD", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.param_dtype = options.param_dtype or ("float32" if options.quick else "bfloat16")
    if options.activations:
        print(activation_bytes(options.activations, options.param_dtype))
        return 0
    surroundings = describe_surroundings(PACKAGES)
    results = result_folder(options)
    theme = THEME if options.quick or options.param_dtype == "bfloat16" else f"{options.param_dtype}_{THEME}"
    raw = earlier_result(theme, surroundings, results) if results is not None else {}
    if raw.get("revision") != surroundings.revision:
        raw = {"revision": surroundings.revision, "commands": []}
    raw["surroundings"] = surroundings.to_markdown()
    raw["commands"] = [*raw["commands"], surroundings.command]
    for part in options.part or PARTS:
        raw[part] = limited_training(options) if part == "memory" else side_by_side(part, options)
        body = write(raw)
        if results is not None:  # after each part: what follows may fail
            write_result(theme, surroundings, body, raw, results)
    print(write(raw))
    runs = [run for part in PARTS for run in (raw.get(part) if isinstance(raw.get(part), list) else [])]
    return 0 if all(run["error"] is None for run in runs) else 1


def side_by_side(part: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the runs of one part, a record for each contender and block."""
    budget = "8MiB" if options.quick else "512MiB"
    dtype = {"param_dtype": options.param_dtype}
    settings: dict[str, dict[str, Any]] = {"auto": {"host_memory": budget, **dtype}}
    settings["backward"] = {**settings["auto"], "update": "backward"}
    workloads: tuple[str, ...] = ("compute-bound", "more-tokens")
    if part == "drive":
        workloads = ("io-bound",)
        settings["int8"] = {**settings["backward"], "moments": "int8"}
    elif part == "batches":
        workloads = ("io-bound-eighth",)
        settings = {"accumulated": {**settings["auto"], "accumulate": 2 if options.quick else 8}}
        settings["vertical"] = {**settings["accumulated"], "vertical": "yes"}
    contenders = [Contender(name, "tiermem_contender.py", sys.executable, own) for name, own in settings.items()]
    if part == "compute":
        contenders.insert(0, Contender(IDEAL, "plain_contender.py", sys.executable, dtype))
    if options.deepspeed and part != "batches":
        contenders.append(Contender(PEER, "deepspeed_contender.py", options.deepspeed, dtype))
    if part == "drive" and shutil.which("fio"):
        contenders.append(Contender(DRIVE, "fio_contender.py", sys.executable, {}))
    plan = Plan(
        workloads=("quick",) if options.quick else workloads,
        contenders=tuple(contenders),
        rounds=1 if options.quick else options.rounds,
        warm_up=1,
        steps=0,
        directory=options.directory,
        in_turns=True,
        pause=REST if part == "drive" and not options.quick else 0.0,
    )
    return run_all(plan if part != "batches" or options.quick else replace(plan, rounds=max(5, options.rounds)))


def limited_training(options: argparse.Namespace) -> dict[str, Any]:
    """Train a model under an enforced limit; return the command's report, the limit and the group's peak.

    And the activations of the I/O-bound workload, which its memory is held against.
    """
    reason = memory_group.why_not()
    workload = "quick" if options.quick else "io-bound"
    activations = child_of_mine(["--activations", workload, "--param-dtype", options.param_dtype])
    found: dict[str, Any] = {"activations": activations}
    if reason is not None:
        return {**found, "error": reason}
    with tempfile.TemporaryDirectory(prefix="tiermem-goals-", dir=options.directory) as name:
        model = "llama-tiny" if options.quick else str(larger_model(Path(name)))
        budget = "64MiB" if options.quick else "208MiB"
        command = ["train", "--model", model, "--steps", "3", "--batch", "1", "--seq", "64", "--host-memory", budget]
        command += ["--swap-dir", name, "--json", "--param-dtype", options.param_dtype]
        run = memory_group.run_in_group([sys.executable, "-m", "tiermem", *command], LIMIT, timeout_seconds=1200)
    if run.completed.returncode != 0:
        why = "killed for wanting more" if run.was_killed else (run.completed.stderr.splitlines() or ["no output"])[-1]
        return {**found, "error": why}
    said = json.loads(run.completed.stdout)
    steps = [{key: step[key] for key in ("loss", "seconds", "bytes_read", "bytes_written")} for step in said["steps"]]
    kept = {key: said[key] for key in ("parameters", "state_bytes", "host_memory", "peak_rss_bytes")}
    return {**found, **kept, "error": None, "limit": LIMIT, "peak_bytes": run.peak_bytes, "steps": steps}


def larger_model(folder: Path) -> Path:
    """Write the configuration of the I/O-bound model with 22 layers, 1.14 billion parameters."""
    from workloads import WORKLOADS

    replace(WORKLOADS["io-bound"], layers=22).config().save_pretrained(folder)
    return folder


def activation_bytes(workload: str, dtype: str) -> int:
    """Return the most memory that forward and backward of plain PyTorch take beside parameters and gradients."""
    import torch
    from workloads import WORKLOADS

    model = WORKLOADS[workload].model().to(getattr(torch, dtype))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    tokens = WORKLOADS[workload].tokens(seed=0, step=0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = peak_resident_bytes()
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
    return peak_resident_bytes() - before


def child_of_mine(arguments: Sequence[str]) -> int:
    """Run this script in a process of its own; return the number it prints."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout)


def write(raw: dict[str, Any]) -> str:
    """Return the whole result as Markdown."""
    lines = ["| figure | goal | here: median (blocks) | reached |", "|---|---|---|---|"]
    lines += [figure.line() for figure in figures(raw)]
    lines += ["", "Commands: " + "; ".join(f"`{command}`" for command in raw["commands"])]
    memory = raw.get("memory")
    if memory and memory["error"]:
        lines += ["", f"Under a limit: {memory['error']}"]
    elif memory:
        seconds = statistics.median(step["seconds"] for step in memory["steps"])
        trained = f"{memory['parameters']} parameters, {memory['state_bytes']} bytes of state, {seconds:.1f} s a step"
        lines += ["", f"Under a limit of {memory['limit']} bytes for the whole process: {trained}"]
        lines[-1] += f"; peak {memory['peak_bytes']} bytes."
    for part in PARTS[:3]:
        for workload in dict.fromkeys(run["workload"] for run in raw.get(part, [])):
            own = [run for run in raw[part] if run["workload"] == workload]
            lines += ["", f"## {workload}", "", table(own), "", profile(own)]
    return "\n".join(lines)


def figures(raw: dict[str, Any]) -> list[Figure]:
    """Return every figure, in the order of the goals."""
    compute, drive, batches = (raw.get(part, []) for part in PARTS[:3])
    found = []
    for workload, tokens in (("compute-bound", 512), ("more-tokens", 2048)):
        own = [run for run in compute if run["workload"] in (workload, "quick")]
        for name in ("auto", "backward"):
            what = f"168 M, {tokens} tokens, `{name}` / plain PyTorch"
            found.append(Figure(what, "<= 1.05", False, 1.05, ratios(own, name, IDEAL)))
        for name in ("auto", "backward"):
            what = f"168 M, {tokens} tokens, ZeRO-Infinity / `{name}`"
            # With more tokens ZeRO-Infinity, too, hides its I/O: plain PyTorch itself would not reach 1.8.
            goal, bound = (">= 1.8", 1.8) if tokens == 512 else ("", None)
            found.append(Figure(what, goal, True, bound, ratios(own, PEER, name)))
        what = f"168 M, {tokens} tokens, ZeRO-Infinity / plain PyTorch"
        found.append(Figure(what, "", True, None, ratios(own, PEER, IDEAL)))
    for name in ("auto", "backward"):
        what = f"537 M, 64 tokens, ZeRO-Infinity / `{name}`"
        found.append(Figure(what, ">= 2.0", True, 2.0, ratios(drive, PEER, name)))
    alone = {run["round"]: rate_of(run) for run in drive if run["contender"] == DRIVE and run["error"] is None}
    for name in ("auto", "backward"):
        own = [run for run in drive if run["contender"] == name and run["round"] in alone]
        beside = [held_against(run, alone[run["round"]]) for run in own]
        what = f"537 M, 64 tokens, `{name}` / (its bytes / fio's mixed bandwidth)"
        found.append(Figure(what, "<= 1.10", False, 1.10, beside))
    for name in ("auto", "backward"):
        what = f"537 M, 64 tokens, 8-bit moments (`backward`) / `{name}`"
        found.append(Figure(what, "<= 0.6", False, 0.6, ratios(drive, "int8", name)))
    what = "537 M, eight micro-batches of 8 tokens, vertical / accumulated"
    found.append(Figure(what, "<= 0.4", False, 0.4, ratios(batches, "vertical", "accumulated")))
    return found + memory_figures(drive, raw.get("memory", {}))


def memory_figures(drive: Runs, memory: dict[str, Any]) -> list[Figure]:
    """Return memory above the imports, and state held against an enforced limit."""
    own = [run for run in drive if run["contender"] == "auto" and run["error"] is None]
    above = [max(run["peak_rss_bytes"] - run["baseline_rss_bytes"] for run in own) / 1e9] if own else []
    goal, bound = "<= budget + activations + 5 %", 0.0
    if memory:
        bound = round((512 * (1 << 20) + memory["activations"]) * 1.05 / 1e9, 2)
        goal += f" = {bound:.2f} GB"
    what = "537 M, 64 tokens, budget 512 MiB: memory above imports"
    found = [Figure(what, goal, False, bound, above, unit=" GB")]
    states = [memory["state_bytes"] / memory["limit"]] if memory and memory["error"] is None else []
    return [*found, Figure("state / memory limit enforced on the whole process", ">= 16", True, 16.0, states)]


def ratios(runs: Runs, upper: str, lower: str) -> list[float]:
    """Return, for each block, the median step of one contender over that of another."""
    steps: dict[str, dict[int, float]] = {upper: {}, lower: {}}
    for run in runs:
        if run["contender"] in steps and run["error"] is None:
            steps[run["contender"]][run["round"]] = statistics.median(run["seconds"])
    return [steps[upper][number] / steps[lower][number] for number in steps[upper] if number in steps[lower]]


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
