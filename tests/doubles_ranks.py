"""Real processes as ranks: one process imports everything once and forks the ranks of each world.

Run as a program it forks, for every job it is given, that many processes; each initialises torch.distributed with gloo
and carries out the job's scenarios one after the other. What a scenario returns, or raises, is saved per rank. Nothing
waits longer than its limit, and no child outlives the program.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doubles_python import WarmPython

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 150.0  # seconds without the end of a scenario on any rank, after which a job hangs, and ends the call
STALL = 90.0  # seconds the ranks wait for each other: far more than a busy machine makes of a step, less than `LIMIT`
PATIENCE = 1200.0  # seconds for a test that calls `run_jobs`, which ends what hangs itself, and says what it was
SAID = 4000  # characters at the end of what the ranks wrote to stderr that a failure tells
# Scenarios of other people's models, by what their names begin with, and what they import.
IMPORTS = {
    "plain_llama": "transformers.models.llama.modeling_llama",
    "llama_together": "transformers.models.llama.modeling_llama",
    "lora": "peft",
    "planned": "transformers.models.llama.modeling_llama",
    "mixture": "transformers.models.mixtral.modeling_mixtral",
    "streamed": "transformers.models.mixtral.modeling_mixtral",
    "trainer_adapters": "peft",
}


@dataclass
class Report:
    """What a rank brought: `value`, or `error` (its class name and text)."""

    value: Any = None
    error: tuple[str, str] | None = None
    seconds: float = 0.0


Reports = dict[tuple[int, str], list[Report | None]]


def run_jobs(
    python: WarmPython, directory: Path, jobs: list[tuple[int, list[str]]], *, limit: float = LIMIT
) -> Reports:
    """Carry out jobs of (ranks, scenarios); reports by (ranks, scenario), in rank order; None: the rank died.

    `limit`: seconds in which a job comes on. The program ends itself with the first that does not.
    """
    arguments = [python.path, __file__, str(directory), json.dumps(jobs), str(limit)]
    with (directory / "stderr").open("w+") as errors:
        program = subprocess.Popen(arguments, start_new_session=True, stderr=errors)
        try:
            code = program.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # ranks too, whatever happened
            program.wait()
    said = (directory / "stderr").read_text(errors="replace")
    assert code == 0, f"the ranks did not end in time, or could not begin ({code}): ...{said[-SAID:]}"
    reports: Reports = {}
    for number, (size, names) in enumerate(jobs):
        for name in names:
            files = [directory / f"{number}.{name}.{rank}" for rank in range(size)]
            reports[size, name] = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
    return reports


def values(reports: list[Report | None]) -> list[Any]:
    """What every rank returned; fails with the traceback of one that raised."""
    for rank, report in enumerate(reports):
        assert report is not None, f"rank {rank} died"
        assert report.error is None, f"rank {rank}: {report.error[1]}"
    return [report.value for report in reports if report is not None]


def _rank(directory: Path, number: int, rank: int, size: int, names: list[str]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    wait = dt.timedelta(seconds=STALL)
    store = directory / f"{number}.store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=wait)
    known = {name: scenario for module in _modules(names) for name, scenario in module.SCENARIOS.items()}
    for name in names:
        own = directory / f"{number}.{name}"
        own.mkdir(exist_ok=True)
        report, started = Report(), time.monotonic()
        try:
            report.value = known[name](own / "swap", rank, size)
        except Exception as error:  # noqa: BLE001 - reported
            report.error = (type(error).__name__, f"{error}\n{traceback.format_exc()}")
        report.seconds = time.monotonic() - started
        (directory / f"{number}.{name}.{rank}").write_bytes(pickle.dumps(report))


def _modules(names: list[str]) -> list[Any]:
    """Where scenarios are found."""
    places = ["scenarios", "idioms", "devices", "commits", "kept", "hybrid", "deviations", "plans"]
    if any(name.startswith("trainer") for name in names):  # which brings all of transformers' Trainer
        places.append("trainer")
    return [importlib.import_module(f"doubles_rank_{place}") for place in places]


def _main(directory: Path, jobs: list[tuple[int, list[str]]], limit: float) -> None:
    # Once for all ranks, and not within the time that they have for an answer: what the first step would import.
    own = {IMPORTS[key] for _, names in jobs for name in names for key in IMPORTS if name.startswith(key)}
    _modules([name for _, names in jobs for name in names])
    for name in ("torch._dynamo", "numba", *own):
        with contextlib.suppress(ModuleNotFoundError):  # numba need not be there
            importlib.import_module(name)
    gc.freeze()  # no rank looks through all that, which would copy its memory

    for number, (size, names) in enumerate(jobs):
        children: list[int] = []
        done, until = 0, time.monotonic() + limit
        for rank in range(size):
            child = os.fork()
            if child == 0:
                try:
                    _rank(directory, number, rank, size, names)
                finally:
                    sys.stderr.flush()
                    os._exit(0)
            children.append(child)
        while children:
            time.sleep(0.01)
            children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
            if children and time.monotonic() > until:
                before, done = done, len(list(directory.glob(f"{number}.*.*")))  # reports
                until += limit
                if before == done:
                    break
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if children:
            sys.exit(f"{len(children)} of {size} ranks of job {number} ({', '.join(names)}) hang")


if __name__ == "__main__":
    sys.modules.setdefault("doubles_ranks", sys.modules["__main__"])
    Report.__module__ = "doubles_ranks"
    _main(Path(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3]))
