"""Small units by themselves, and coalesced (`offload(coalesce=)`): what a step costs, in one process and in two ranks.

Owns two models without large layers: a tower of equal linear layers, and the convolutions and norms of a ResNet-50,
each module of which would be a unit. Each contender trains once a round in fresh processes, in turns; read the ratios
within a round. "cached": the budget holds everything. "paged": a quarter of the state. Losses must be the same.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import arguments_of, on_ranks, report
from torch import nn

import tiermem
from tiermem.zero3.coalesce import small_nbytes
from tiermem.zero3.units import find_units

STATE_BYTES = 16  # of a float32 parameter: itself, its gradient, two moments
# A seven-hundredth of it is what "auto" lets units of the paged tower take together.
LEAST_BUDGET = 2 << 20
NONE = 0


@dataclass(frozen=True)
class Case:
    """What is trained: `model` as `build` names it, over `ranks`, in memory or not."""

    model: str
    ranks: int
    paged: bool

    def __str__(self) -> str:
        return f"{self.model}, {self.ranks} rank{'s' * (self.ranks > 1)}, {'paged' if self.paged else 'cached'}"


class Bottleneck(nn.Module):
    """A residual block of a ResNet-50 (He et al., "Deep residual learning for image recognition", 2015)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.shrink, self.norm1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.look, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.grow, self.norm3 = nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)
        self.past: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.past = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, before, height, width] to [batch, 4 width, height / stride, width / stride]."""
        y = torch.relu(self.norm1(self.shrink(x)))
        y = torch.relu(self.norm2(self.look(y)))
        return torch.relu(self.norm3(self.grow(y)) + self.past(x))


def build(model: str) -> tuple[nn.Module, torch.Tensor]:
    """The model of that name, such as "tower 32x128" or "resnet 3-4-6-3", and a batch for it."""
    kind, shape = model.split()
    if kind == "tower":
        layers, width = map(int, shape.split("x"))
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))), torch.randn(4, width)
    depths = [int(depth) for depth in shape.split("-")]
    modules: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64)]
    before = 64
    for stage, depth in enumerate(depths):
        for index in range(depth):
            modules.append(Bottleneck(before, 64 << stage, 2 if stage and not index else 1))
            before = 256 << stage
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)]
    return nn.Sequential(*modules, *head), torch.randn(2, 3, 32, 32)


def train(rank: int, case: Case, coalesce: int | str, steps: int, directory: str) -> None:
    """One rank: train, and write down how long each step took, what was read and what was reserved at most."""
    torch.set_num_threads(1)
    if case.ranks > 1:
        store = f"file://{directory}/store"
        patience = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=case.ranks, timeout=patience)
    torch.manual_seed(0)
    model, batch = build(case.model)
    swap = Path(directory, "swap")
    swap.mkdir(exist_ok=True)
    numel = sum(parameter.numel() for parameter in model.parameters())
    budget = max(LEAST_BUDGET, numel * STATE_BYTES // 4 // case.ranks) if case.paged else 1 << 30
    small = small_nbytes(coalesce, budget)
    units = len(find_units(model, small=small, dtype=torch.float32).units)
    settings: dict[str, Any] = {"param_dtype": "float32", "update": "forward", "commits": False, "host_memory": budget}
    config = tiermem.Config(device="cpu", swap_dirs=[str(swap)], **settings)
    seconds, losses = [], []
    with tiermem.offload(model, config, coalesce=small) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-4)
        for _ in range(steps + 3):
            started = time.perf_counter()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - started)
            losses.append(float(loss.detach()))
        known = runtime.statistics()
        reserved = next(tier.high_water for tier in known.tiers if tier.name == "HOST")
        read = 0 if known.last is None else known.last.bytes_read
    # The first steps are recorded, and planned for.
    found = {"units": units, "seconds": seconds[3:], "losses": losses, "reserved": reserved, "read": read}
    Path(directory, f"{rank}.json").write_text(json.dumps(found))


def measure(case: Case, coalesce: int | str, steps: int) -> dict[str, Any]:
    """What the first rank found, with the median seconds of a step. Raises RuntimeError if one hangs."""
    found = on_ranks(train, case.ranks, case, coalesce, steps, seconds=100)[0]
    return found | {"seconds": statistics.median(found["seconds"])}


def rows(raw: list[dict[str, Any]], cases: list[Case], sizes: list[int | str]) -> Iterator[str]:
    """The table: medians of rounds, and of the ratios within them."""
    titles = ["model", "coalesce", "units", "ms a step", "to none", "MB read a step", "reserved at most, MB"]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for case in cases:
        runs = {size: [run for run in raw if run["case"] == asdict(case) and run["coalesce"] == size] for size in sizes}
        for size, found in runs.items():
            pairs = zip(found, runs[NONE], strict=True)
            ratio = statistics.median(here["seconds"] / alone["seconds"] for here, alone in pairs)
            milliseconds = statistics.median(each["seconds"] for each in found) * 1e3
            moved = f"{found[0]['read'] / 1e6:.1f} | {max(each['reserved'] for each in found) / 1e6:.1f}"
            yield f"| {case} | {size or 'none'} | {found[0]['units']} | {milliseconds:.1f} | {ratio:.2f} | {moved} |"


def main() -> None:
    """Measure in rounds, print, and write a result file unless it is quick."""
    parser = arguments_of(__doc__, quick="one round of a tiny tower", swaps=False)
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    given = parser.parse_args()
    rounds, steps = (1, 2) if given.quick else (given.rounds, 5)
    models = ["tower 8x16"] if given.quick else ["tower 64x128", "resnet 3-4-6-3"]
    sizes: list[int | str] = [NONE, "auto"] if given.quick else [NONE, "64KiB", "auto"]
    modes = (False,) if given.quick else (False, True)
    cases = [Case(model, ranks, paged) for model in models for ranks in (1, 2) for paged in modes]
    raw: list[dict[str, Any]] = []
    for turn in range(rounds):
        for case in cases:
            raw += [
                {"case": asdict(case), "coalesce": size, "round": turn, **measure(case, size, steps)}
                for size in (sizes if turn % 2 == 0 else sizes[::-1])
            ]
    for case in cases:
        losses = {tuple(run["losses"]) for run in raw if run["case"] == asdict(case)}
        if len(losses) != 1:
            raise SystemExit(f"{case}: the losses differ")
    note = f"gloo, float32, {rounds} rounds of {steps} steps, medians; the same losses whatever is coalesced."
    body = "\n".join([note, "", *rows(raw, cases, sizes)])
    report("small_units", ["torch"], body, {"runs": raw}, given)


if __name__ == "__main__":
    main()
