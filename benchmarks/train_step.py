"""How long a training step takes and how much memory it needs, beside plain PyTorch and, if asked, DeepSpeed.

Owns the order of the runs: every contender in a process of its own, so that memory is its own, and in rounds, one after
the other, so that a slow minute of a shared machine meets all of them. Does not train anything itself. Guarantees
medians of at least five steps, ratios between runs of the same round, and a result file that says what was measured.

`--in-turns` keeps all of them alive at once and lets them do a few steps each in turn (`turns.py`), where a machine's
speed changes from minute to minute: it needs memory for all of them together.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import HERE, arguments_of, end_on_sigterm, report
from turns import Player, PlayerError, take_turns

PACKAGES = ("torch", "transformers", "numpy")
THEME = "train_step"
NAMES = ("quick", "small", "compute-bound", "more-tokens", "io-bound", "io-bound-eighth")
DTYPES = ("bfloat16", "float32")  # many processors have no instructions for the first
IDEAL = "plain"
DRIVE = "fio"
COLUMNS = (
    "| contender | s/step | ratio to plain | to fio | peak RSS | above imports | stall | read/step | written/step "
    "| bytes/parameter |"
)
TURN = 2  # steps, after one that is not counted


@dataclass(frozen=True, slots=True)
class Contender:
    """A name, the script that runs it, the interpreter for it, and its settings."""

    name: str
    script: str
    interpreter: str
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """How often each contender runs what."""

    workloads: tuple[str, ...]
    contenders: tuple[Contender, ...]
    rounds: int
    warm_up: int
    steps: int
    directory: Path
    timeout: float | None = None  # seconds for one contender's run
    in_turns: bool = False
    pause: float = 0.0  # seconds before each turn


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says; print the tables, write the result; return the exit code."""
    options = parse(arguments)
    contenders = choose_contenders(options)
    quick = options.quick
    plan = Plan(
        workloads=("quick",) if quick else tuple(options.workload or ("compute-bound", "io-bound")),
        contenders=contenders,
        rounds=1 if quick else options.rounds,
        warm_up=2 if quick else options.warm_up,
        steps=5 if quick else max(5, options.steps),
        directory=options.directory,
        in_turns=options.in_turns,
    )
    runs = run_all(plan)
    by_workload = {name: [run for run in runs if run["workload"] == name] for name in plan.workloads}
    body = "\n\n".join(f"## {name}\n\n{table(own)}\n\n{profile(own)}" for name, own in by_workload.items())
    report(THEME, PACKAGES, body, {"runs": runs}, options)
    return 0 if all(run["error"] is None for run in runs) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = arguments_of(__doc__, quick="a tiny model, one round")
    parser.add_argument("--workload", action="append", choices=NAMES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="measured steps a round, at least five")
    parser.add_argument(
        "--tiermem",
        action="append",
        metavar="FIELD=VALUE,...",
        help="fields of tiermem.Config for one tiermem contender; repeatable. Default: host_memory=512MiB",
    )
    parser.add_argument(
        "--in-turns", action="store_true", help="all at once, a block of steps each in turn: at least five blocks"
    )
    parser.add_argument("--param-dtype", choices=DTYPES, default=DTYPES[0], help="of all contenders")
    parser.add_argument("--no-plain", action="store_true", help="leave plain PyTorch out")
    parser.add_argument("--no-tiermem", action="store_true", help="leave tiermem out")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter that has deepspeed (see README.md)")
    parser.add_argument(
        "--deepspeed-settings",
        type=json.loads,
        default={},
        metavar="JSON",
        help="replaces entries of its zero_optimization and aio",
    )
    parser.add_argument("--fio", action="store_true", help="let fio show what the drive gives, in the same rounds")
    return parser.parse_args(arguments)


def choose_contenders(options: argparse.Namespace) -> tuple[Contender, ...]:
    """Return who takes part."""
    chosen, dtype = [], {"param_dtype": options.param_dtype}
    if not options.no_plain:
        chosen.append(Contender(IDEAL, "plain_contender.py", sys.executable, dtype))
    if not options.no_tiermem:
        for text in options.tiermem or ["host_memory=512MiB"]:
            settings = dtype | dict(field.split("=", 1) for field in text.split(","))
            chosen.append(Contender(f"tiermem {text}", "tiermem_contender.py", sys.executable, settings))
    if options.deepspeed:
        chosen.append(
            Contender("deepspeed nvme", "deepspeed_contender.py", options.deepspeed, dtype | options.deepspeed_settings)
        )
    if options.fio:
        chosen.append(Contender(DRIVE, "fio_contender.py", sys.executable, {}))
    return tuple(chosen)


def run_all(plan: Plan) -> list[dict[str, Any]]:
    """Run every contender on every workload, in rounds; return one record a run. Failures are records too."""
    runs = []
    for workload in plan.workloads:
        if plan.in_turns:
            runs += run_in_turns(plan, workload)
            continue
        for number in range(plan.rounds):
            for contender in plan.contenders:
                print(f"{workload}, round {number + 1} of {plan.rounds}: {contender.name}", file=sys.stderr)
                run = run_one(plan, workload, contender)
                where = {"workload": workload, "round": number, "contender": contender.name}
                runs.append({**where, "first": plan.warm_up, **run})
    return runs


def run_one(plan: Plan, workload: str, contender: Contender) -> dict[str, Any]:
    """Run one contender once, in its own process and swap directory; return its outcome, or its error."""
    with tempfile.TemporaryDirectory(prefix="tiermem-bench-", dir=plan.directory) as directory:
        command = [*command_of(contender, workload, directory)]
        command += ["--warm-up", str(plan.warm_up), "--steps", str(plan.steps)]
        if plan.timeout is not None:  # a few steps are better than none
            command += ["--seconds", f"{0.7 * plan.timeout:.0f}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment(), check=False, timeout=plan.timeout
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {plan.timeout:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        print(done.stderr, file=sys.stderr)
        said = done.stderr.strip().splitlines() or ["no output"]
        # After the error some libraries warn of how they ended.
        return {"error": f"exit code {done.returncode}: {next((w for w in reversed(said) if 'Error' in w), said[-1])}"}
    return {"error": None, **json.loads(lines[-1])}


def command_of(contender: Contender, workload: str, directory: str) -> list[str]:
    """Return the command line that runs a contender."""
    script = [contender.interpreter, str(HERE / contender.script), "--workload", workload, "--directory", directory]
    return [*script, "--settings", json.dumps(contender.settings)]


def environment() -> dict[str, str]:
    """Return the environment in which a contender finds tiermem."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *filter(None, [os.getenv("PYTHONPATH")])])}


def run_in_turns(plan: Plan, workload: str) -> list[dict[str, Any]]:
    """Run all contenders side by side, taking turns; return one record for each and round, as `run_all` does."""
    try:
        with ExitStack() as stack:
            players = []
            for contender in plan.contenders:
                directory = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="tiermem-bench-", dir=plan.directory)
                )
                command = command_of(contender, workload, directory)
                players.append(stack.enter_context(Player(contender.name, command, environment())))
            print(f"{workload}: {', '.join(player.name for player in players)}, in turns", file=sys.stderr)
            rounds = max(5, plan.rounds)
            blocks = take_turns(players, warm_up=plan.warm_up, rounds=rounds, steps=TURN, pause=plan.pause)
            outcomes = [player.finish() for player in players]
    except PlayerError as error:
        print(error.errors, file=sys.stderr)
        return [{"workload": workload, "round": 0, "contender": error.name, "error": str(error)}]
    return [
        {
            "workload": workload,
            "round": number,
            "contender": player.name,
            "error": None,
            **outcome,
            "seconds": seconds,
            "first": plan.warm_up + number * (1 + TURN) + 1,
        }
        for player, outcome, own in zip(players, outcomes, blocks, strict=True)
        for number, seconds in enumerate(own)
    ]


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the runs of one workload as a Markdown table: medians, and the median of the ratios of each round."""
    ideal = {run["round"]: statistics.median(run["seconds"]) for run in runs if is_ideal(run)}
    alone = {run["round"]: rate_of(run) for run in runs if run["contender"] == DRIVE and run["error"] is None}
    lines = [
        COLUMNS,
        "|---" * 10 + "|",
    ]
    for name in dict.fromkeys(run["contender"] for run in runs if run["contender"] != DRIVE or run["error"]):
        good = [run for run in runs if run["contender"] == name and run["error"] is None]
        if not good:
            error = next(run["error"] for run in runs if run["contender"] == name)
            lines.append(f"| {name} | failed: {error} | | | | | | | | |")
            continue
        seconds = [second for run in good for second in run["seconds"]]
        ratios = [statistics.median(run["seconds"]) / ideal[run["round"]] for run in good if run["round"] in ideal]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else ""
        beside = [held_against(run, alone[run["round"]]) for run in good if run["round"] in alone]
        to_fio = f"{statistics.median(beside):.2f}" if any(beside) else ""
        peak = max(run["peak_rss_bytes"] for run in good)
        growth = max(run["peak_rss_bytes"] - run["baseline_rss_bytes"] for run in good)
        lines.append(
            f"| {name}{good[0]['details'].get('version', '')} "
            f"| {statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {ratio} | {to_fio} "
            f"| {peak / 1e9:.2f} GB | {growth / 1e9:.2f} GB | {stalled(good)} "
            f"| {drive(good, 'drive_bytes_read')} | {drive(good, 'drive_bytes_written')} "
            f"| {moved_per_parameter(good):.1f} |"
        )
    if alone:
        load = next(run["details"]["load"] for run in runs if run["contender"] == DRIVE and run["error"] is None)
        rates = sorted(alone.values())
        lines += ["", f"{load}, in the same rounds: {statistics.median(rates):.2f} GB/s"]
        lines[-1] += f" ({rates[0]:.2f} to {rates[-1]:.2f}). To fio: seconds / (bytes read and written / this)."
    return "\n".join(lines)


def rate_of(run: dict[str, Any]) -> float:
    """Return what fio reached in a round: median GB/s."""
    return statistics.median(run["details"]["rates"][run["first"] : run["first"] + len(run["seconds"])])


def held_against(run: dict[str, Any], rate: float) -> float:
    """Return a step's seconds as a multiple of those in which fio, at `rate` GB/s, would have moved its bytes."""
    moved = statistics.median(run["drive_bytes_read"]) + statistics.median(run["drive_bytes_written"])
    return statistics.median(run["seconds"]) / (moved / 1e9 / rate) if moved else 0.0


def profile(runs: Sequence[dict[str, Any]]) -> str:
    """Return where the time of a step goes, as Markdown: phases, processor seconds by thread, causes of stalls."""
    good = [run for run in runs if run["error"] is None and run["contender"] != DRIVE]
    phases = list(dict.fromkeys(name for run in good for name in run["phases"]))
    kinds = list(dict.fromkeys(kind for run in good for kind in run["thread_seconds"]))
    titles = ["contender", *(f"{name}, s" for name in phases), *(f"{kind}, CPU s" for kind in kinds), "cores busy"]
    lines = ["Where a step's time goes (medians; CPU seconds of a step by thread)", ""]
    lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    notes = []
    for name in dict.fromkeys(run["contender"] for run in good):
        own = [run for run in good if run["contender"] == name]
        cells = [name]
        for phase in phases:
            values = [value for run in own for value in run["phases"].get(phase, [])]
            cells.append(f"{statistics.median(values):.2f}" if values else "")
        spent = {kind: statistics.median(run["thread_seconds"].get(kind, 0.0) for run in own) for kind in kinds}
        cells += [f"{seconds:.2f}" for seconds in spent.values()]
        wall = statistics.median(value for run in own for value in run["seconds"])
        cells.append(f"{sum(spent.values()) / wall:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
        overlap = own[-1]["details"].get("overlap")
        if overlap and overlap["steps"]:
            steps = overlap["steps"]
            causes = (f"{why['seconds'] / steps:.2f} s that {why['meaning']}" for why in overlap["causes"])
            notes.append(f"- {name}, the computation waited in a step (mean of {steps}): {'; '.join(causes)}")
    return "\n".join([*lines, "", *notes]).rstrip()


def is_ideal(run: dict[str, Any]) -> bool:
    """Return whether a run is a successful one of plain PyTorch."""
    return run["contender"] == IDEAL and run["error"] is None


def drive(runs: Sequence[dict[str, Any]], name: str) -> str:
    """Return the median over the measured steps of what the kernel counted."""
    return f"{statistics.median(value for run in runs for value in run[name]) / 1e9:.3f} GB"


def moved_per_parameter(runs: Sequence[dict[str, Any]]) -> float:
    """Return the median bytes that a step read and wrote, for each parameter of the model."""
    moved = [
        both for run in runs for both in map(sum, zip(run["drive_bytes_read"], run["drive_bytes_written"], strict=True))
    ]
    return statistics.median(moved) / runs[0]["parameters"]


def stalled(runs: Sequence[dict[str, Any]]) -> str:
    """Return the median stall over the measured steps, of contenders that report one."""
    values = [value for run in runs for value in run["details"].get("stall_seconds", [])[-len(run["seconds"]) :]]
    return f"{statistics.median(values):.2f} s" if values else ""


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
