"""Hyperparameters of AdamW: which there are, and what they may be.

Owns the checks of numbers, pairs and groups. Does not know optimizers, nor parameters. Guarantees that nothing that is
not a number reaches an update, and that what is refused is named.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tiermem.errors import ConfigError, UnknownSettingError

SETTINGS = frozenset({"lr", "betas", "eps", "weight_decay"})
UNSUPPORTED = frozenset({"amsgrad", "maximize", "differentiable"})
_WITHOUT_EFFECT = frozenset({"foreach", "fused", "capturable"})


def refuse_torch_options(options: Mapping[str, object]) -> None:
    """Raise ConfigError for an option of torch's AdamW that changes numbers, UnknownSettingError for any other."""
    for name, value in options.items():
        if name in UNSUPPORTED and value:
            raise ConfigError(f"tiermem.AdamW does not support {name}={value!r}")
        if name not in UNSUPPORTED | _WITHOUT_EFFECT:
            raise UnknownSettingError(f"AdamW got an unexpected argument {name!r}")


def require_settings(group: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the settings of a group are numbers in their range, as torch's AdamW does."""
    if group.get("max_grad_norm") is not None:  # other keys that nobody knows are somebody's own, as with torch
        raise ConfigError(
            f"max_grad_norm={group['max_grad_norm']!r} in a parameter group clips nothing, for the norm is that of all "
            "groups: give it to AdamW(..., max_grad_norm=...), or make an optimizer for each group"
        )
    betas = _pair(group["betas"])
    if not as_number("lr", group["lr"]) >= 0.0:
        raise ConfigError(f"Invalid learning rate: expected 0 or more, found {group['lr']}")
    if not as_number("eps", group["eps"]) >= 0.0:
        raise ConfigError(f"Invalid epsilon value: expected 0 or more, found {group['eps']}")
    for position, beta in enumerate(betas):
        if not 0.0 <= as_number(f"betas[{position}]", beta) < 1.0:
            raise ConfigError(f"Invalid beta parameter at index {position}: expected 0 to below 1, found {beta}")
    if not as_number("weight_decay", group["weight_decay"]) >= 0.0:
        raise ConfigError(f"Invalid weight_decay value: expected 0 or more, found {group['weight_decay']}")


Numbers = tuple[float, float, float, float, float]
"""lr, both betas, eps, weight_decay."""


class GroupReader:
    """Reads what an update uses of groups; of one in which nothing was changed since it last did, without checks."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[tuple[Any, ...], Numbers]] = {}

    def read(self, group: Mapping[str, Any]) -> Numbers:
        """See `numbers_of`."""
        there = (group["lr"], group["betas"], group["eps"], group["weight_decay"])
        seen = self._seen.get(id(group))
        if seen is None or any(one is not other for one, other in zip(seen[0], there, strict=True)):
            seen = there, numbers_of(group)
            if all(map(_is_fixed, there)):
                self._seen[id(group)] = seen
        return seen[1]


def _is_fixed(value: Any) -> bool:
    """Whether it is what it was as long as it is the same object: a tensor, or a list, may be another number."""
    return type(value) in (float, int) or (type(value) is tuple and all(type(each) is float for each in value))


def numbers_of(group: Mapping[str, Any]) -> Numbers:
    """What an update uses of a group, as whoever likes may have changed it since it was checked.

    Raises ConfigError for what would make parameters infinite or NaN. Below 0 is as in torch's AdamW, which does not
    look again either: a cosine may end a rounding below it.
    """
    betas = tuple(_finite(f"betas[{position}]", beta) for position, beta in enumerate(_pair(group["betas"])))
    for position, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"betas[{position}]: expected 0 to below 1, found {beta}")
    lr, eps, weight_decay = (_finite(name, group[name]) for name in ("lr", "eps", "weight_decay"))
    return lr, betas[0], betas[1], eps, weight_decay


def _pair(betas: Any) -> Sequence[Any]:
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise ConfigError(f"betas: expected two numbers from 0 to below 1, such as (0.9, 0.999), found {betas!r}")
    return betas


def _finite(name: str, value: object) -> float:
    found = as_number(name, value)
    if not math.isfinite(found):
        raise ConfigError(f"{name}: expected a finite number, found {found}")
    return found


def norm_to_clip_by(value: object) -> float | None:
    """`max_grad_norm` as a number; None: no clipping. Raises ConfigError, for 0 too: gradients would be zero."""
    if value is None:
        return None
    found = as_number("max_grad_norm", value)
    if not found > 0.0:
        raise ConfigError(f"max_grad_norm must be positive or None, found {value}")
    return found


def as_number(name: str, value: object) -> float:
    """A number, or a tensor with one element, as a float. Raises ConfigError for all else."""
    if isinstance(value, numbers.Real) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name}: expected a number that a float can hold, found a larger one") from None
    found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    advice = "; text from a file or a command line becomes one by float()" if isinstance(value, str) else ""
    raise ConfigError(f"{name}: expected a number, or a tensor with one element, found {found}{advice}")
