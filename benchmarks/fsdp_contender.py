"""PyTorch's FSDP2 on one rank with CPUOffloadPolicy: parameters, gradients and the update in host memory.

Masters are fp32, forward and backward are bf16 (MixedPrecisionPolicy), as for the others. Settings: `device`: "cuda",
or "cpu" to see that this script runs.
"""

from __future__ import annotations

import tempfile

import torch
from common import resident_bytes
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from workloads import BETAS, LEARNING_RATE, WEIGHT_DECAY, WORKLOADS, device_details, finish, measure, read_job


def main() -> None:
    """Train as the command line says; print the outcome."""
    job = read_job()
    baseline = resident_bytes()
    torch.manual_seed(job.seed)
    device = torch.device(job.settings.get("device", "cuda"))
    with tempfile.NamedTemporaryFile() as meeting:
        distributed.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"file://{meeting.name}",
            rank=0,
            world_size=1,
        )
        model = WORKLOADS[job.workload].model(device).cpu()  # a processor is slow at random numbers
        settings = {
            "mesh": init_device_mesh(device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
        }
        for layer in model.model.layers:
            fully_shard(layer, **settings)
        fully_shard(model, **settings)
        for buffer_owner in model.modules():
            for name, buffer in buffer_owner.named_buffers(recurse=False):
                setattr(buffer_owner, name, buffer.to(device))
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )

        def step(tokens: torch.Tensor) -> float:
            batch = tokens.to(device)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            finish(device)
            return float(loss.detach())

        count = sum(parameter.numel() for parameter in model.parameters())
        measure(job, step, parameters=count, baseline=baseline, details=lambda: device_details(device))
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
