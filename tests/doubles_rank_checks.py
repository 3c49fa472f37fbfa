"""What a run of several ranks is held against: one process on all rows, and the ranks against each other."""

from __future__ import annotations

from typing import Any

import doubles_rank_scenarios as scenarios
import pytest
import torch
from doubles_training import PlainAdamW

NEAR = {"atol": 1e-6, "rtol": 1e-5}


def plain(make: Any, decay: float = 0.1, **how: Any) -> tuple[list[float], float, torch.nn.Module]:
    torch.manual_seed(1)
    model = make()
    optimizer = PlainAdamW(model.parameters(), lr=1e-3, weight_decay=decay)
    losses = scenarios.train(model, optimizer, **how)
    return losses, float(optimizer.grad_norm), model


def check(found: list[dict[str, Any]], expected: tuple[list[float], float, torch.nn.Module], near: Any = None) -> None:
    losses, norm, model = expected
    near = near or NEAR
    mean = torch.tensor([each["losses"] for each in found]).mean(dim=0)
    torch.testing.assert_close(mean, torch.tensor(losses), atol=1e-5, rtol=near["rtol"])
    for each in found:
        assert each["norm"] == found[0]["norm"], "all ranks know the same norm"
        assert each["norm"] == pytest.approx(norm, rel=near["rtol"])
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(each["weights"][name].float(), parameter.detach().float(), **near)
            assert torch.equal(each["weights"][name], found[0]["weights"][name])
            assert torch.equal(each["masters"][name], found[0]["masters"][name])
        budget, reserved, high_water = each["tiers"]["HOST"]
        assert reserved <= high_water <= budget
        assert each["left"] == [], "nothing was committed, so nothing is kept"
