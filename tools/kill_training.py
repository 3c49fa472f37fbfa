"""Kills a training that commits, again and again, at random instants, and compares it with one nobody disturbed.

Owns the child that trains, the parent that kills it, and the comparison: each life must go on from the last
acknowledged commit or a newer one, and the weights in the end must be those of the undisturbed run, bit for bit. Knows
the public face only. Guarantees an exit status of 1 as soon as anything differs.

    python tools/kill_training.py DIRECTORY [--kills 500] [--steps 200] [--seed 1]
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch._dynamo  # what the first optimizer imports
from torch import nn

import tiermem

UPDATES = ("step", "forward", "backward", "auto")
CLIP = 1.2  # the norm of some of the steps is above it, so that "backward" has steps to take back
LARGEST_PAUSE = 0.6  # seconds a child is left alone after its first word


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


def train(directory: Path, steps: int, update: str, *, commits: bool) -> str:
    """Train up to `steps` in all, from wherever the directory is; return the digest of weights and masters."""
    torch.set_num_threads(1)
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
    say(f"resumed {done}")
    last: tuple[int, object] | None = None
    for number in range(done, steps):
        model(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if commits and (number % 5 or number + 1 == steps):  # after a step without, three copies are needed
            pending = runtime.commit({"step": number + 1, "scheduler": scheduler.state_dict()})
            if last is not None:  # the one before: kills are to come while a commit runs beside a step
                say(f"committed {last[0]}")
            last = (number + 1, pending)
            if number % 3 == 0 or number + 1 == steps:
                pending.wait()
                say(f"committed {number + 1}")
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(runtime.parameter(parameter).view(torch.int16).numpy().tobytes())
        digest.update(runtime.master(parameter).numpy().tobytes())
    runtime.close()
    return digest.hexdigest()


def say(line: str) -> None:
    """Tell the parent, at once and whole."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def one_life(directory: Path, steps: int, update: str, seconds: float | None) -> list[str]:
    """Run the child, kill it after `seconds` of work (None: never); return what it said.

    It is forked: what takes seconds to import is there already, and this process has no thread but its first.
    """
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        process = multiprocessing.get_context("fork").Process(
            target=live, args=(directory, steps, update, said.fileno(), errors.fileno())
        )
        process.start()
        while seconds is not None and process.is_alive() and not os.fstat(said.fileno()).st_size:
            time.sleep(0.005)
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
        said.seek(0)
        errors.seek(0)
        lines = said.read().decode().splitlines()
        if process.exitcode not in (0, -signal.SIGKILL):
            raise SystemExit(f"a child failed with status {process.exitcode}: {lines}\n{errors.read().decode()}")
    return lines


def live(directory: Path, steps: int, update: str, said: int, errors: int) -> None:
    """Be the child: train, and say the digest in the end."""
    os.dup2(said, sys.stdout.fileno())
    os.dup2(errors, sys.stderr.fileno())
    update, _, plain = update.partition("-")
    say(f"digest {train(directory, steps, update, commits=not plain)}")


def torture(directory: Path, *, kills: int, steps: int, seed: int) -> str:
    """Kill `kills` times in all, over all schedules; return what happened, in words. Raises SystemExit."""
    dice = random.Random(seed)  # noqa: S311 - reproducible instants, not a secret
    done = rounds = resumes = 0
    started = time.monotonic()
    plain = Path(tempfile.mkdtemp(prefix="plain-", dir=directory))
    expected = one_life(plain, steps, "step-plain", None)[-1]  # the schedules give the same bits
    while done < kills:
        update = UPDATES[rounds % len(UPDATES)]
        rounds += 1
        acknowledged, lines = 0, []
        run = Path(tempfile.mkdtemp(prefix=f"{update}-", dir=directory))
        for _ in range(min(kills - done, max(1, kills // len(UPDATES)))):
            lines = one_life(run, steps, update, dice.uniform(0, LARGEST_PAUSE))
            done += 1
            for line in lines:
                word, _, number = line.partition(" ")
                resumes += word == "resumed" and int(number) > 0
                if word in ("resumed", "committed"):
                    if int(number) < acknowledged:
                        raise SystemExit(f"step {acknowledged} was acknowledged, then {line!r}")
                    acknowledged = int(number)
            if lines and lines[-1].startswith("digest"):
                break
        final = one_life(run, steps, update, None)[-1]
        if final != expected:
            raise SystemExit(f"update={update}: the undisturbed run ended with {expected}, this one with {final}")
    seconds = time.monotonic() - started
    return f"{done} kills in {rounds} runs of {steps} steps, {resumes} resumes, nothing lost, {seconds:.0f} s"


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
