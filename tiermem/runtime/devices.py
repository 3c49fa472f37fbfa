"""The device of a run: which one it is, how much of it is used, and what lies on it besides pages.

Owns the translation of `Config.device` and `Config.device_memory`. Does not know frames or streams. Guarantees that
whoever names a device that is not there, or gives a simulated one no size, is told before anything is opened.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tiermem.config import Config, resolve_device
from tiermem.errors import ConfigError
from tiermem.memory.arena import FRAME_ALIGNMENT
from tiermem.memory.cuda import CudaDevice
from tiermem.memory.devices import Device, SimulatedDevice
from tiermem.memory.links import parse_link


def device_budget(config: Config, most: Callable[[], int]) -> int | None:
    """Bytes of the DEVICE tier; None: the computation works in host memory and there is none.

    "auto" leaves half of what the device has free to activations and to torch, and takes no more than `most()`.
    Raises ConfigError if the device is not there, and for a simulated one without a size.
    """
    device = resolve_device(config)
    if config.device_nbytes is None and parse_link(config.device) is not None:
        raise ConfigError(f"device_memory: expected a size with device={config.device!r}; only a real device has one")
    if device.type == "cpu" and parse_link(config.device) is None:
        return None
    nbytes = config.device_nbytes
    if nbytes is None:
        free, _ = torch.cuda.mem_get_info(device)
        nbytes = min(free // 2, most())
    return nbytes // FRAME_ALIGNMENT * FRAME_ALIGNMENT


def open_device(config: Config) -> Device | None:
    """Make the device ready; None where the computation works in host memory."""
    link = parse_link(config.device)
    if link is not None:
        return SimulatedDevice(link)
    device = resolve_device(config)
    return CudaDevice(device) if device.type == "cuda" else None


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Bring the buffers to where the computation will be; parameters are pages and come by themselves."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(module, name, buffer.to(device))
