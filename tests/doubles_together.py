"""A model whose micro-batches go through it together, beside its plain twin that takes them one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from doubles_models import Block
from doubles_training import MIB, PlainAdamW, config_for, same
from torch import nn

import tiermem


class Chain(nn.Module):
    """Layers one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layer() for _ in range(3))

    def layer(self) -> nn.Module:
        return Block(16)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Tied(Chain):
    """What is before the layers and what is behind them have one weight, as words have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(super().forward(torch.tanh(self.first(x))))


def leased_pages(runtime: tiermem.Runtime) -> list[Any]:
    """Pages that somebody goes on holding.

    An update that runs behind backward holds its pages by right; a lease that was given up while it was being granted
    is on its way back: both have an end.
    """
    deadline = time.monotonic() + 10
    runtime._house.updater.wait_all()
    while True:
        leased = [key for key, (_, held) in runtime._house.storage.pager.residency().items() if held]
        if not leased or time.monotonic() > deadline:
            return leased


def squares(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


class Beside:
    """A model and its plain twin, trained by the same micro-batches."""

    def __init__(self, make: Callable[[], nn.Module], directory, loss: Callable = squares, **settings: Any) -> None:
        torch.manual_seed(3)
        self.plain = make()
        self.model = make()
        self.model.load_state_dict(self.plain.state_dict())
        self.loss = loss
        keep = settings.pop("keep", None)
        config = config_for(directory, MIB, settings.pop("update", "forward"), **settings)
        self.runtime = tiermem.offload(self.model, config, coalesce=0, keep=keep)
        self.ours = tiermem.AdamW(self.model.parameters(), lr=1e-2)
        self.theirs = PlainAdamW(self.plain.parameters(), lr=1e-2)

    @property
    def why_not(self) -> str | None:
        return self.runtime._house.cutting.why_not

    def bring(self, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        return self.runtime.forward_backward(batches, lambda rows: self.loss(self.model, rows))

    def step(self, batches: list[torch.Tensor]) -> None:
        found = self.bring(batches)
        for rows, value in zip(batches, found, strict=True):
            expected = self.loss(self.plain, rows)
            expected.backward()
            assert same(value, expected.detach())
        self.update()

    def update(self) -> None:
        for optimizer in (self.ours, self.theirs):
            optimizer.step()
            optimizer.zero_grad()

    def compare(self) -> None:
        for (name, mine), other in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            assert same(self.runtime.parameter(mine), other.detach()), name


def rows(count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(4, 16).abs() for _ in range(count)]
