"""Plain PyTorch with everything in memory: bf16 parameters, fp32 masters and moments, fused AdamW. The ideal.

Of fp32 parameters, which are their own masters, if the settings ask for these.
"""

from __future__ import annotations

import torch
from common import resident_bytes
from workloads import BETAS, LEARNING_RATE, WEIGHT_DECAY, WORKLOADS, Phases, device_details, finish, measure, read_job


def main() -> None:
    """Train as the command line says; print the outcome."""
    job = read_job()
    baseline = resident_bytes()
    torch.manual_seed(job.seed)
    device = torch.device(job.settings.get("device", "cpu"))
    dtype = getattr(torch, job.settings.get("param_dtype", "bfloat16"))
    model = WORKLOADS[job.workload].model(device).to(device, dtype)
    parameters = list(model.parameters())
    masters = parameters if dtype == torch.float32 else [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)

    phases = Phases()

    def step(tokens: torch.Tensor) -> float:
        batch = tokens.to(device)
        with phases("forward"):
            loss = model(input_ids=batch, labels=batch).loss
        with phases("backward"):
            loss.backward()
        with phases("update"):
            pairs = [] if masters is parameters else list(zip(masters, parameters, strict=True))
            for master, parameter in pairs:
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for master, parameter in pairs:
                    parameter.copy_(master)
            finish(device)
        return float(loss.detach())

    count = sum(parameter.numel() for parameter in parameters)
    measure(job, step, parameters=count, baseline=baseline, details=lambda: device_details(device), phases=phases)


if __name__ == "__main__":
    main()
