"""What committing every step costs: the same training with and without, in turns.

Owns the comparison and its table. Does not train anything itself: each run is a process of `tiermem_contender.py`, as
in `train_step.py`. Guarantees medians of at least five steps, a ratio for each round (so that a slow minute of a shared
machine meets both), and a result file that says what was measured. The last commit is waited for outside the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import RESULTS, report_runs
from train_step import NAMES, PACKAGES, Contender, Plan, drive, run_all

THEME = "commit_cost"
WITHOUT, WITH = "without commits", "a commit every step"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says; print the table, write the result; return the exit code."""
    options = parse(arguments)
    quick = options.quick
    fields = "host_memory=8MiB" if quick else options.tiermem
    settings = dict(field.split("=", 1) for field in fields.split(","))
    contenders = (
        Contender(WITHOUT, "tiermem_contender.py", sys.executable, settings),
        Contender(WITH, "tiermem_contender.py", sys.executable, {**settings, "commit": True}),
    )
    plan = Plan(
        workloads=("quick",) if quick else (options.workload,),
        contenders=contenders,
        rounds=1,
        warm_up=2,
        steps=5 if quick else max(5, options.steps),
        directory=options.directory,
    )
    runs = json.loads(options.add.read_text(encoding="utf-8"))["runs"] if options.add is not None else []
    for _ in range(1 if quick else options.rounds):
        number = len({run["round"] for run in runs})
        # Each goes first in turn: what a drive owes from the run before meets both.
        turn = replace(plan, contenders=contenders if number % 2 == 0 else contenders[::-1])
        runs += [{**run, "round": number} for run in run_all(turn)]
    body = f"Workload `{plan.workloads[0]}`, tiermem {fields}.\n\n{table(runs)}"
    return report_runs(THEME, PACKAGES, body, runs, options.results or (None if quick else RESULTS))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round, no result file: does it run")
    parser.add_argument("--workload", choices=NAMES, default="io-bound")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="measured steps a round, at least five")
    parser.add_argument(
        "--tiermem", metavar="FIELD=VALUE,...", default="host_memory=512MiB,update=backward", help="fields of Config"
    )
    parser.add_argument("--add", type=Path, metavar="RESULT.json", help="an earlier result whose rounds count too")
    parser.add_argument("--directory", type=Path, default=Path(), help="where swap files go (default: here)")
    parser.add_argument("--results", type=Path, help=f"where the result goes (default: {RESULTS.name}/)")
    return parser.parse_args(arguments)


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the runs as a Markdown table: medians, and the median of the ratios of each round."""
    lines = ["| run | s/step | ratio to without | read/step | written/step |", "|---|---|---|---|---|"]
    plain = {run["round"]: statistics.median(run["seconds"]) for run in runs if is_good(run, WITHOUT)}
    for name in (WITHOUT, WITH):
        good = [run for run in runs if is_good(run, name)]
        if not good:
            lines.append(f"| {name} | failed: {next(run['error'] for run in runs if run['contender'] == name)} | | | |")
            continue
        seconds = [second for run in good for second in run["seconds"]]
        ratios = [statistics.median(run["seconds"]) / plain[run["round"]] for run in good if run["round"] in plain]
        spread = f" ({min(ratios):.3f} to {max(ratios):.3f})" if len(ratios) > 1 else ""
        ratio = f"{statistics.median(ratios):.3f}{spread}" if ratios else ""
        lines.append(
            f"| {name} | {statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f}) | {ratio} "
            f"| {drive(good, 'drive_bytes_read')} | {drive(good, 'drive_bytes_written')} |"
        )
    return "\n".join(lines)


def is_good(run: dict[str, Any], name: str) -> bool:
    """Return whether a run is a successful one of this name."""
    return run["contender"] == name and run["error"] is None


if __name__ == "__main__":
    sys.exit(main())
