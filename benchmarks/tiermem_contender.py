"""tiermem, with the fields of `tiermem.Config` given as settings.

Four settings more: `accumulate`, micro-batches in a step (the batch and shifts of it); `vertical=yes`: all of them go
through a unit before the next unit; `commit`: make every step durable; `trace`: a file for the timeline of the run.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from common import resident_bytes
from workloads import (
    BETAS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    WORKLOADS,
    Phases,
    device_details,
    draw,
    finish,
    measure,
    read_job,
)

import tiermem
from tiermem.cli.train import SWITCH_SECONDS


class Account:
    """What the runtime says of each step."""

    def __init__(self, runtime: tiermem.Runtime, trace: str | None) -> None:
        """`trace`: where the timeline of the run is to be written, if anywhere."""
        self._runtime = runtime
        self._trace = trace
        self._steps: dict[str, list[float]] = {"stall_seconds": [], "bytes_read": [], "bytes_written": []}
        self._edges: dict[str, list[int]] = {}

    def note(self) -> None:
        """Write down the step that is just over."""
        last = self._runtime.statistics().last
        if last is None:
            raise RuntimeError("the step was not counted")
        for name, values in self._steps.items():
            values.append(getattr(last, name))
        for edge in last.edges:
            self._edges.setdefault(edge.name, []).append(edge.nbytes)

    def details(self) -> dict[str, Any]:
        """Return all of it, how many steps were updated early and kept, and why the computation waited."""
        overlap = self._runtime.timeline(self._trace) if self._trace else self._runtime.timeline()
        total = self._runtime.statistics().total
        early = {"speculated": total.speculated, "confirmed": total.confirmed}
        return {**self._steps, **early, "edges": self._edges, "overlap": overlap.to_dict()}


def main() -> None:
    """Train as the command line says; print the outcome."""
    job = read_job()
    sys.setswitchinterval(SWITCH_SECONDS)
    baseline = resident_bytes()
    torch.manual_seed(job.seed)
    settings: dict[str, Any] = {"param_dtype": "bfloat16", **job.settings}
    if "queue_depth" in settings:
        settings["queue_depth"] = int(settings["queue_depth"])
    count, vertical = int(settings.pop("accumulate", 1)), settings.pop("vertical", "no") == "yes"
    commit, trace = settings.pop("commit", False), settings.pop("trace", None)
    config = tiermem.Config(**settings, swap_dirs=[str(job.directory)])
    with tiermem.deferred_init():
        model = WORKLOADS[job.workload].model()
    # As plain PyTorch's are: where there is a GPU, a processor takes many times as long to draw them.
    init = partial(draw, device=torch.device("cuda")) if str(config.device).startswith("cuda") else None
    with tiermem.offload(model, config, init=init) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
        device = next(model.parameters()).device
        account, phases = Account(runtime, trace), Phases()

        def loss_of(tokens: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss / count
            return loss

        def one_by_one(micro_batches: list[torch.Tensor]) -> list[torch.Tensor]:
            """Ordinary accumulation; the losses."""
            losses = []
            for micro_batch in micro_batches:
                with phases("forward"):
                    losses.append(loss_of(micro_batch))
                with phases("backward"):
                    losses[-1].backward()
            return losses

        def step(tokens: torch.Tensor) -> float:
            batch = tokens.to(device)
            micro_batches = [batch.roll(shift, 1) for shift in range(count)]
            losses = runtime.forward_backward(micro_batches, loss_of) if vertical else one_by_one(micro_batches)
            with phases("update"):
                optimizer.step()
                optimizer.zero_grad()
                if commit:
                    runtime.commit()
            account.note()
            finish(device)
            return sum(float(loss.detach()) for loss in losses)

        measure(
            job,
            step,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            baseline=baseline,
            details=lambda: {**account.details(), **device_details(device)},
            phases=phases if count == 1 else None,
        )


if __name__ == "__main__":
    main()
