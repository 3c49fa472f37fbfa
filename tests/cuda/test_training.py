"""Training with parameters paged through a device has the bits of training on it, in every schedule and budget."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from doubles_gpu import (
    MIB,
    STEPS,
    TRIALS,
    Trial,
    config_of,
    paged,
    resident,
    settled_names,
    tokens,
    torch_place,
)
from torch import nn

import tiermem
from tiermem.pager.homes import Homes
from tiermem.runtime.blueprint import draw


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@functools.cache
def expected(name: str, place: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    return resident(TRIALS[name], place)


def least_device(trial: Trial, place: str, directory) -> int:
    config = tiermem.Config(device=place, device_memory=4096, host_memory=64 * MIB, swap_dirs=[directory])
    with pytest.raises(tiermem.BudgetError) as caught:
        draw(trial.make(), config, None)
    return 2 * int(re.search(r"at least (\d+) bytes", str(caught.value)).group(1))  # found for bf16, used for fp32


@pytest.mark.parametrize("budget", ["generous", "least"])
@pytest.mark.parametrize("update", ["step", "forward", "backward"])
@pytest.mark.parametrize("name", TRIALS)
def test_the_bits_of_the_resident_model(name, update, budget, place, tmp_path):
    trial = TRIALS[name]
    device = 64 * MIB if budget == "generous" else least_device(trial, place, tmp_path)
    losses, weights, statistics = paged(trial, place, tmp_path, update=update, host=64 * MIB, device=device)
    wanted_losses, wanted = expected(name, place)
    for step in range(STEPS):
        assert torch.equal(losses[step], wanted_losses[step]), f"loss {step}"
    for parameter, values in weights.items():
        assert torch.equal(values, wanted[parameter]), parameter
    for tier in statistics.tiers:
        assert tier.high_water <= tier.budget
    assert statistics.total.edge("host->device").nbytes > 0
    assert statistics.total.edge("device->host").nbytes > 0


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
@pytest.mark.parametrize("name", ["llama", "convolutions"])
def test_units_that_stay_there_have_the_bits_of_the_devices_own_adamw(name, update, place, tmp_path):
    trial = TRIALS[name]
    budgets = {"host": 64 * MIB, "device": 64 * MIB}
    losses, weights, statistics = paged(trial, place, tmp_path, update=update, update_on="auto", **budgets)
    settled = settled_names(trial, config_of(place, tmp_path, update=update, update_on="auto", **budgets))
    assert settled >= weights.keys()
    wanted_losses, wanted = resident(trial, place, settled=settled)
    assert all(map(torch.equal, losses, wanted_losses))
    for parameter, values in weights.items():
        assert torch.equal(values, wanted[parameter]), parameter
    # To the processor only when the weights are looked at in the end.
    assert statistics.total.edge("device->host").nbytes == 0


@pytest.mark.parametrize("update_on", ["host", "auto"])
@pytest.mark.parametrize("name", ["llama", "reentrant checkpoint", "convolutions"])
def test_activations_in_pages_change_no_bits(name, update_on, place, tmp_path):
    """They leave the device, and most of them host memory too."""
    trial, threshold = TRIALS[name], 256
    device = 4 * least_device(trial, place, tmp_path)
    budgets = {"host": MIB, "device": device}
    losses, weights, statistics = paged(
        trial, place, tmp_path, update="forward", update_on=update_on, activations=threshold, **budgets
    )
    config = config_of(place, tmp_path, update="forward", update_on=update_on, **budgets)
    wanted_losses, wanted = resident(trial, place, settled=settled_names(trial, config))
    assert all(map(torch.equal, losses, wanted_losses))
    for parameter, values in weights.items():
        assert torch.equal(values, wanted[parameter]), parameter
    down = statistics.total.edge("device->host").nbytes
    assert (
        down
        > paged(trial, place, tmp_path, update="forward", update_on=update_on, **budgets)[2]
        .total.edge("device->host")
        .nbytes
    )
    for tier in statistics.tiers:
        assert tier.high_water <= tier.budget


def test_states_on_disk_too(place, tmp_path):
    trial = TRIALS["fused attention"]
    device = least_device(trial, place, tmp_path)
    losses, _, statistics = paged(trial, place, tmp_path, update="backward", host=128 << 10, device=device)
    assert all(map(torch.equal, losses, expected("fused attention", place)[0]))
    assert statistics.total.bytes_written > 0


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_parameters_at_home_there(update, place, tmp_path, monkeypatch):
    """Host memory holds a part of the state, the device all parameters: the bits of the resident model."""
    planned, follow = [], Homes.follow

    def noting(self, *, at_home):
        planned.append(at_home)
        follow(self, at_home=at_home)

    monkeypatch.setattr(Homes, "follow", noting)
    layers, width = 48, 64
    trial = Trial(
        lambda: nn.Sequential(nn.Embedding(40, width), *map(nn.Linear, [width] * layers, [width] * layers)), loss
    )
    state = 16 * layers * width * width
    losses, weights, statistics = paged(trial, place, tmp_path, update=update, host=state // 3, device=state)
    assert any(planned)
    wanted_losses, wanted = resident(trial, place)
    assert all(map(torch.equal, losses, wanted_losses))
    for parameter, values in weights.items():
        assert torch.equal(values, wanted[parameter]), parameter
    assert statistics.total.bytes_written > 0
    for tier in statistics.tiers:
        assert tier.high_water <= tier.budget


def test_what_users_see_is_on_the_device(place, tmp_path):
    device = torch_place(place)
    model = TRIALS["convolutions"].make()
    budgets = {"device_memory": 8 * MIB, "host_memory": 64 * MIB, "param_dtype": "float32"}
    config = tiermem.Config(device=place, swap_dirs=[tmp_path], **budgets)
    with tiermem.offload(model, config) as runtime:
        for tensor in (*model.parameters(), *model.buffers()):
            assert tensor.device.type == device.type
        parameter = next(model.parameters())
        TRIALS["convolutions"].loss(model.train(), tokens(0, device)).backward()
        assert runtime.gradient(parameter).device.type == device.type
        with runtime.gathered(model, write=True), torch.no_grad():
            parameter.fill_(0.5)
        assert runtime.parameter(parameter).eq(0.5).all()
        assert runtime.master(parameter).eq(0.5).all()
        runtime.close(restore_model=True)
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}
