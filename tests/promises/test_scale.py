"""Models of many units, units of many bytes, and a unit that is too large for the budget."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from doubles_combinations import some_of
from doubles_training import MIB, Trainee, config_for, plain
from torch import nn

import tiermem
from tiermem.memory.arena import rounded
from tiermem.planner.footprint import UnitSize, plan_footprint

LAYERS = 200


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = values + layer(values).tanh() / 16
        return values


def short_training(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-3)
    for _ in range(3):  # one to find out the order, one by it, one whose updates ran beside the one before
        loss = trainee.model(torch.randn(2, 4)).square().mean()
        loss.backward()
        trainee.note(loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("update", some_of(["backward"], ["forward"]))
def test_a_model_of_two_hundred_layers_trains_as_plain_pytorch_does(update: str, tmp_path: Path) -> None:
    expected = plain(Deep, short_training)
    torch.manual_seed(1)
    model = Deep()
    config = config_for(tmp_path, 512 << 10, update, commits=False)  # of four blocks for each unit, 3.2 MiB
    with tiermem.offload(model, config, coalesce=0) as runtime:
        torch.manual_seed(2)
        trainee = Trainee(model, tiermem.AdamW, runtime.gradient)
        short_training(trainee)
        for found, wanted in zip(trainee.noted, expected.noted, strict=True):
            assert found is not None
            assert wanted is not None
            assert torch.equal(found, wanted)
        for layer in (0, LAYERS // 2, LAYERS - 1):
            name = f"layers.{layer}.weight"
            assert torch.equal(runtime.parameter(model.get_parameter(name)), expected.weights[name])
        assert runtime.statistics().total.evictions > LAYERS, "it was paged"


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 8))


def wide_training(trainee: Trainee) -> None:
    optimizer = trainee.adamw(trainee.model.parameters(), lr=1e-3)
    for _ in range(2):
        loss = trainee.model(torch.randn(2, 4096)).square().mean()
        loss.backward()
        trainee.note(loss)
        optimizer.step()
        optimizer.zero_grad()


def test_a_unit_of_64_mib_trains_in_less_than_its_state(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = plain(wide, wide_training)
    torch.manual_seed(1)
    model = wide()
    torch.manual_seed(2)
    config = config_for(tmp_path, 128 * MIB, "forward", commits=False, poison=False)  # half of its 256 MiB
    with tiermem.offload(model, config) as runtime:
        torch.manual_seed(2)
        trainee = Trainee(model, tiermem.AdamW, runtime.gradient)
        wide_training(trainee)
        for found, wanted in zip(trainee.noted, expected.noted, strict=True):
            assert torch.equal(found, wanted)
        for name, parameter in model.named_parameters():
            assert torch.equal(runtime.parameter(parameter), expected.weights[name])


@pytest.mark.parametrize("nbytes", [64 << 20, 2 << 30, (2 << 30) + 4096])
def test_the_budget_of_one_large_unit_is_its_parameters_and_a_few_tiles(nbytes: int) -> None:
    """Bytes beyond what 31 bits count, in the arithmetic; tests of the pager move them."""
    unit = UnitSize("large", nbytes, nbytes // 4, 4, 8)
    footprint = plan_footprint([unit], nbytes + (256 << 20), 16 << 20)
    assert rounded(nbytes) < footprint.least < nbytes + (1 << 20), "the unit, and its smallest tiles"
    assert footprint.tile_numel * 8 <= 16 << 20
    with pytest.raises(tiermem.BudgetError, match=f"set host_memory to {footprint.least} bytes"):
        plan_footprint([unit], footprint.least - 1, 16 << 20)


def test_a_unit_larger_than_the_budget_is_refused_with_the_budget_that_does(tmp_path: Path) -> None:
    def three() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2048), nn.Linear(2048, 4))

    with pytest.raises(tiermem.BudgetError, match=r"largest unit \(1, \d+ bytes of parameters\)") as caught:
        tiermem.offload(three(), config_for(tmp_path, 256 << 10, "forward"))  # 520 KiB are its parameters alone
    assert "pass smaller units" in str(caught.value), "what to do besides"
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    (least,) = map(int, re.findall(r"set host_memory to (\d+) bytes", str(caught.value)))
    with tiermem.offload(three(), config_for(tmp_path, least, "forward")) as runtime:
        optimizer = tiermem.AdamW(runtime.model.parameters())
        runtime.model(torch.randn(2, 64)).square().mean().backward()
        optimizer.step()
