"""Which parameters stay in memory by choice, and in which dtype.

Owns the reading of what the user asks for: a predicate, a size, modules or the names of their classes. Does not know
units or pages. Guarantees that a wish which cannot be meant is refused, one that matches no parameter above all, with
what there is instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiermem.errors import ConfigError
from tiermem.memory.sizes import exact_bytes, parse_bytes

Keep = Callable[[str, nn.Parameter], bool] | int | str | Iterable[nn.Module | str] | None

# How many parameters a message names.
_SHOWN = 4


@dataclass(frozen=True)
class Keeping:
    """What a user wants kept: `keep` as `offload` takes it, and the dtype kept parameters have; None: as all others."""

    keep: Keep = None
    dtype: torch.dtype | None = None

    def find(self, model: nn.Module, dtype: torch.dtype) -> frozenset[int]:
        """The kept parameters of `model`, by identity; `dtype`: that of the others.

        Raises ConfigError for a wish that matches nothing or makes no sense.
        """
        keep = self.keep
        if keep is None:
            if self.dtype is not None:
                raise ConfigError("keep_dtype says which dtype kept parameters have: say with keep= which those are")
            return frozenset()
        # Every name of a parameter that is registered at several places.
        named = list(model.named_parameters(remove_duplicate=False))
        if callable(keep) and not isinstance(keep, (nn.Module, type)):
            found = frozenset(id(parameter) for name, parameter in named if keep(name, parameter))
            if not found:
                raise _nothing(f"the predicate keep= is true for none of {len(named)} parameters", named)
            return found
        if isinstance(keep, (bool, int)) or (isinstance(keep, str) and keep[:1].isdigit()):
            return _small(named, keep, self.dtype or dtype)
        if isinstance(keep, (str, nn.Module)) or not isinstance(keep, Iterable):
            return _below(model, [keep])
        return _below(model, list(keep))


def nbytes_in(dtype: torch.dtype | None, parameter: nn.Parameter) -> int:
    """Bytes of a parameter that becomes `dtype`, if it is a floating-point one; None: that stays as it is."""
    own = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    return parameter.numel() * own.itemsize


def _small(named: list[tuple[str, nn.Parameter]], size: int | str, dtype: torch.dtype) -> frozenset[int]:
    """The parameters that take at most `size` bytes."""
    most = parse_bytes(size, f"keep={size!r}: ")
    found = frozenset(id(parameter) for _, parameter in named if nbytes_in(dtype, parameter) <= most)
    if named and not found:
        name, least = min(named, key=lambda pair: nbytes_in(dtype, pair[1]))
        raise ConfigError(
            f"keep={size!r} keeps parameters of at most {exact_bytes(most)}, and the smallest, {name}, takes "
            f"{nbytes_in(dtype, least)} bytes; give more, or leave keep= out"
        )
    return found


def _below(model: nn.Module, wishes: list[Any]) -> frozenset[int]:
    """The parameters of these modules, or of the modules of these classes."""
    modules = list(model.modules())
    classes = {type(module).__name__ for module in modules}
    foreign = [wish for wish in wishes if not isinstance(wish, (str, nn.Module))]
    if foreign:
        raise ConfigError(
            "keep= takes a function of (name, parameter), a number of bytes, or modules and names of their classes; "
            f"found {foreign[0]!r} among them"
        )
    for wish in wishes:
        if isinstance(wish, str) and wish not in classes:
            near = difflib.get_close_matches(wish, classes, n=1) or sorted(classes)[:_SHOWN]
            raise ConfigError(f"keep= names the class {wish!r}, which the model lacks; it has {', '.join(near)}")
        if isinstance(wish, nn.Module) and not any(wish is module for module in modules):
            raise ConfigError(f"keep= names a {type(wish).__name__} that is not part of the model")
    given = {id(wish) for wish in wishes if not isinstance(wish, str)}
    chosen = [module for module in modules if id(module) in given or type(module).__name__ in wishes]
    found = frozenset(id(parameter) for module in chosen for parameter in module.parameters())
    if not found:
        raise _nothing("keep= names modules without parameters", list(model.named_parameters()))
    return found


def _nothing(what: str, named: list[tuple[str, nn.Parameter]]) -> ConfigError:
    names = ", ".join(name for name, _ in named[:_SHOWN])
    return ConfigError(f"{what} (the first are named {names or 'nothing'}); correct it, or leave keep= out")
