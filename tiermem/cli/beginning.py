"""What is said before a training's first step: where it begins, what is not used, and what will make it slow.

Owns those sentences. Guarantees that nothing is said of what is as the options ask for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rich.console import Console

import tiermem
from tiermem.cli.measure_layer import times_float32
from tiermem.config import resolve_device
from tiermem.memory.links import parse_link

if TYPE_CHECKING:
    from tiermem.cli.train import Training

# Times what float32 takes. Where a processor has instructions for a dtype it takes less than twice as long.
_SLOW = 4


def say_beginning(training: Training, config: tiermem.Config, console: Console) -> None:
    """Say where a training that was to be resumed begins, as far as that is not what the options say.

    And, where a processor computes, that it does so slowly in the dtype chosen, or that it has no device's memory.
    """
    _say_where(training, config, console)
    say_unused(
        config, console, has_device=parse_link(config.device) is not None or resolve_device(config).type != "cpu"
    )
    if next(training.model.parameters()).device.type == "cpu":
        say_slow(config.dtype, console)


def say_unused(config: tiermem.Config, console: Console, *, has_device: bool) -> None:
    """Say so where a device's budget is given, and a processor computes alone."""
    if config.device_nbytes is not None and not has_device:
        console.print("device_memory is not used: nothing is computed on an accelerator here", soft_wrap=True)


def say_slow(dtype: torch.dtype, console: Console) -> None:
    """Say so where this processor, which has no instructions for `dtype`, computes in it far slower than in float32."""
    if dtype == torch.float32:
        return
    times = times_float32(dtype)
    if times >= _SLOW:
        name = str(dtype).removeprefix("torch.")
        console.print(
            f"{name} takes this processor at least {int(times)} times as long as float32, having no instructions for "
            "it, and more the larger the model: --param-dtype float32 trains faster",
            soft_wrap=True,
        )


def _say_where(training: Training, config: tiermem.Config, console: Console) -> None:
    options = training.options
    if options.resume and training.runtime.committed is None:
        console.print(f"nothing was committed in {config.swap_paths[0]}: training begins anew", soft_wrap=True)
        return
    if not options.resume:
        return
    if options.weights is not None:
        console.print(
            f"training goes on from committed step {training.done}: --weights {options.weights} is not read",
            soft_wrap=True,
        )
    committed = training.runtime.committed or {}
    for name, now in training.batches().items():
        before = committed.get("batches", {}).get(name, now)  # an earlier version kept fewer of them, or none
        if now != before:
            console.print(
                f"training goes on with other batches than its own: --{name} was {before}, is {now}", soft_wrap=True
            )
    (rate, *_) = training.scheduler.base_lrs
    if rate != options.lr:
        console.print(
            f"training goes on with its own learning rate of {rate:g}: --lr {options.lr:g} is for a new run",
            soft_wrap=True,
        )
