"""Optimizer states as they are saved: what `AdamW.load_state_dict` takes, and what it refuses.

Owns the checks of groups, of whose states there are, of counts and moments. Does not know pages, nor which parameter a
number stands for. Guarantees that what is refused is named, so that it can be refused before anything is changed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from tiermem.errors import ConfigError
from tiermem.optim.hyperparameters import SETTINGS, UNSUPPORTED, as_number, numbers_of, refuse_torch_options
from tiermem.optim.service import Moments


def step_counts_in(state_dict: Any, sizes: Sequence[int]) -> dict[int, int]:
    """The step counts in a state, by the numbers that its groups give parameters; not all need have one.

    Raises ConfigError unless it is such a state, its groups are of these sizes and have AdamW's settings, as numbers,
    and its counts are whole.
    """
    states = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    if not isinstance(states, Mapping) or not isinstance(groups, list):
        raise ConfigError(
            "load_state_dict: expected 'state' and 'param_groups', as optimizer.state_dict() returns them"
        )
    for group in groups:
        _require_group(group)
    found = [len(group["params"]) for group in groups]
    if found != list(sizes):
        raise ConfigError(f"expected the state of parameter groups of {list(sizes)}, found {found}: of another model?")
    known = {number for group in groups for number in group["params"]}
    for number, entry in states.items():
        if number not in known:
            advice = "; JSON makes text of numbers" if isinstance(number, str) else ""
            raise ConfigError(f"this state is of parameter {number!r}, which none of its groups has{advice}")
        if not isinstance(entry, Mapping):
            raise ConfigError(f"the state of parameter {number}: expected a dictionary, found {type(entry).__name__}")
    return {number: _count(number, entry["step"]) for number, entry in states.items() if "step" in entry}


def _require_group(group: Any) -> None:
    if not isinstance(group, Mapping):
        raise ConfigError(f"a parameter group of this state: expected a dictionary, found {type(group).__name__}")
    refuse_torch_options({key: group[key] for key in UNSUPPORTED if key in group})
    if missing := sorted((SETTINGS | {"params"}) - group.keys()):
        raise ConfigError(f"a parameter group of this state has no {', '.join(missing)}: it is not AdamW's")
    if not isinstance(group["params"], (list, tuple)) or not all(
        isinstance(number, Hashable) for number in group["params"]
    ):
        raise ConfigError(f"params of a parameter group of this state: expected numbers, found {group['params']!r:.60}")
    numbers_of(group)  # not their range: a cosine may end a rounding below 0
    if group.get("decoupled_weight_decay") is False and group["weight_decay"] != 0:
        raise ConfigError("this is the state of Adam, which decays weights by way of their gradients, not AdamW's")


def _count(number: int, step: object) -> int:
    count = as_number(f"step of parameter {number}", step)
    if not count.is_integer() or count < 0:
        raise ConfigError(f"step of parameter {number}: expected a whole number from 0 on, found {count}")
    return int(count)


def moments_of(entry: Mapping[str, Any]) -> Moments | None:
    """The moments in a parameter's state, if there are any. Raises ConfigError for a state that is not AdamW's."""
    if set(entry) <= {"step"}:
        return None
    if set(entry) == {"step", "exp_avg", "exp_avg_sq"}:
        first, second = entry["exp_avg"], entry["exp_avg_sq"]
        if all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in (first, second)):
            return first, second
    raise ConfigError(
        f"this optimizer state carries {sorted(entry)}; expected step and, where there are moments, exp_avg and "
        "exp_avg_sq, as torch.optim.AdamW without amsgrad has them"
    )
