"""tiermem, with the fields of `tiermem.Config` given as settings."""

from __future__ import annotations

import torch
from common import resident_bytes
from workloads import BETAS, LEARNING_RATE, WEIGHT_DECAY, WORKLOADS, device_details, finish, measure, read_job

import tiermem


def main() -> None:
    """Train as the command line says; print the outcome."""
    job = read_job()
    baseline = resident_bytes()
    torch.manual_seed(job.seed)
    config = tiermem.Config(**{"param_dtype": "bfloat16", **job.settings}, swap_dirs=[str(job.directory)])
    with tiermem.deferred_init():
        model = WORKLOADS[job.workload].model()
    stalls, read, written = [], [], []
    edges: dict[str, list[int]] = {}
    with tiermem.offload(model, config) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)

        device = next(model.parameters()).device

        def step(tokens: torch.Tensor) -> float:
            batch = tokens.to(device)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            last = runtime.statistics().last
            if last is None:
                raise RuntimeError("the step was not counted")
            stalls.append(last.stall_seconds)
            read.append(last.bytes_read)
            written.append(last.bytes_written)
            for edge in last.edges:
                edges.setdefault(edge.name, []).append(edge.nbytes)
            finish(device)
            return float(loss.detach())

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
