"""Draws the pictures of the documentation from committed results, and a plan from a profile that is shipped.

Owns which picture comes from which result. Does not measure: the same code draws here that draws for a user. Guarantees
that a picture can be drawn again by anybody, from files in `results/`, and says what is missing where one cannot.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import HERE, RESULTS
from goals import PARTS, PEER
from rich.console import Console
from rich.terminal_theme import MONOKAI
from train_step import DRIVE, IDEAL

from tiermem.cli.live import WIDTH, render
from tiermem.cli.plan import PlanOptions, plan
from tiermem.cli.plan_plot import plot_plan
from tiermem.cli.report import StepReport
from tiermem.config import Config
from tiermem.memory.sizes import format_bytes
from tiermem.planner.predict import Prediction
from tiermem.stats import EdgeStatistics, TierStatistics

PICTURES = HERE.parent / "docs" / "pictures"
COMPARED = PARTS[:3]  # the parts of a record of goals in which contenders are beside each other
OTHERS = (IDEAL, PEER)  # contenders that are not tiermem


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw every picture for which there is a result; return 1 if there is none at all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the results are")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="where the pictures go")
    parser.add_argument("--parameters", default="7B", help="of the model whose plan is drawn (default: 7B)")
    options = parser.parse_args(arguments)
    options.pictures.mkdir(parents=True, exist_ok=True)
    live_views = sorted(options.results.glob("live_view_*.json"))
    for result in live_views:
        path = options.pictures / "live_view.svg"
        path.write_text(live_view(json.loads(result.read_text(encoding="utf-8"))), encoding="utf-8")
        print(f"{path.name} from {result.name}")
    if importlib.util.find_spec("matplotlib") is None:
        print("the others: skipped, matplotlib is not installed (the extra `plots`)")
        return 0 if live_views else 1
    beside = latest_record(options.results)
    if beside is not None:
        record = json.loads(beside.read_text(encoding="utf-8"))
        runs = [run for part in COMPARED for run in record[part]]
        side_by_side(runs, options.pictures / "side_by_side.png")
        print(f"side_by_side.png from {beside.name}")
    for result in sorted(options.results.glob("step_timeline_*.json"))[-1:]:  # the latest
        step_timeline(json.loads(result.read_text(encoding="utf-8"))["cases"], options.pictures / "step_timeline.png")
        print(f"step_timeline.png from {result.name}")
    plot_plan(plan_of(options.parameters, "rtx4090"), options.pictures / "plan.png")
    print("plan.png from the profile rtx4090")
    return 0


def latest_record(results: Path) -> Path | None:
    """The latest result of `goals.py` that compares contenders in all of its parts."""
    complete = [
        result
        for result in results.glob("goals_*.json")
        if all(part in json.loads(result.read_text(encoding="utf-8")) for part in COMPARED)
    ]
    return max(complete, key=lambda result: result.stem.rpartition("_")[2], default=None)  # by the date in the name


def plan_of(parameters: str, machine: str) -> Prediction:
    """What `tiermem plan --parameters ... --machine ...` foresees: described machines need no measurement."""
    options = PlanOptions(
        model=None,
        parameters=parameters,
        machine=machine,
        measure=False,
        batch=4,
        seq=256,
        accumulate=1,
        ranks=1,
        commits=False,
    )
    return plan(options, Config(swap_dirs=["."]))


def side_by_side(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG of runs that `train_step.py` made: for each workload, seconds of a step and memory above imports."""
    from matplotlib.figure import Figure

    good = [run for run in runs if run["error"] is None and run["contender"] != DRIVE]
    workloads = list(dict.fromkeys(run["workload"] for run in good))
    figure = Figure(figsize=(11, 2.6 * len(workloads)))
    rows = figure.subplots(len(workloads), 2, squeeze=False)
    for (time, memory), workload in zip(rows, workloads, strict=True):
        own = [run for run in good if run["workload"] == workload]
        for name in list(dict.fromkeys(run["contender"] for run in own))[::-1]:
            theirs = [run for run in own if run["contender"] == name]
            seconds = [second for run in theirs for second in run["seconds"]]
            middle = statistics.median(seconds)
            colour = "#9a9a9a" if name.startswith(OTHERS) else "#3b6ea8"
            spread = [[middle - min(seconds)], [max(seconds) - middle]]
            time.barh(name, middle, xerr=spread, color=colour, ecolor="#444444")
            time.text(max(seconds), name, f" {middle:.3g}", va="center", fontsize=8)
            growth = max(run["peak_rss_bytes"] - run["baseline_rss_bytes"] for run in theirs) / 1e9
            memory.barh(name, growth, color=colour)
            memory.text(growth, name, f" {growth:.3g}", va="center", fontsize=8)
        time.set_title(f"{workload}: seconds of a step (median, from least to most)", fontsize=9)
        memory.set_title("peak memory above imports, GB", fontsize=9)
        memory.set_yticks([])
        for axes in (time, memory):
            axes.margins(x=0.14)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def step_timeline(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG of what `step_timeline.py` looked at: rates, waiting and updating in the course of a step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.8 * len(cases)))
    rows = figure.subplots(len(cases), 1, squeeze=False)
    for (axes,), case in zip(rows, cases, strict=True):
        slices = case["slices"]
        times = [(each["start"] + each["end"]) / 2 for each in slices]
        read, written = ([each[name] for each in slices] for name in ("read", "written"))
        axes.stackplot(times, read, written, labels=["read", "written"], colors=["#3b6ea8", "#d98f4e"], alpha=0.85)
        shares = axes.twinx()
        shares.plot(times, [100 * each["waiting"] for each in slices], color="#444444", lw=1, label="computation waits")
        shares.plot(times, [100 * each["updating"] for each in slices], color="#3a7d44", lw=1, label="update runs")
        for phase in case["phases"][1:2]:
            axes.axvline(phase["start"], color="#999999", lw=0.8, ls="--")
            axes.text(phase["start"], axes.get_ylim()[1], " backward", va="top", fontsize=8, color="#666666")
        axes.set_title(f"{case['name']}: a step of {case['seconds']:.2f} s", fontsize=9)
        axes.set_ylabel("GB/s", fontsize=8)
        shares.set_ylabel("% of the time", fontsize=8)
        shares.set_ylim(0, 105)
        axes.set_xlim(0, case["seconds"])
        axes.tick_params(labelsize=8)
        shares.tick_params(labelsize=8)
    handles = [handle for each in (axes, shares) for handle in each.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="lower center", ncols=4, fontsize=8, frameon=False)
    axes.set_xlabel("seconds", fontsize=8)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=110)


def live_view(report: dict[str, Any]) -> str:
    """Return the live view at the end of a run as SVG; `report` is the JSON of `tiermem train`."""
    steps = [
        StepReport(**{**step, "edges": tuple(EdgeStatistics(**edge) for edge in step["edges"])})
        for step in report["steps"]
    ]
    tiers = [TierStatistics(**tier) for tier in report["tiers"]]
    growth = report["peak_rss_bytes"] - report["baseline_rss_bytes"]
    memory = f"memory {format_bytes(growth)} (budget {format_bytes(report['host_memory'])}, "
    memory += f"plain {format_bytes(report['state_bytes'])})"
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(render(steps, total=steps[-1].number, tiers=tiers, memory=memory))
    return console.export_svg(title=f"tiermem train --model {report['model']}", theme=MONOKAI, unique_id="live")


if __name__ == "__main__":
    sys.exit(main())
