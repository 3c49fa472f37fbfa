"""Loss scaling by `torch.amp.GradScaler`, for gradients that are pages.

Owns what is asked of a scaler and what it is told. Does not know pages: the factor goes to the update, which applies it
in float32. Guarantees that a scaler hears whether the gradients of its step were finite, and that `unscale_`, which
finds no `.grad` and would do nothing, is an error that says what to use.
"""

from __future__ import annotations

from typing import Any

import torch

from tiermem.errors import ConfigError, TiermemError


def unscaling_factor(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> float:
    """What gradients are multiplied by to undo the scale, rounded to float32 as torch does.

    Raises ConfigError after `scaler.unscale_(optimizer)`.
    """
    try:
        stage = scaler._per_optimizer_states[id(optimizer)]["stage"]  # noqa: SLF001 - no public way to ask
    except AttributeError as error:
        raise _moved("_per_optimizer_states") from error
    if stage.name == "UNSCALED":
        raise ConfigError(
            "scaler.unscale_(optimizer) finds no gradients: those of an offloaded model are pages. Leave it out, "
            "scaler.step(optimizer) unscales them; to clip, pass max_grad_norm to tiermem.AdamW"
        )
    return float(torch.tensor(scaler.get_scale(), dtype=torch.float64, device="cpu").reciprocal().float())


def refuse_hidden_scale(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if a scaler steps the optimizer without saying so in the call.

    It leaves the scale in an attribute where something around `step`, such as accelerate's, hides that it takes a
    scaler. Nobody would unscale, nor tell the scaler what was found.
    """
    if vars(optimizer).pop("grad_scale", None) is not None:
        raise ConfigError(
            "a torch.amp.GradScaler steps this optimizer through a wrapping (accelerate's fp16, for instance) that "
            "hides the scaler from it: its gradients would be used as they are, scaled. Call scaler.step(optimizer) "
            "with the tiermem.AdamW itself, or compute in bfloat16"
        )


def record_finite(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *, finite: bool) -> None:
    """Tell the scaler what it would have found in `.grad`."""
    try:
        found: dict[Any, Any] = scaler._found_inf_per_device(optimizer)  # noqa: SLF001 - no public way to tell
    except AttributeError as error:
        raise _moved("_found_inf_per_device") from error
    found[torch.device("cpu")] = torch.tensor(0.0 if finite else 1.0, dtype=torch.float32, device="cpu")


def _moved(name: str) -> TiermemError:
    return TiermemError(
        f"torch {torch.__version__} has no GradScaler.{name}, which tiermem needs for loss scaling; use a torch "
        "version that tiermem supports"
    )
