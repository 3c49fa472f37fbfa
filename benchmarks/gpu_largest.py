"""A model many times larger than device memory, trained in full: what it takes, and what a step takes.

Owns one run: a Llama whose weights are drawn on the device, its budgets, one batch that it sees in every step, so that
a falling loss shows that it learns. Does not compare (`gpu_step.py` does). Guarantees that what it reports as state is
what the swap files reserve, that no step begins after its time, and that there is a result from the first step on.
`--simulated`: a tiny model, and no GPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, describe_surroundings, peak_resident_bytes, write_result
from torch import nn
from train_step import PACKAGES
from workloads import BETAS, LEARNING_RATE, WEIGHT_DECAY, WORKLOADS, Workload, device_details, draw, finish

import tiermem
from tiermem.cli.train import SWITCH_SECONDS

THEME = "gpu_largest"
WARM_UP = 2  # the first updates nothing in its forward, the second moves twice what later ones do
# bf16 parameters and gradients, the other half of fp32 masters, fp32 moments: what would lie on a device without us.
_STATE_ITEMSIZE = 14


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; print the table, write the result; return the exit code."""
    began = time.monotonic()
    options = parse(arguments)
    device = torch.device("cpu" if options.simulated else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; --simulated shows whether this script runs", file=sys.stderr)
        return 2
    if options.trace is not None:
        options.trace.parent.mkdir(parents=True, exist_ok=True)  # now: it is written behind the last step
    sys.setswitchinterval(SWITCH_SECONDS)
    torch.manual_seed(0)
    workload = WORKLOADS["quick" if options.simulated else options.workload]
    config = tiermem.Config(
        device="simulated:bandwidth=2GB/s" if options.simulated else "cuda",
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        param_dtype="bfloat16",
        moments=options.moments,
        update=options.update,
        commits=False,
        swap_dirs=[str(options.directory)],
    )
    with tiermem.deferred_init():
        model = workload.model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with tiermem.offload(model, config, init=lambda module: draw(module, device)) as runtime:
        known = {
            "workload": options.workload,
            "parameters": parameters,
            "tiers": {tier.name: tier.budget for tier in runtime.statistics().tiers},
            "moments": options.moments,
            "update": options.update,
            "tokens": workload.rows * workload.length,
            "ready_seconds": time.monotonic() - began,
        }
        print(f"ready after {known['ready_seconds']:.0f} s", file=sys.stderr, flush=True)
        raw: dict[str, Any] = {}
        for taken in train(runtime, model, workload, options, began):
            raw = {**known, **taken, "peak_rss_bytes": peak_resident_bytes(), **device_details(device)}
            report(raw, options)
        if options.trace is not None:
            runtime.timeline(options.trace)
    print(table(raw))
    losses = raw["losses"]
    return 0 if all(map(math.isfinite, losses)) and losses[-1] < losses[0] else 1


def report(raw: dict[str, Any], options: argparse.Namespace) -> None:
    """Say what the last step was, and write the result anew: whoever started this may end it."""
    number, last, loss = len(raw["losses"]), raw["seconds"][-1], raw["losses"][-1]
    print(f"step {number}: loss {loss:.4f}, {last:.2f} s", file=sys.stderr, flush=True)
    if not options.simulated:
        body = f"- GPU: {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}\n\n{table(raw)}"
        write_result(THEME, describe_surroundings(PACKAGES), body, raw, options.results)


def train(
    runtime: tiermem.Runtime, model: nn.Module, workload: Workload, options: argparse.Namespace, began: float
) -> Iterator[dict[str, Any]]:
    """Train on one batch; after every step the seconds, the loss and the bytes over each edge of all so far."""
    optimizer = tiermem.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
    device = next(model.parameters()).device
    tokens = workload.tokens(seed=0, step=0).to(device)
    seconds: list[float] = []
    losses: list[float] = []
    edges: list[dict[str, int]] = []
    while len(seconds) < WARM_UP + options.steps and (not seconds or time.monotonic() - began < options.seconds):
        started = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        finish(device)
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss.detach()))
        last = runtime.statistics().last
        edges.append({edge.name: edge.nbytes for edge in last.edges} if last is not None else {})
        yield {"seconds": seconds, "losses": losses, "edges": edges}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", help="a tiny model, no GPU, no result file")
    parser.add_argument("--workload", choices=WORKLOADS, default="gpu-large")
    parser.add_argument("--device-memory", default="1300MiB", help="of the GPU, activations aside")
    parser.add_argument("--host-memory", default="40GiB")
    parser.add_argument("--moments", default="int8", choices=("float32", "int8"))
    # Nothing is clipped here: with "backward" an update is begun there, for good, and no gradient waits for the others.
    parser.add_argument("--update", default="backward", choices=("auto", "backward", "forward", "step"))
    parser.add_argument("--steps", type=int, default=4, help="behind two that are not counted")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the whole run, after which no step begins")
    parser.add_argument("--directory", type=Path, default=Path(), help="where swap files go (default: here)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result goes")
    parser.add_argument("--trace", type=Path, help="where the timeline of the last steps goes")
    return parser.parse_args(arguments)


def table(raw: dict[str, Any]) -> str:
    """What was measured, as a Markdown table; medians without the first two steps."""
    parameters, tiers = raw["parameters"], raw["tiers"]
    measured = raw["seconds"][WARM_UP:] or raw["seconds"]
    step = statistics.median(measured)
    edges = raw["edges"][WARM_UP:] or raw["edges"]
    names = sorted({name for each in edges for name in each})
    moved = {name: statistics.median(each.get(name, 0) for each in edges) for name in names}
    whole, device = parameters * _STATE_ITEMSIZE, tiers["DEVICE"]
    rows = [
        ("parameters, all of them trained", f"{parameters:,}"),
        ("parameters, gradients and states in swap files", f"{tiers['SWAP'] / 1e9:.1f} GB, moments {raw['moments']}"),
        ("the same with exact moments", f"{whole / 1e9:.1f} GB"),
        ("device budget", f"{device / 1e9:.2f} GB, a {tiers['SWAP'] / device:.0f}th ({whole / device:.0f}th)"),
        ("host budget", f"{tiers['HOST'] / 1e9:.1f} GB"),
        ("ready to train after", f"{raw['ready_seconds']:.0f} s"),
        ("update", raw["update"]),
        ("s/step", f"{step:.2f} ({min(measured):.2f} to {max(measured):.2f}, {len(measured)} steps)"),
        ("tokens/s", f"{raw['tokens'] / step:.0f}"),
        ("GB a step", ", ".join(f"{name} {nbytes / 1e9:.1f}" for name, nbytes in moved.items())),
        ("loss, one batch again and again", ", ".join(f"{loss:.3f}" for loss in raw["losses"])),
        ("peak device, with activations", f"{raw.get('peak_device_bytes', 0) / 1e9:.1f} GB"),
        ("peak host", f"{raw['peak_rss_bytes'] / 1e9:.1f} GB"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


if __name__ == "__main__":
    sys.exit(main())
