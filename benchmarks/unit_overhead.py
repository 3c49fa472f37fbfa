"""What tiermem costs for each unit and step, whatever is in the unit: a model of 10, 100 and 1,000 tiny layers.

Owns the model (Linear layers of 32 x 32, by `--coalesce` a unit each or several in one), the timing and the table.
Does not say what a large unit costs: that is I/O and `train_step.py`. Guarantees that plain PyTorch and tiermem
take turns in every round, that the first steps are left out, that losses are compared, and that CPU time and wake-
ups are the kernel's count for each thread.

"cached": the budget holds everything, so that no I/O is in the numbers. "paged": it holds a quarter. Overhead is the
median step less the median plain step, divided by the number of layers. A wake-up is a voluntary context switch: the
thread waited for another one, or for the interpreter lock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from common import arguments_of, report
from torch import nn

import tiermem
from tiermem.cli.train import SWITCH_SECONDS

THEME = "unit_overhead"
PACKAGES = ("torch",)
WIDTH, ROWS = 32, 4
# Frames of a unit: parameters, gradients, moments; whole blocks each.
UNIT_NBYTES = 8192 + 8192 + 12288
PLAIN, CACHED, PAGED = "plain", "cached", "paged"


class Layers(nn.Module):
    """A chain of small layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return [rows, WIDTH], as it came in."""
        for layer in self.layers:
            values = values + layer(values) / len(self.layers)  # so that a thousand of them stay finite
        return values


@dataclass(frozen=True, slots=True)
class Thread:
    """What a thread did in a step: seconds of CPU, and how often it slept and was woken."""

    cpu_seconds: float
    wake_ups: float


@dataclass(frozen=True, slots=True)
class Run:
    """One contender's steps in one round."""

    case: str
    units: int
    round: int
    seconds: list[float]
    losses: list[float]
    threads: dict[str, Thread]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says; print the table, write the result; return the exit code."""
    options = parse(arguments)
    torch.set_num_threads(1)  # the layers are too small to share
    sys.setswitchinterval(SWITCH_SECONDS)  # as `tiermem train` does
    runs: list[Run] = []
    for turn in range(options.rounds):
        for units in options.units:
            cases = (PLAIN, CACHED, PAGED)
            runs += [measure(case, units, turn, options) for case in (cases if turn % 2 == 0 else cases[::-1])]
    different = [run for run in runs if run.losses != _plain_losses(runs, run.units)]
    raw = {"runs": [asdict(run) for run in runs]}
    report(THEME, PACKAGES, table(runs, options.units), raw, options)
    for run in different:
        print(f"{run.case}, {run.units} units: other losses than plain PyTorch", file=sys.stderr)
    return 1 if different else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = arguments_of(__doc__, quick="few units, one round")
    parser.add_argument("--units", type=int, nargs="+", help="how many units (default: 10 100 1000)")
    parser.add_argument("--rounds", type=int, help="rounds (default: 3)")
    parser.add_argument("--steps", type=int, help="measured steps in a run (default: 10)")
    parser.add_argument("--update", default="auto", help="Config.update")
    parser.add_argument("--coalesce", default="auto", help="offload's coalesce; 0: each layer is a unit of its own")
    options = parser.parse_args(arguments)
    options.units = options.units or ([4, 12] if options.quick else [10, 100, 1000])
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.steps = options.steps or (3 if options.quick else 10)
    return options


def measure(case: str, units: int, turn: int, options: argparse.Namespace) -> Run:
    """Train a fresh model for some steps."""
    torch.manual_seed(0)
    model = Layers(units)
    batch = torch.randn(ROWS, WIDTH)
    with ExitStack() as stack:
        if case == PLAIN:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        else:
            nbytes = units * UNIT_NBYTES
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.directory))
            config = tiermem.Config(
                host_memory=4 * nbytes + (8 << 20) if case == CACHED else max(nbytes // 4, 160 << 10),
                swap_dirs=[folder],
                param_dtype="float32",
                update=options.update,
                commits=False,
                device="cpu",
            )
            stack.enter_context(tiermem.offload(model, config, coalesce=options.coalesce))
            optimizer = tiermem.AdamW(model.parameters())

        def step() -> float:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())

        return timed(case, units, turn, options.steps, step)


def timed(case: str, units: int, turn: int, steps: int, step: Callable[[], float]) -> Run:
    """Run a few steps unmeasured (the first ones find out the order), then measure."""
    losses = [step() for _ in range(4)]
    seconds, before = [], threads()
    for _ in range(steps):
        started = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - started)
    spent = {
        name: Thread(
            (after.cpu_seconds - before.get(name, Thread(0.0, 0)).cpu_seconds) / steps,
            (after.wake_ups - before.get(name, Thread(0.0, 0)).wake_ups) / steps,
        )
        for name, after in threads().items()
    }
    return Run(case, units, turn, seconds, losses, spent)


def threads() -> dict[str, Thread]:
    """What each kind of thread has done so far: "compute", "pager", "update", "io"."""
    found: dict[str, Thread] = {}
    for thread in threading.enumerate():
        if thread.ident is None or thread.native_id is None:
            continue
        cpu = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        wake_ups = _switches(thread.native_id)
        kind = _KINDS.get(thread.name.split("_")[0], "io")
        known = found.get(kind, Thread(0.0, 0))
        found[kind] = Thread(known.cpu_seconds + cpu, known.wake_ups + wake_ups)
    return found


_KINDS = {
    "MainThread": "compute",
    "tiermem-pager": "pager",
    "tiermem-update": "update",
    "tiermem-update-share": "update",
}


def _switches(thread: int) -> int:
    status = Path(f"/proc/self/task/{thread}/status")
    if not status.exists():
        return 0
    lines = dict(line.split(":", 1) for line in status.read_text(encoding="ascii").splitlines())
    return int(lines["voluntary_ctxt_switches"])


def table(runs: Sequence[Run], units: Sequence[int]) -> str:
    """Return the runs as Markdown: overhead for each unit and step, and where its CPU time went."""
    kinds = [kind for kind in ("compute", "pager", "update", "io") if any(kind in run.threads for run in runs)]
    titles = ["case", "units", "ms/step", "plain", "overhead, ms/unit", *(f"{kind} CPU" for kind in kinds)]
    titles += [f"{kind} wake-ups" for kind in kinds]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    notes = []
    for case in (CACHED, PAGED):
        overheads = []
        for count in units:
            good = [run for run in runs if run.case == case and run.units == count]
            plain = _seconds([run for run in runs if run.case == PLAIN and run.units == count])
            seconds = _seconds(good)
            overheads.append((seconds - plain) / count * 1e3)
            spent = [statistics.median(_of(run, kind).cpu_seconds for run in good) for kind in kinds]
            woken = [statistics.median(_of(run, kind).wake_ups for run in good) for kind in kinds]
            cells = [case, str(count), f"{seconds * 1e3:.2f}", f"{plain * 1e3:.2f}", f"{overheads[-1]:.3f}"]
            cells += [f"{cpu / count * 1e3:.3f}" for cpu in spent] + [f"{wakes / count:.1f}" for wakes in woken]
            lines.append(f"| {' | '.join(cells)} |")
        notes.append(
            f"{case}: the overhead of a unit among {units[-1]} is {overheads[-1] / overheads[0]:.2f} times that of one "
            f"among {units[0]}."
        )
    return "\n".join([*lines, "", "CPU in ms, and wake-ups, for each unit and step.", "", *notes])


def _seconds(runs: Sequence[Run]) -> float:
    return statistics.median(second for run in runs for second in run.seconds)


def _of(run: Run, kind: str) -> Thread:
    return run.threads.get(kind, Thread(0.0, 0.0))


def _plain_losses(runs: Sequence[Run], units: int) -> list[float]:
    return next(run.losses for run in runs if run.case == PLAIN and run.units == units)


if __name__ == "__main__":
    sys.exit(main())
