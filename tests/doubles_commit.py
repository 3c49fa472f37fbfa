"""A small model with everything that resuming has to bring back, trained by one function in any process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import tiermem


class Net(nn.Module):
    """Dropout (torch's generator), a running mean (a buffer), a frozen part, several units."""

    def __init__(self, width: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.inner = nn.Linear(8, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2)) for _ in range(layers)
        )
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.outer = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.outer(self.frozen(self.norm(x.float()).to(x.dtype)))


def make_config(directory: Path, **settings: Any) -> tiermem.Config:
    values: dict[str, Any] = {
        "device": "cpu",
        "host_memory": "192KiB",
        "swap_dirs": [str(directory)],
        "param_dtype": "float32",
        "update": "step",
        "tile_size": "64KiB",
        "block_size": 64 << 10,
    }
    return tiermem.Config(**(values | settings))


class Training:
    """Open (new or resumed), step by step, committed in between."""

    def __init__(
        self,
        config: tiermem.Config,
        *,
        resume: bool | str = False,
        model: Callable[[], nn.Module] = Net,
        clip: float | None = None,
    ) -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        with tiermem.deferred_init():
            self.model = model()
        self.runtime = tiermem.offload(self.model, config, resume=resume)
        self.optimizer = tiermem.AdamW(
            [
                {"params": [p for p in self.model.parameters() if p.ndim > 1]},
                {"params": [p for p in self.model.parameters() if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=1e-2,
            weight_decay=0.1,
            max_grad_norm=clip,
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.done = 0
        if self.runtime.committed is not None:
            self.optimizer.load_state_dict(self.runtime.committed_optimizer_state())
            self.scheduler.load_state_dict(self.runtime.committed["scheduler"])
            self.done = self.runtime.committed["step"]

    def step(self) -> float:
        data = torch.randn(5, 8) + float(np.random.rand()) + random.random()
        loss = self.model(data.to(next(self.model.parameters()).dtype)).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.done += 1
        return float(loss.detach())

    def commit(self) -> Any:
        return self.runtime.commit({"step": self.done, "scheduler": self.scheduler.state_dict()})

    def state(self) -> dict[str, torch.Tensor]:
        """Every value there is: parameters, masters, moments, buffers."""
        found = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.runtime.settle()
        house = self.runtime._house
        for name, parameter in self.model.named_parameters():
            found[name] = self.runtime.parameter(parameter)
            if parameter.requires_grad:
                found[f"{name} master"] = self.runtime.master(parameter)
                unit, slot = self.runtime._house.gatherer.slots[id(parameter)]
                first, second = house.states.read_moments(unit, slot.parameter)
                found[f"{name} first"], found[f"{name} second"] = first, second
        return found

    def close(self) -> None:
        self.runtime.close()


_UNDISTURBED: dict[tuple[Any, ...], tuple[list[float], dict[str, torch.Tensor]]] = {}


def undisturbed(directory: Path, steps: int, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final state of a run that commits nothing; computed once, and never to be changed."""
    key = (steps, *sorted(settings.items()))
    if key not in _UNDISTURBED:
        _UNDISTURBED[key] = _train_undisturbed(directory, steps, **settings)
    return _UNDISTURBED[key]


def _train_undisturbed(
    directory: Path, steps: int, clip: float | None = None, **settings: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    directory.mkdir(exist_ok=True)
    training = Training(make_config(directory, **settings), clip=clip)
    losses = [training.step() for _ in range(steps)]
    state = training.state()
    training.close()
    return losses, state


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
