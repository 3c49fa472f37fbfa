"""DeepSpeed ZeRO-Infinity: stage 3, parameters and optimizer states on NVMe, read and written in a pipeline.

Run by the interpreter of an environment that has deepspeed (benchmarks/README.md says how to make one); tiermem is not
needed there. Its operators are compiled on first use. Settings: `device`: "cpu" (the default) or "cuda"; `param_dtype`:
"bfloat16" (the default) or "float32"; `zero_optimization` and `aio`, whose entries replace those below.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from common import resident_bytes
from workloads import (
    BETAS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    WORKLOADS,
    Phases,
    Workload,
    device_details,
    finish,
    measure,
    read_job,
)

JOB = read_job()
DEVICE = torch.device(JOB.settings.get("device", "cpu"))
os.environ.setdefault("DS_ACCELERATOR", DEVICE.type)  # read when deepspeed is imported
if DEVICE.type == "cuda":  # for its compiler; it does not understand "9.0a", say
    os.environ["TORCH_CUDA_ARCH_LIST"] = ".".join(map(str, torch.cuda.get_device_capability(DEVICE)))

import deepspeed  # noqa: E402

# Fewer, and its optimizer stops with an assertion: four tensors a group, three groups in flight.
OPTIMIZER_BUFFERS = 12
# Elements of a group. Each buffer holds the largest one in float32; with the default of a billion there is one group,
# and 537 M parameters take 26 GB of buffers.
SUB_GROUP_SIZE = 20_000_000


def configuration(workload: Workload, directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration; `settings` replaces entries of "zero_optimization" and "aio"."""
    pinned = DEVICE.type == "cuda"
    largest_parameter = workload.width * max(workload.mlp_width, workload.vocabulary)
    zero = {
        "stage": 3,
        "sub_group_size": SUB_GROUP_SIZE,
        "offload_param": {
            "device": "nvme",
            "nvme_path": str(directory),
            "buffer_count": 5,
            "buffer_size": largest_parameter,
            "pin_memory": pinned,
        },
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": str(directory),
            "buffer_count": OPTIMIZER_BUFFERS,
            "pipeline_read": True,
            "pipeline_write": True,
            "pin_memory": pinned,
        },
        **settings.get("zero_optimization", {}),
    }
    aio = {"block_size": 8 << 20, "queue_depth": 16, "single_submit": False, "overlap_events": True}
    return {
        "train_micro_batch_size_per_gpu": workload.rows,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": dtype_of(settings) is torch.bfloat16},
        "zero_optimization": zero,
        "aio": {**aio, **settings.get("aio", {})},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY},
        },
    }


def dtype_of(settings: dict[str, Any]) -> torch.dtype:
    """Return what forward and backward compute in."""
    dtype: torch.dtype = getattr(torch, settings.get("param_dtype", "bfloat16"))
    return dtype


def become_the_only_rank() -> None:
    """Set what a launcher would: one process, rank 0, a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def main() -> None:
    """Train as the command line says; print the outcome."""
    job = JOB
    workload = WORKLOADS[job.workload]
    baseline = resident_bytes()
    become_the_only_rank()
    config = configuration(workload, job.directory, job.settings)
    with redirect_stdout(sys.stderr):
        deepspeed.init_distributed(dist_backend="nccl" if DEVICE.type == "cuda" else "gloo", verbose=False)
        torch.manual_seed(job.seed)
        with deepspeed.zero.Init(config_dict_or_path=config):  # its `dtype=` is not obeyed on a processor
            model = workload.model()
        if (found := {parameter.dtype for parameter in model.parameters()}) != {dtype_of(job.settings)}:
            raise RuntimeError(f"parameters should be {dtype_of(job.settings)}, DeepSpeed made them {found}")
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    phases = Phases()

    def step(tokens: torch.Tensor) -> float:
        batch = tokens.to(DEVICE)
        with redirect_stdout(sys.stderr):
            with phases("forward"):
                loss = engine(input_ids=batch, labels=batch).loss
            with phases("backward"):
                engine.backward(loss)
            with phases("update"):
                engine.step()
            finish(DEVICE)
        return float(loss.detach())

    parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())

    def details() -> dict[str, Any]:
        return {"version": f" {deepspeed.__version__}", **device_details(DEVICE)}

    measure(job, step, parameters=parameters, baseline=baseline, details=details, phases=phases)


if __name__ == "__main__":
    main()
