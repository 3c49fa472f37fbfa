"""The functions that are registered on modules, parameters and tensors, and what they pass on.

Owns their signatures, which are torch's, and the search for tensors in whatever a module returns. Does not know what is
done when they are called. Guarantees that a hook holds on to nothing but what it passes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def before_hook(call: Callable[[nn.Module, tuple[int, ...]], None], units: tuple[int, ...]) -> Callable[..., None]:
    """A forward pre-hook (with keyword arguments) that calls `call(module, units)`."""

    def before(module: nn.Module, _: Any, __: Any) -> None:
        call(module, units)

    return before


def after_hook(call: Callable[[nn.Module], None]) -> Callable[..., None]:
    """A forward hook that calls `call(module)`."""

    def after(module: nn.Module, _: Any, __: Any) -> None:
        call(module)

    return after


def output_hook(demand: Callable[[int], torch.Tensor], units: tuple[int, ...]) -> Callable[..., None]:
    """Bring units when backward reaches the outputs of a module.

    Only early, in general. It matters for a module that checkpoints a part of its own forward which reads its own
    parameters (most Hugging Face layers do so): nothing else is called before that part runs again.
    """

    def arrived(_: torch.Tensor) -> None:
        for unit in units:
            demand(unit)

    def after(_: nn.Module, __: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(arrived)  # type: ignore[no-untyped-call]

    return after


def gradient_hook(call: Callable[[int, int], None], unit: int, number: int) -> Callable[[torch.Tensor], None]:
    """A hook on a parameter that has received a gradient, which calls `call(unit, number)`."""

    def arrived(_: torch.Tensor) -> None:
        call(unit, number)

    return arrived


def may_checkpoint_itself(module: nn.Module) -> bool:
    """Whether the module owns parameters and is not torch's own (those never checkpoint)."""
    own = next(module.parameters(recurse=False), None) is not None
    return own and not type(module).__module__.startswith("torch.nn.modules.")


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
