"""Operations that write, and what is kept of one to have it again.

Owns nothing. Does not know whose values are written. Guarantees that a function of `torch.nn.init` that does nothing
where there is no storage is known by its call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn import init
from torch.utils._pytree import tree_map

from tiermem.zero3.at_work import calls_from
from tiermem.zero3.made import memory_of

# Operations after which nothing is left of the values before, if they go to all elements.
OVERWRITING = frozenset(
    f"aten::{name}_" for name in ("zero", "fill", "copy", "uniform", "normal", "random", "exponential", "bernoulli")
) | {init.__name__}
_ORTHOGONAL: CodeType = inspect.unwrap(init.orthogonal_).__code__


@dataclass(frozen=True, slots=True)
class View:
    """Some elements of the parameter itself, in its memory; `whole`: all of them, as the parameter shows them."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The same elements of `values`, those of the parameter."""
        return (
            values if self.whole else values.as_strided(self.size, self.stride, values.storage_offset() + self.offset)
        )


@dataclass(frozen=True, eq=False, slots=True)
class Operation:
    """A function and what it was called with."""

    func: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str

    def reads(self, bare: torch.Tensor) -> bool:
        """Whether the values that are written are some of the parameter's own."""
        return any(isinstance(each, torch.Tensor) and memory_of(each) == memory_of(bare) for each in self.args[1:])

    def on(self, target: torch.Tensor, other: torch.Tensor) -> Operation:
        """The same on another tensor than `target`."""
        args, kwargs = tree_map(lambda each: other if each is target else each, (self.args, self.kwargs))
        return Operation(self.func, args, kwargs, self.name)


def initialiser_at_work(frame: FrameType) -> Operation | None:
    """The call of a function of `torch.nn.init` that `frame` is; None if it is something else."""
    func = getattr(init, frame.f_code.co_name, None)
    if func is None or getattr(inspect.unwrap(func), "__code__", None) is not frame.f_code:
        return None
    given = tuple(frame.f_locals[name] for name in inspect.getargs(frame.f_code).args)
    return Operation(func, given, {}, init.__name__)


def orthogonal_at_work(frame: FrameType) -> Operation | None:
    """The call of `orthogonal_` that writes. In torch 2.11 it does not ask: it computes without values, and copies."""
    return next((initialiser_at_work(each) for each in calls_from(frame) if each.f_code is _ORTHOGONAL), None)


def targets_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operation writes into."""
    for position, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor):
                yield each


def assignment(values: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """Gives a parameter these values; of equal ones only one is kept."""
    kept = values
    if all_equal(values):
        kept = values.flatten()[0].clone().expand(values.shape)
    return lambda place: place.copy_(kept)


def all_equal(values: torch.Tensor) -> bool:
    """Whether one element says them all."""
    return values.numel() > 0 and bool((values == values.flatten()[0]).all())
