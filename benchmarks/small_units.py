"""Small units over ranks: each gathered by itself, or several together, which costs memory and saves messages.

Two processes of this machine (gloo) train towers of equal linear layers, divided into units of one layer, of several,
and of all of them (which then stay gathered for the whole of forward, and of backward). Each contender runs once a
round in fresh processes; read the ratios within a round. Writes the medians and the raw numbers as a result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import describe_surroundings, on_ranks, write_result
from torch import nn

import tiermem

RANKS = 2


class Group(nn.Sequential):
    """Layers that are one unit."""


def tower(layers: int, width: int, together: int) -> nn.Module:
    """`layers` linear layers, `together` of them in each group."""
    groups = [Group(*(nn.Linear(width, width) for _ in range(together))) for _ in range(layers // together)]
    return nn.Sequential(*groups)


def train(rank: int, shape: tuple[int, int, int], steps: int, directory: str) -> None:
    """One rank: train, and write down how long each step took and what was reserved at most."""
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    layers, width, together = shape
    torch.manual_seed(0)
    model = tower(layers, width, together)
    swap = Path(directory, "swap")
    swap.mkdir(exist_ok=True)
    settings: dict[str, Any] = {"param_dtype": "float32", "update": "forward", "commits": False}
    config = tiermem.Config(device="cpu", host_memory="1GiB", swap_dirs=[str(swap)], **settings)
    x = torch.randn(4, width)
    seconds = []
    with tiermem.offload(model, config, units=["Group"]) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-4)
        for _ in range(steps + 2):
            started = time.perf_counter()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - started)
        reserved = next(tier.high_water for tier in runtime.statistics().tiers if tier.name == "HOST")
    found = {"seconds": seconds[2:], "reserved": reserved}  # the first two are recorded, and planned for
    Path(directory, f"{rank}.json").write_text(json.dumps(found))


def measure(shape: tuple[int, int, int], steps: int) -> dict[str, Any]:
    """Median seconds of a step, and bytes reserved at most, on the first rank. Raises RuntimeError if one hangs."""
    found = on_ranks(train, RANKS, shape, steps, seconds=100)[0]
    return {"seconds": statistics.median(found["seconds"]), "reserved": found["reserved"]}


def main() -> None:
    """Measure in rounds, print, and write a result file unless it is quick."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of a tiny tower, no result file")
    given = parser.parse_args()
    layers, rounds, steps = (8, 1, 2) if given.quick else (32, 3, 5)
    widths = (16,) if given.quick else (16, 128, 1024)
    groups = (1, 4, layers)
    raw: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for width in widths:
            for together in groups:
                raw.setdefault(f"{width} {together}", []).append(measure((layers, width, together), steps))
    rows = ["| bytes of a layer | layers in a unit | ms a step | to one layer a unit | bytes reserved at most |"]
    rows.append("|---" * 5 + "|")
    for width in widths:
        for together in groups:
            found, alone = raw[f"{width} {together}"], raw[f"{width} 1"]
            ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(found, alone, strict=True))
            milliseconds = statistics.median(each["seconds"] for each in found) * 1e3
            reserved = max(each["reserved"] for each in found)
            size = (width + 1) * width * 4
            rows.append(f"| {size:,} | {together} | {milliseconds:.1f} | {ratio:.2f} | {reserved:,} |")
    table = "\n".join(rows)
    print(table)
    if not given.quick:
        surroundings = describe_surroundings(["torch"])
        note = f"{layers} layers, {RANKS} ranks, gloo, float32, {rounds} rounds of {steps} steps, medians."
        print(write_result("small_units", surroundings, f"{note}\n\n{table}", raw))


if __name__ == "__main__":
    main()
