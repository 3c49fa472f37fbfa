"""What the accelerator of a configuration gives: room, wires, and how fast it trains.

Owns the measurements that need a device. Does not know drives or processors. Guarantees that a real device is timed at
what training does there, a decoder layer forward and backward and copies of page-locked memory, and that nothing of it
stays on the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from tiermem.cli.copies import pinned_rates
from tiermem.cli.timing import median_seconds
from tiermem.config import Config
from tiermem.errors import ConfigError
from tiermem.memory.links import parse_link
from tiermem.planner.machine import Device
from tiermem.planner.workload import BACKWARD_SHARE, unit_flops
from tiermem.runtime.devices import device_budget, own_device

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# A layer of a model of some billion parameters on some thousand tokens: less does not fill a large device, and more
# does not fit beside others on a small one.
_ROWS, _SEQ, _WIDTH, _MLP, _HEADS = 4, 1024, 2048, 5504, 16
_COPY_BYTES = 64 << 20


def rates_key(config: Config) -> str:
    """What the device's rates depend on, as text; empty where the computation works in host memory.

    Raises ConfigError for a device that is not there.
    """
    device = own_device(config)
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {device.index or 0} of {torch.cuda.device_count()}"
    return config.device if parse_link(config.device) is not None else ""


def is_real(config: Config) -> bool:
    """Whether the model is computed on an accelerator, which leaves the processors to others."""
    return own_device(config).type == "cuda"


def device_room(config: Config) -> int:
    """Bytes that model state may take there now, as training has it; zero where the computation works in host memory.

    Raises ConfigError for a simulated device without a size.
    """
    return device_budget(config, lambda: sys.maxsize) or 0


def measure_device(config: Config, host_flops: Mapping[str, float], *, seconds: float) -> Device | None:
    """Measure the device of `config`, for about `seconds` each rate; None where the computation works in host memory.

    `host_flops`: operations a second of the processors, which play a simulated device. Raises ConfigError for a device
    that is not there, or has too little memory free.
    """
    link = parse_link(config.device)
    if link is not None:
        host = _memory_rate(seconds)
        up, down = min(link.up, host), min(link.down, host)
        return Device(
            memory=device_room(config), flops=host_flops, to_device=up, to_host=down, efficiency=1.0, simulated=True
        )
    device = own_device(config)
    if device.type != "cuda":
        return None
    try:
        up, down = pinned_rates(device)
        flops = {name: layer_flops(dtype, device, seconds) for name, dtype in _dtypes(device).items()}
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{device}: no memory to measure it ({error}); end what else uses it, or name a --machine"
        ) from error
    torch.cuda.empty_cache()
    return Device(
        memory=device_room(config),
        flops=flops,
        to_device=up,
        to_host=down,
        efficiency=1.0,
        count=torch.cuda.device_count(),
    )


def layer_flops(
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    *,
    rows: int = _ROWS,
    seq: int = _SEQ,
    width: int = _WIDTH,
    mlp: int = _MLP,
) -> float:
    """Operations a second that a decoder layer's forward and backward reach, counted as the planner counts them.

    A layer of `width` with a gated MLP of width `mlp` and causal attention, on `rows` sequences of `seq` tokens; timed
    for about `seconds`.
    """
    train, numel = _layer(dtype, device, rows, seq, width, mlp)

    def train_and_wait() -> None:
        train()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    taken = median_seconds(train_and_wait, seconds)
    return (1 + BACKWARD_SHARE) * unit_flops(numel, rows * seq, seq=seq, width=width) / taken


def _layer(
    dtype: torch.dtype, device: torch.device, rows: int, seq: int, width: int, mlp: int
) -> tuple[Callable[[], object], int]:
    """Forward and backward of the layer, to be called, and its number of parameters."""

    def random(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, device=device).mul_(shape[-1] ** -0.5).to(dtype)
        return values.requires_grad_()

    qkv, out, gated, down = random(3 * width, width), random(width, width), random(2 * mlp, width), random(width, mlp)
    weights = (qkv, out, gated, down)
    inputs, gradient = random(rows, seq, width), torch.ones(rows, seq, width, dtype=dtype, device=device)

    def train() -> object:
        shape = (rows, seq, _HEADS, width // _HEADS)
        parts = functional.linear(functional.rms_norm(inputs, (width,)), qkv).chunk(3, dim=-1)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = inputs + functional.linear(attended.transpose(1, 2).reshape(rows, seq, width), out)
        gate, up = functional.linear(functional.rms_norm(hidden, (width,)), gated).chunk(2, dim=-1)
        output = hidden + functional.linear(functional.silu(gate) * up, down)
        return torch.autograd.grad(output, (inputs, *weights), gradient)

    return train, sum(weight.numel() for weight in weights)


def _dtypes(device: torch.device) -> dict[str, torch.dtype]:
    """Those that the device computes in; one that it only imitates is no way to train."""
    with torch.cuda.device(device):
        bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return {name: dtype for name, dtype in _DTYPES.items() if bfloat16 or dtype is not torch.bfloat16}


def _memory_rate(seconds: float) -> float:
    """Bytes a second of a copy from host memory to host memory."""
    source, target = torch.ones(_COPY_BYTES, dtype=torch.uint8), torch.ones(_COPY_BYTES, dtype=torch.uint8)
    return _COPY_BYTES / median_seconds(lambda: target.copy_(source), seconds)
