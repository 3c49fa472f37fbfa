"""What the accelerator of a configuration gives: room, wires, and how fast it trains.

Owns the measurements that need a device. Does not know drives or processors. Guarantees that a real device is timed at
what training does there, a decoder layer forward and backward and copies of page-locked memory, and that nothing of it
stays on the device.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch

from tiermem.cli.copies import pinned_rates
from tiermem.cli.measure_layer import LayerShape, layer_flops
from tiermem.cli.timing import median_seconds
from tiermem.config import Config
from tiermem.errors import ConfigError
from tiermem.memory.links import parse_link
from tiermem.planner.machine import Device
from tiermem.runtime.devices import device_budget, own_device

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# A layer of a model of some billion parameters on some thousand tokens: less does not fill a large device, and more
# does not fit beside others on a small one.
_LAYER = LayerShape(rows=4, seq=1024, width=2048, mlp=5504)
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
        flops = {name: layer_flops(dtype, device, seconds, _LAYER) for name, dtype in _dtypes(device).items()}
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


def _dtypes(device: torch.device) -> dict[str, torch.dtype]:
    """Those that the device computes in; one that it only imitates is no way to train."""
    with torch.cuda.device(device):
        bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return {name: dtype for name, dtype in _DTYPES.items() if bfloat16 or dtype is not torch.bfloat16}


def _memory_rate(seconds: float) -> float:
    """Bytes a second of a copy from host memory to host memory."""
    source, target = torch.ones(_COPY_BYTES, dtype=torch.uint8), torch.ones(_COPY_BYTES, dtype=torch.uint8)
    return _COPY_BYTES / median_seconds(lambda: target.copy_(source), seconds)
