"""The models that are trained, the batches they see, and how a contender reports.

Owns the shapes, the data and the timing loop, so that contenders differ in nothing but how they hold and update the
model. Does not know the contenders, nor tiermem. Guarantees that the same workload, seed and step give the same batch.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import drive_bytes, peak_resident_bytes, thread_seconds
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

_BEGAN = time.monotonic()  # of this process, nearly
LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


@dataclass(frozen=True, slots=True)
class Workload:
    """A Llama and a batch: 12 width^2 parameters a layer, as in a GPT, and 2 vocabulary width for both embeddings."""

    layers: int
    width: int
    mlp_width: int
    heads: int
    vocabulary: int
    rows: int
    length: int

    def config(self) -> LlamaConfig:
        """Return the model's shape as transformers writes it."""
        return LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.mlp_width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            vocab_size=self.vocabulary,
            tie_word_embeddings=False,
            use_cache=False,
        )

    def model(self, device: torch.device | None = None) -> LlamaForCausalLM:
        """Return the unmodified model of transformers, in float32; its weights are drawn on `device`, if given."""
        with torch.device(device) if device is not None else nullcontext():
            return LlamaForCausalLM(self.config())

    def tokens(self, *, seed: int, step: int) -> torch.Tensor:
        """Return the batch of a step: int64 of shape [rows, length]."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        return torch.randint(self.vocabulary, (self.rows, self.length), generator=generator)


WORKLOADS = {
    "quick": Workload(layers=3, width=128, mlp_width=344, heads=4, vocabulary=512, rows=2, length=16),
    # The smallest for which DeepSpeed swaps anything: it keeps small parameters, and their states, in memory.
    "small": Workload(layers=4, width=512, mlp_width=1376, heads=8, vocabulary=512, rows=2, length=32),
    "compute-bound": Workload(12, 1024, 2728, heads=16, vocabulary=8192, rows=2, length=256),
    # Four times the tokens: where a core does 512 of them in a second, the drive needs longer than the computation.
    "more-tokens": Workload(12, 1024, 2728, heads=16, vocabulary=8192, rows=8, length=256),
    "io-bound": Workload(10, 2048, 5464, heads=16, vocabulary=8192, rows=1, length=64),
    # An eighth of its tokens: eight micro-batches of these are a step of the line above.
    "io-bound-eighth": Workload(10, 2048, 5464, heads=16, vocabulary=8192, rows=1, length=8),
    # For GPUs: 0.5, 1.4 and 6.7 billion parameters, 9, 22 and 108 GB of training state.
    "gpu-small": Workload(8, 2048, 5504, heads=16, vocabulary=32000, rows=8, length=1024),
    "gpu": Workload(24, 2048, 5504, heads=16, vocabulary=32000, rows=8, length=1024),
    "gpu-large": Workload(32, 4096, 11008, heads=32, vocabulary=32000, rows=4, length=1024),
}


def draw(module: nn.Module, device: torch.device) -> None:
    """Give a module's own parameters values as Llama's are, drawn on the device: matrices N(0, 0.02), all others 1."""
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, device=device).mul_(0.02))
            else:
                parameter.fill_(1.0)


@dataclass(frozen=True, slots=True)
class Job:
    """What a contender is told by its command line."""

    workload: str
    warm_up: int
    steps: int
    seed: int
    directory: Path
    settings: dict[str, Any]
    in_turns: bool = False
    seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a contender answers, as one JSON object in the last line of its stdout."""

    seconds: list[float]
    losses: list[float]
    drive_bytes_read: list[int]
    drive_bytes_written: list[int]
    parameters: int
    baseline_rss_bytes: int
    peak_rss_bytes: int
    phases: dict[str, list[float]]  # seconds of each step's parts
    set_up_seconds: float  # from the end of the imports to the first step
    thread_seconds: dict[str, float]  # of processor time in a step, by what the thread does (`common.thread_seconds`)
    details: dict[str, Any]


class Phases:
    """How long the parts of each step took."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a part of the step."""
        started = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)


def finish(device: torch.device) -> None:
    """Wait for what the device was asked for: a step is over when its work is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_details(device: torch.device) -> dict[str, Any]:
    """Return what the device's memory was used for; nothing on a processor."""
    if device.type != "cuda":
        return {}
    return {
        "peak_device_bytes": torch.cuda.max_memory_allocated(device),
        "peak_device_bytes_reserved": torch.cuda.max_memory_reserved(device),
    }


def read_job() -> Job:
    """Return the job on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--settings", type=json.loads, default={}, help="a JSON object")
    parser.add_argument("--in-turns", action="store_true", help="do a step for each line on stdin, until it ends")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of this process, after which no step begins")
    return Job(**vars(parser.parse_args()))


def in_turns() -> Iterator[int]:
    """Count the lines of stdin, as they come; say after each that its step is over."""
    for number, _ in enumerate(sys.stdin):
        yield number
        print("done", flush=True)


def measure(
    job: Job,
    step: Callable[[torch.Tensor], float],
    *,
    parameters: int,
    baseline: int,
    details: Callable[[], dict[str, Any]] = dict,
    phases: Phases | None = None,
) -> None:
    """Run `step` (tokens to loss) for warm-up and measured steps; print the outcome. `details` is asked at the end.

    When the job's time is up fewer steps are measured, but one.
    """
    workload = WORKLOADS[job.workload]
    seconds, losses, read, written = [], [], [], []
    first = job.warm_up if not job.in_turns else 1
    spent: dict[str, float] = {}
    set_up = time.monotonic() - _BEGAN
    for number in in_turns() if job.in_turns else range(job.warm_up + job.steps):
        if number == first:
            spent = thread_seconds()
        if number > first and time.monotonic() - _BEGAN > job.seconds:
            break
        tokens = workload.tokens(seed=job.seed, step=number)
        read_before, written_before = drive_bytes()
        started = time.perf_counter()
        losses.append(step(tokens))
        seconds.append(time.perf_counter() - started)
        read_after, written_after = drive_bytes()
        read.append(read_after - read_before)
        written.append(written_after - written_before)
    spent = {kind: total - spent.get(kind, 0.0) for kind, total in thread_seconds().items()}
    outcome = Outcome(
        seconds=seconds[first:],
        losses=losses,
        drive_bytes_read=read[first:],
        drive_bytes_written=written[first:],
        parameters=parameters,
        baseline_rss_bytes=baseline,
        peak_rss_bytes=peak_resident_bytes(),
        phases={name: parts[first:] for name, parts in phases.seconds.items()} if phases else {},
        set_up_seconds=set_up,
        thread_seconds={kind: total / max(1, len(seconds) - first) for kind, total in spent.items()},
        details=details(),
    )
    print(json.dumps(asdict(outcome)), flush=True)
