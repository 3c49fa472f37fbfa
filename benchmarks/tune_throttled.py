"""Whether `tune` sees a slow drive, and is right: the same model on the drive as it is and throttled to a fifth.

Owns the throttle (a control group of Linux's blkio controller, version 1, made and removed here), the two searches and
the measurements that judge them. Does not search or train by itself. Guarantees that each choice is made from what was
measured under its own condition, that the default and both choices are measured under both, in turns, and that without
such a control group the script says why it skips.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from calibration import MODELS, TINY, Case, calibrate, host_bytes, train_steps, work_of
from common import arguments_of, end_on_sigterm, report

from tiermem.cli.measure import measure_drive
from tiermem.planner.design import PlanSettings
from tiermem.planner.tuning import tune

THEME = "tune_throttled"
PACKAGES = ("torch", "transformers", "numpy")
GROUPS = Path("/sys/fs/cgroup/blkio")
SLOWER = 5
SHARE = 0.3
UPDATES = ("forward", "backward", "step")


def main(arguments: Sequence[str] | None = None) -> int:
    """Choose under both conditions, measure under both; print the table, write the result."""
    parser = arguments_of(__doc__, quick="a tiny model")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        return child(options.child)
    reason = why_not(options.directory)
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    with tempfile.TemporaryDirectory(prefix="tiermem-throttled-", dir=options.directory) as name:
        body, raw = compare(Path(name), options.quick)
    report(THEME, PACKAGES, body, raw, options)
    return 0


def why_not(directory: Path) -> str | None:
    """Why the drive of a directory cannot be throttled here; None if it can."""
    limit = GROUPS / "blkio.throttle.read_bps_device"
    if not limit.exists():
        return f"{limit} is missing: it takes Linux with version 1 of the blkio control groups"
    if not os.access(GROUPS, os.W_OK):
        return f"{GROUPS} may not be written: it takes root"
    if disk_of(directory) is None:
        return f"{directory.resolve()} is not on a block device"
    return None


def disk_of(directory: Path) -> str | None:
    """Major and minor number of the whole disk under a directory; limits do not work on a partition."""
    number = directory.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if not (device / "dev").exists():
        return None
    whole = device.parent if (device / "partition").exists() else device
    return (whole / "dev").read_text(encoding="ascii").strip()


@contextmanager
def throttled(directory: Path, read: float, write: float) -> Iterator[Path]:
    """A control group whose processes get so many bytes a second of the directory's disk; removed afterwards."""
    group = GROUPS / f"tiermem-{os.getpid()}"
    group.mkdir()
    try:
        for way, rate in (("read", read), ("write", write)):
            (group / f"blkio.throttle.{way}_bps_device").write_text(f"{disk_of(directory)} {int(rate)}")
        yield group
    finally:
        group.rmdir()


def compare(folder: Path, quick: bool) -> tuple[str, dict[str, Any]]:
    """Run the searches and the measurements, each in a process of its own."""
    drive = measure_drive([folder], seconds=0.05 if quick else 2.0)
    job: dict[str, Any] = {"folder": str(folder), "quick": quick}
    with throttled(folder, drive.read / SLOWER, drive.write / SLOWER) as group:
        conditions = {"as it is": None, "a fifth": group}
        found = {name: run_child(job, where, folder) for name, where in conditions.items()}
        settings = {"default": found["as it is"]["default"]}
        settings |= {f"chosen: {name}": found[name]["chosen"] for name in conditions}
        job["settings"] = list(settings.values())
        taken = {name: run_child(job, where, folder)["seconds"] for name, where in conditions.items()}
    medians = {
        name: dict(zip(settings, map(statistics.median, columns), strict=True)) for name, columns in taken.items()
    }
    raw = {"drive": dataclasses.asdict(drive), "searches": found, "settings": settings, "seconds": taken}
    return table(found, settings, medians), raw


def run_child(job: dict[str, Any], group: Path | None, folder: Path) -> dict[str, Any]:
    """This script in a process of its own, in a control group: what it answers."""
    path = folder / "job.json"
    path.write_text(json.dumps({**job, "group": None if group is None else str(group)}), encoding="utf-8")
    subprocess.run([sys.executable, __file__, "--child", str(path)], check=True)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def child(path: Path) -> int:
    """Choose settings, or measure those that are given; the answer goes where the question was."""
    job = json.loads(path.read_text(encoding="utf-8"))
    folder, quick = Path(job["folder"]), job["quick"]
    if job["group"] is not None:  # before there is any other thread: those that are made later inherit it
        (Path(job["group"]) / "cgroup.procs").write_text(str(os.getpid()))
    name, model = next(iter((TINY if quick else MODELS).items()))
    case = Case(name, "bfloat16", "forward", SHARE)
    if "settings" in job:
        taken: list[list[float]] = [[] for _ in job["settings"]]
        for _ in range(1 if quick else 2):
            for seconds, settings in zip(taken, job["settings"], strict=True):
                config = configured(PlanSettings(**settings), case.dtype)
                seconds.extend(train_steps(model, config, [folder / "swap"], 1 if quick else 4).seconds)
        path.write_text(json.dumps({"seconds": taken}), encoding="utf-8")
        return 0
    found = calibrate(model, work_of(model, name, case.dtype), folder, quick=quick)
    budget = PlanSettings(host_memory=host_bytes(case, found.work), update=case.update)
    tuning = tune(found.work, found.machine, budget, updates=UPDATES)
    answer = {
        "machine": dataclasses.asdict(found.machine),
        "default": dataclasses.asdict(tuning.default.settings),
        "chosen": dataclasses.asdict(tuning.chosen.settings),
        "default_seconds": tuning.default.seconds,
        "chosen_seconds": tuning.chosen.seconds,
        "trials": [dataclasses.asdict(trial) for trial in tuning.trials],
    }
    path.write_text(json.dumps(answer), encoding="utf-8")
    return 0


def configured(settings: PlanSettings, dtype: str) -> dict[str, Any]:
    """The settings as `tiermem.Config` takes them."""
    return {
        "device": "cpu",
        "host_memory": settings.host_memory,
        "update": settings.update,
        "param_dtype": dtype,
        "look_ahead": "auto" if settings.look_ahead is None else settings.look_ahead,
        "tile_size": "auto" if settings.tile_nbytes is None else settings.tile_nbytes,
        "queue_depth": settings.queue_depth,
        "block_size": settings.block_size,
        "commits": False,
    }


def table(
    found: dict[str, dict[str, Any]], settings: dict[str, dict[str, Any]], medians: dict[str, dict[str, float]]
) -> str:
    """The result as Markdown."""
    lines = ["| drive | read GB/s | write GB/s | settings | simulated s | measured s |", "|---|---|---|---|---|---|"]
    verdicts = []
    for name, search in found.items():
        drive, simulated = (
            search["machine"]["drive"],
            {tuple(sorted(trial["settings"].items(), key=str)): trial for trial in search["trials"]},
        )
        for title, chosen in settings.items():
            trial = simulated.get(tuple(sorted(chosen.items(), key=str)))
            lines.append(
                f"| {name} | {drive['read'] / 1e9:.2f} | {drive['write'] / 1e9:.2f} | {title} "
                f"| {'' if trial is None else format(trial['seconds'], '.3f')} | {medians[name][title]:.3f} |"
            )
        best = min(medians[name], key=medians[name].__getitem__)
        gain = medians[name]["default"] / medians[name][f"chosen: {name}"]
        verdicts.append(
            f"Drive {name}: the choice is {gain:.2f} times as fast as the default; fastest measured: {best}."
        )
    words = [
        f"- {title}: " + ", ".join(f"{key}={value}" for key, value in chosen.items() if value is not None)
        for title, chosen in settings.items()
    ]
    return "\n".join([*words, "", *lines, "", *verdicts])


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
