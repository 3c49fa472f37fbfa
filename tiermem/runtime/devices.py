"""The device of a run: which one it is, how much of it is used, and what lies on it besides pages.

Owns the translation of `Config.device` and `Config.device_memory`. Does not know frames or streams. Guarantees that
whoever names a device that is not there, or gives a simulated one no size, is told before anything is opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from tiermem.config import Config, resolve_device
from tiermem.errors import ConfigError
from tiermem.memory.arena import FRAME_ALIGNMENT
from tiermem.memory.cuda import CudaDevice
from tiermem.memory.devices import Device, SimulatedDevice
from tiermem.memory.links import parse_link
from tiermem.memory.rounding import round_down


def device_budget(config: Config, most: Callable[[], int]) -> int | None:
    """Bytes of the DEVICE tier; None: the computation works in host memory and there is none.

    "auto" leaves half of what the device has free to activations and to torch, and takes no more than `most()`.
    Raises ConfigError if the device is not there, and for a simulated one without a size.
    """
    device = own_device(config)
    if config.device_nbytes is None and parse_link(config.device) is not None:
        raise ConfigError(f"device_memory: expected a size with device={config.device!r}; only a real device has one")
    if device.type == "cpu" and parse_link(config.device) is None:
        return None
    nbytes = config.device_nbytes
    if nbytes is None:
        free, _ = torch.cuda.mem_get_info(device)
        nbytes = min(free // 2, most())
    return round_down(nbytes, FRAME_ALIGNMENT)


def own_device(config: Config) -> torch.device:
    """The device of this process: of several ranks on a machine each takes that of its LOCAL_RANK, unless one is named.

    Raises ConfigError if there is none for this rank, and as `resolve_device`.
    """
    device, local = resolve_device(config), os.environ.get("LOCAL_RANK", "")
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    if device.type != "cuda" or config.device not in ("auto", "cuda") or not together or not local.isdecimal():
        return device
    count = torch.cuda.device_count()
    if count == 1:
        return torch.device("cuda", 0)  # its launcher shows each process its own only; NCCL refuses a shared one
    if int(local) >= count:
        raise ConfigError(
            f"device={config.device!r}: LOCAL_RANK is {local}, found {count} CUDA devices; start one process for each "
            "device, or name devices"
        )
    return torch.device("cuda", int(local))


def open_device(config: Config) -> Device | None:
    """Make the device ready; None where the computation works in host memory."""
    link = parse_link(config.device)
    if link is not None:
        return SimulatedDevice(link)
    device = own_device(config)
    return CudaDevice(device) if device.type == "cuda" else None


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Bring the buffers to where the computation will be; parameters are pages and come by themselves."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(module, name, buffer.to(device))
