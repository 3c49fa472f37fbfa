"""Which device a process takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tiermem
from tiermem.config import Config
from tiermem.errors import CapacityError, ConfigError
from tiermem.memory.devices import SimulatedDevice
from tiermem.memory.slab import SlabArena
from tiermem.runtime.devices import device_budget, own_device


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with four CUDA devices, on which torchrun has started this process as the third."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "2")
    return monkeypatch


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_of_several_ranks_each_takes_its_own(four: pytest.MonkeyPatch, device: str) -> None:
    config = Config(swap_dirs=["run"], device=device)
    assert own_device(config) == torch.device("cuda", 2)
    four.setattr(torch.cuda, "device_count", lambda: 1)
    assert own_device(config) == torch.device("cuda", 0), "its launcher shows it no other"
    four.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="LOCAL_RANK is 2, found 2 CUDA devices"):
        own_device(config)
    four.setattr(torch.distributed, "is_initialized", lambda: False)
    assert own_device(config) == torch.device("cuda"), "torchrun, but not a run of several ranks"


@pytest.mark.usefixtures("four")
def test_whoever_is_named_is_taken() -> None:
    assert own_device(Config(swap_dirs=["run"], device="cuda:1")) == torch.device("cuda:1")
    assert own_device(Config(swap_dirs=["run"], device="cpu")) == torch.device("cpu")
    assert own_device(Config(swap_dirs=["run"], device="simulated", device_memory=4096)) == torch.device("cpu")


def test_how_much_of_a_device_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def budget(device: str, size: int | str = "auto") -> int | None:
        return device_budget(Config(swap_dirs=["run"], device=device, device_memory=size), lambda: 9 << 20)

    assert budget("cpu") is None
    assert budget("simulated", (1 << 20) + 4097) == (1 << 20) + 4096, "whole frames"
    with pytest.raises(ConfigError, match="device_memory: expected a size with device='simulated'"):
        budget("simulated")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    free = (1 << 20) + 2
    assert budget("cuda") == 1 << 19, "half of what is free"
    free = 1 << 30
    assert budget("cuda") == 9 << 20, "no more than there is use for"
    assert budget("cuda", "64MiB") == 64 << 20


def test_a_device_without_the_memory_is_said_and_host_memory_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arenas: list[SlabArena] = []
    make_host_arena = SimulatedDevice.make_host_arena

    def noted(device: SimulatedDevice, nbytes: int, *, poison: bool, passing: int = 0) -> SlabArena:
        arenas.append(make_host_arena(device, nbytes, poison=poison, passing=passing))
        return arenas[-1]

    def refuse(*_: object, **__: object) -> None:
        raise CapacityError("the device has no memory left")

    monkeypatch.setattr(SimulatedDevice, "make_host_arena", noted)
    monkeypatch.setattr(SimulatedDevice, "make_arena", refuse)
    config = Config(swap_dirs=[tmp_path], host_memory="8MiB", device="simulated", device_memory="4MiB")
    with pytest.raises(CapacityError, match="the device has no memory left"):
        tiermem.offload(nn.Linear(8, 8), config)
    with pytest.raises(tiermem.TiermemError, match="of a closed arena"):
        arenas[0].allocate(4096)
