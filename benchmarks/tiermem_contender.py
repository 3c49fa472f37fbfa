"""tiermem, with the fields of `tiermem.Config` given as settings.

Three settings more: `accumulate`, micro-batches in a step (the batch and shifts of it); `vertical=yes`: all of them go
through a unit before the next unit; `commit`: make every step durable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from common import resident_bytes
from workloads import BETAS, LEARNING_RATE, WEIGHT_DECAY, WORKLOADS, device_details, finish, measure, read_job

import tiermem
from tiermem.cli.train import SWITCH_SECONDS


def one_by_one(
    micro_batches: Sequence[torch.Tensor], loss_of: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Ordinary accumulation; the losses."""
    losses = []
    for micro_batch in micro_batches:
        losses.append(loss_of(micro_batch))
        losses[-1].backward()
    return losses


def main() -> None:
    """Train as the command line says; print the outcome."""
    job = read_job()
    sys.setswitchinterval(SWITCH_SECONDS)
    baseline = resident_bytes()
    torch.manual_seed(job.seed)
    settings = {"param_dtype": "bfloat16", **job.settings}
    count, vertical = int(settings.pop("accumulate", 1)), settings.pop("vertical", "no") == "yes"
    commit = settings.pop("commit", False)
    config = tiermem.Config(**settings, swap_dirs=[str(job.directory)])
    with tiermem.deferred_init():
        model = WORKLOADS[job.workload].model()
    stalls, read, written = [], [], []
    edges: dict[str, list[int]] = {}
    with tiermem.offload(model, config) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)

        device = next(model.parameters()).device

        def loss_of(tokens: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss / count
            return loss

        def step(tokens: torch.Tensor) -> float:
            batch = tokens.to(device)
            micro_batches = [batch.roll(shift, 1) for shift in range(count)]
            bring = runtime.forward_backward if vertical else one_by_one
            losses = bring(micro_batches, loss_of)
            optimizer.step()
            optimizer.zero_grad()
            if commit:
                runtime.commit()
            last = runtime.statistics().last
            if last is None:
                raise RuntimeError("the step was not counted")
            stalls.append(last.stall_seconds)
            read.append(last.bytes_read)
            written.append(last.bytes_written)
            for edge in last.edges:
                edges.setdefault(edge.name, []).append(edge.nbytes)
            finish(device)
            return sum(float(loss.detach()) for loss in losses)

        parameters = sum(parameter.numel() for parameter in model.parameters())
        measure(
            job,
            step,
            parameters=parameters,
            baseline=baseline,
            details=lambda: {
                "stall_seconds": stalls,
                "bytes_read": read,
                "bytes_written": written,
                "edges": edges,
                **device_details(device),
            },
        )


if __name__ == "__main__":
    main()
