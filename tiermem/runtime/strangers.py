"""Optimizers that are not ours on parameters that are.

Owns one hook that torch calls before any optimizer steps. Does not know a runtime: it finds the owners of parameters in
the registry, so it keeps nothing alive. Guarantees that an optimizer whose step would change nothing, because gradients
of offloaded parameters are pages and `p.grad` is None, says so instead of training nothing in silence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tiermem.errors import ConfigError
from tiermem.optim.adamw import AdamW
from tiermem.registry import registry
from tiermem.runtime.ledger import Steps


def watch_optimizers() -> RemovableHandle:
    """Refuse steps of strangers until the handle is removed. Of torch, for all optimizers; several do no harm."""
    return register_optimizer_step_pre_hook(_refuse_stranger)


def _refuse_stranger(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if isinstance(optimizer, AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if _waits_for_ours(parameter):
                kind = type(optimizer)  # not always one of torch's
                raise ConfigError(
                    f"{kind.__module__}.{kind.__qualname__} has an offloaded parameter of shape "
                    f"{tuple(parameter.shape)} and no tiermem.AdamW has it: this step would change nothing, because "
                    "gradients of offloaded parameters are pages; after tiermem.offload make a "
                    "tiermem.AdamW(model.parameters(), ...) instead"
                )


def _waits_for_ours(parameter: torch.Tensor) -> bool:
    """Whether an offloaded parameter is to be trained and has no optimizer yet."""
    found = registry.find(parameter) if parameter.requires_grad else None
    return found is not None and isinstance(found.owner, Steps) and not found.owner.has_optimizer(found.index)
