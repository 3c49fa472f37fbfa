"""The same few steps on a model that is resident on the device and on one that is offloaded.

Both update with torch's fused AdamW on the processor, or both on the device, so that every bit can be compared: forward
and backward are the device's in either case.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from doubles_models import Stack, small_llama
from torch import nn

import tiermem
from tiermem.runtime.blueprint import draw

MIB = 1 << 20
STEPS = 5


def torch_place(place: str) -> torch.device:
    return torch.device("cuda" if place == "cuda" else "cpu")


def tokens(step: int, device: torch.device, *, vocabulary: int = 40) -> torch.Tensor:
    return torch.randint(vocabulary, (2, 6), generator=torch.Generator().manual_seed(step)).to(device)


@dataclass(frozen=True)
class Trial:
    """A model and its loss on a batch of tokens."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]


def _logits_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


class Pictures(nn.Module):
    """Convolutions, one of them channels last, and a normalisation with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 3, 1))
            for _ in range(2)
        )
        self.blocks[1].to(memory_format=torch.channels_last)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = torch.sin(batch.sum(dim=1).float()[:, None, None, None] + torch.ones(3, 8, 8, device=batch.device))
        for block in self.blocks:
            x = x + block(x)
        return x


class Attending(nn.Module):
    """Attention through torch's fused kernels, as model code of our day calls them."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.heads = heads
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)}) for _ in range(3)
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for layer in self.layers:
            parts = layer["qkv"](x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
            x = x + layer["out"](mixed.transpose(1, 2).reshape(x.shape))
        return x


def llama() -> nn.Module:
    return small_llama(words=40, use_cache=False)


TRIALS = {
    "tied embedding": Trial(Stack, _logits_loss),
    "reentrant checkpoint": Trial(lambda: Stack(mode="reentrant"), _logits_loss),
    "checkpoint in the layer": Trial(lambda: Stack(mode="inner"), _logits_loss),
    "convolutions": Trial(Pictures, _logits_loss),
    "fused attention": Trial(Attending, _logits_loss),
    "llama": Trial(llama, lambda model, batch: model(input_ids=batch, labels=batch).loss),
}


def resident(
    trial: Trial, place: str, *, settled: Container[str] = ()
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and final weights of the model on the device, with masters on the processor, those of `settled` there."""
    device = torch_place(place)
    torch.manual_seed(1)
    model = trial.make()
    masters = [
        parameter.detach().clone().to(device if name in settled else "cpu").requires_grad_()
        for name, parameter in model.named_parameters()
    ]
    model.to(device)
    optimizer = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    losses = []
    for step in range(STEPS):
        loss = trial.loss(model, tokens(step, device))
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.to(master.device)
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(loss.detach().cpu())
    return losses, {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def config_of(
    place: str, directory: Path, *, update: str, host: int, device: int, update_on: str = "host"
) -> tiermem.Config:
    return tiermem.Config(
        device=place,
        device_memory=device,
        host_memory=host,
        swap_dirs=[directory],
        param_dtype="float32",
        update=update,  # type: ignore[arg-type]
        update_on=update_on,  # type: ignore[arg-type]
        poison=update != "forward",  # filling frames on one stream orders much that nothing else does: not everywhere
        stall_timeout=30.0,  # less than a test has: what stalls says so itself
    )


def settled_names(trial: Trial, config: tiermem.Config) -> set[str]:
    """The parameters that such a run updates on the device: a GPU's AdamW has last bits of its own."""
    blueprint = draw(trial.make(), config, None)
    assert blueprint.device is not None
    layouts = [layout for layout in blueprint.layouts if layout.unit in blueprint.device.settled]
    return {name for layout in layouts for slot in layout.slots for name in slot.names}


def paged(
    trial: Trial,
    place: str,
    directory: Path,
    *,
    update: str,
    host: int,
    device: int,
    update_on: str = "host",
    activations: int | None = None,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], tiermem.Statistics]:
    """The same with tiermem, released memory overwritten by NaN. `activations`: from how many bytes on in pages."""
    torch.manual_seed(1)
    model = trial.make()
    config = config_of(place, directory, update=update, host=host, device=device, update_on=update_on)
    losses = []
    with tiermem.offload(model, config) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            with contextlib.nullcontext() if activations is None else runtime.offload_activations(activations):
                loss = trial.loss(model, tokens(step, torch_place(place)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        weights = {name: runtime.parameter(parameter).cpu() for name, parameter in model.named_parameters()}
        statistics = runtime.statistics()
    return losses, weights, statistics


class MadeOn:
    """torch, but what is drawn at random is drawn on the processor and put on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(self._device)

    def randint(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape).to(self._device)


class HostAdamW(torch.optim.AdamW):
    """torch's fused AdamW on masters in host memory of parameters that are on a device."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        self._pairs: list[tuple[nn.Parameter, torch.Tensor]] = []
        groups = list(params)
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        masters = [{**group, "params": [self._master(each) for each in group["params"]]} for group in groups]
        super().__init__(masters, fused=True, **settings)

    def _master(self, parameter: nn.Parameter) -> torch.Tensor:
        master = parameter.detach().cpu().clone().requires_grad_()
        self._pairs.append((parameter, master))
        return master

    def step(self, closure: Any = None) -> Any:
        for parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.cpu()
        answer = super().step(closure)
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)
        return answer

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter, _ in self._pairs:
            parameter.grad = None
