"""Interrupts a training (Ctrl-C) where every n-th function of ours begins, and looks whether it goes on.

Owns what is trained, where it is interrupted, and how long a step may take. Knows the public face only. Each error is
kept until the next one comes, as the interactive interpreter does. Guarantees an exit status of 1 if a training waits
for ever afterwards, if anything but the interrupt is raised, or if a loss is not that of plain PyTorch with the same
weights; and says where the interrupt came.

    python tools/interrupt_training.py DIRECTORY [--stride 5] [--first 1] [--at-once 2]
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

UPDATES = ("step", "forward", "backward", "auto")
BUDGETS = ("44KiB", "4MiB")  # everything is paged; nothing is
OURS = ("tiermem", "swap")
PATIENCE = 60.0  # seconds without a step, after which a training waits for ever


@dataclass(frozen=True, slots=True)
class Case:
    """How a model is trained: schedule, budget, and whether three micro-batches go through each unit together."""

    update: str
    budget: str
    together: bool


class Interrupting:
    """A trace function that raises KeyboardInterrupt where our function of this number begins, on its thread."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """What `sys.settrace` calls."""
        if event == "call" and frame.f_globals.get("__name__", "").startswith(OURS):
            self.left -= 1
            if self.left == 0:
                calls = [f"{each.name}:{each.lineno}" for each in traceback.extract_stack(frame)]
                print("at", *calls[-4:], flush=True)
                raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, each in a process of its own; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--stride", type=int, default=5, help="functions from one interrupt to the next")
    parser.add_argument("--first", type=int, default=1, help="the function that is interrupted first")
    parser.add_argument("--at-once", type=int, default=2, help="processes")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        update, budget, together = options.case
        return train(Case(update, budget, together == "True"), options)
    cases = [Case(*each) for each in itertools.product(UPDATES, BUDGETS, (False, True))]
    with ThreadPoolExecutor(options.at_once) as pool:
        found = list(pool.map(lambda case: watch(case, options), cases))
    print(f"{sum(count for count, _ in found)} interrupts, {sum(not good for _, good in found)} trainings ended by one")
    return 0 if all(good for _, good in found) else 1


def watch(case: Case, options: argparse.Namespace) -> tuple[int, bool]:
    """Run a case; return how many interrupts there were, and whether the training bore all of them."""
    command = [sys.executable, __file__, str(options.directory), "--stride", str(options.stride)]
    command += ["--first", str(options.first), "--case", case.update, case.budget, str(case.together)]
    lines: list[str] = []
    late = threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:

        def give_up() -> None:
            late.set()
            child.kill()

        def begin_waiting() -> threading.Timer:
            alarm = threading.Timer(PATIENCE, give_up)
            alarm.daemon = True
            alarm.start()
            return alarm

        alarm = begin_waiting()
        for line in child.stdout or ():
            alarm.cancel()
            lines.append(line.rstrip())
            alarm = begin_waiting()
        code = child.wait()
        alarm.cancel()
    count = sum(line.startswith("at ") for line in lines)
    if code != 0:
        print(f"{case}: {'waits for ever' if late.is_set() else f'exit code {code}'}", *lines[-12:], sep="\n  ")
    return count, code == 0


def train(case: Case, options: argparse.Namespace) -> int:
    """In the process: train, with interrupts, until a step ends before one comes."""
    import torch

    import tiermem

    torch.set_num_threads(1)
    torch.manual_seed(1)
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None  # an interrupt that came while something was finalized
    model, plain = network(), network()
    x = torch.randn(4, 32)

    def loss_of(net: Any) -> Any:
        return net(x).square().mean()

    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        config = tiermem.Config(
            device="cpu", host_memory=case.budget, swap_dirs=[directory], param_dtype="float32", update=case.update
        )
        with tiermem.offload(model, config, coalesce=0) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)

            def step() -> Any:
                if case.together:
                    loss = runtime.forward_backward([None] * 3, lambda _: loss_of(model))[0]
                else:
                    loss = loss_of(model)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            step(), step()
            for number in itertools.count(options.first, options.stride):
                if not interrupt(Interrupting(number), step):
                    return 0
                optimizer.zero_grad()
                for parameter, values in zip(model.parameters(), plain.parameters(), strict=True):
                    values.data.copy_(runtime.parameter(parameter))
                if not torch.equal(step(), loss_of(plain).detach()):
                    print("another loss than plain PyTorch's")
                    return 1
    return 0


def interrupt(interrupting: Interrupting, step: Callable[[], Any]) -> bool:
    """Take a step that is interrupted; False if it ends before that. The error is kept until the next one."""
    try:
        sys.settrace(interrupting)
        step()
    except KeyboardInterrupt as error:
        sys.last_value, sys.last_traceback = error, error.__traceback__
    finally:
        sys.settrace(None)
    return interrupting.left <= 0


def network() -> Any:
    """A few units in a row, so that their graph can be cut between any two (`tiermem/zero3/cuts.py`).

    Then micro-batches together take turns on the caller's thread, which is the one that is interrupted.
    """
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3))
            self.outer = nn.Linear(32, 4)

        def forward(self, x: Any) -> Any:
            x = self.inner(x)
            for layer in self.layers:
                x = layer(x)
            return self.outer(x)

    return Net()


if __name__ == "__main__":
    sys.exit(main())
