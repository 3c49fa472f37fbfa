"""Kills a training that commits, again and again, at random instants, and compares it with one nobody disturbed.

Owns what a child trains, when it is to be killed (`lives.py` kills), and the comparison: each life must go on from the
last acknowledged commit or a newer one, and the weights in the end must be those of the undisturbed run, bit for bit.
Knows the public face only. Guarantees an exit status of 1 as soon as anything differs.

    python tools/kill_training.py DIRECTORY [--kills 500] [--steps 200] [--seed 1]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # no thread may be there when children are forked

import torch
from torch import nn

import tiermem
from tiermem.optim.compiled import compiled_loops
from tools.lives import live, tell

UPDATES = ("step", "forward", "backward", "auto")
CLIP = 1.2  # the norm of some of the steps is above it, so that "backward" has steps to take back
LARGEST_PAUSE = 0.6  # seconds a child is left alone
WORKING = 0.8  # of the children have that time from their first word on; the others may die while they start or resume


class Net(nn.Module):
    """A few units, with dropout, so that the random generator matters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))
        self.outer = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, 8) to (rows, 4)."""
        x = self.inner(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.outer(x)


def train(directory: Path, steps: int, update: str, *, commits: bool) -> None:
    """Train up to `steps` in all, from wherever the directory is; tell the digest of weights and masters."""
    torch.manual_seed(1)
    with tiermem.deferred_init():
        model = Net()
    config = tiermem.Config(
        device="cpu", host_memory="128KiB", swap_dirs=[directory], param_dtype="bfloat16", update=update
    )
    runtime = tiermem.offload(model, config, resume="auto")
    optimizer = tiermem.AdamW(model.parameters(), lr=1e-2, max_grad_norm=CLIP)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    done = 0
    if runtime.committed is not None:
        optimizer.load_state_dict(runtime.committed_optimizer_state())
        scheduler.load_state_dict(runtime.committed["scheduler"])
        done = runtime.committed["step"]
    tell(f"resumed {done}")
    last: tuple[int, object] | None = None
    for number in range(done, steps):
        model(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if commits and (number % 5 or number + 1 == steps):  # after a step without, three copies are needed
            pending = runtime.commit({"step": number + 1, "scheduler": scheduler.state_dict()})
            if last is not None:  # the one before: kills are to come while a commit runs beside a step
                tell(f"committed {last[0]}")
            last = (number + 1, pending)
            if number % 3 == 0 or number + 1 == steps:
                pending.wait()
                tell(f"committed {number + 1}")
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(runtime.parameter(parameter).view(torch.int16).numpy().tobytes())
        digest.update(runtime.master(parameter).numpy().tobytes())
    runtime.close()
    tell(f"digest {digest.hexdigest()}")


def warm_up() -> None:
    """What every child would import and compile at its first step."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")
    compiled_loops()


def torture(directory: Path, *, kills: int, steps: int, seed: int) -> str:
    """Kill `kills` times in all, over all schedules; return what happened, in words. Raises SystemExit."""
    dice = random.Random(seed)  # noqa: S311 - reproducible instants, not a secret
    counts = Counter[str]()
    started = time.monotonic()
    warm_up()

    def whole(run: Path, update: str, *, commits: bool = True) -> str:
        told = live(lambda: train(run, steps, update, commits=commits), seconds=None, working=False)
        return told.lines[-1]

    plain = Path(tempfile.mkdtemp(prefix="plain-", dir=directory))
    expected = whole(plain, "step", commits=False)  # the schedules give the same bits
    while counts["kills"] < kills:
        update = UPDATES[counts["runs"] % len(UPDATES)]
        counts["runs"] += 1
        run = Path(tempfile.mkdtemp(prefix=f"{update}-", dir=directory))
        torture_run(run, steps, update, dice, counts, until=min(kills, counts["kills"] + max(1, kills // len(UPDATES))))
        if (final := whole(run, update)) != expected:
            raise SystemExit(f"update={update}: the undisturbed run ended with {expected}, this one with {final}")
    seconds = time.monotonic() - started
    return (
        f"{counts['kills']} kills ({counts['early']} while starting or resuming) in {counts['runs']} runs of {steps} "
        f"steps, {counts['resumed']} resumes, nothing lost, {seconds:.0f} s"
    )


def torture_run(run: Path, steps: int, update: str, dice: random.Random, counts: Counter[str], *, until: int) -> None:
    """Kill one run again and again, until there were `until` kills in all or it has finished."""
    acknowledged = 0
    while counts["kills"] < until:
        working = dice.random() < WORKING
        seconds = dice.uniform(0, LARGEST_PAUSE)
        life = live(lambda: train(run, steps, update, commits=True), seconds=seconds, working=working)
        counts["kills"] += life.killed
        counts["early"] += life.killed and not life.lines
        for line in life.lines:
            word, _, number = line.partition(" ")
            counts["resumed"] += word == "resumed" and int(number) > 0
            if word in ("resumed", "committed"):
                if int(number) < acknowledged:
                    raise SystemExit(f"step {acknowledged} was acknowledged, then {line!r}")
                acknowledged = int(number)
        if not life.killed:
            return


def main() -> None:
    """Parse the command line; see the top of this file."""
    parser = argparse.ArgumentParser(description="Kill a training at random instants and compare.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    print(torture(arguments.directory, kills=arguments.kills, steps=arguments.steps, seed=arguments.seed))


if __name__ == "__main__":
    main()
