"""A `Trainer` of transformers whose model stays as it is, however many processes there are.

Owns how arguments come to transformers' own, and the one thing that keeps accelerate from putting
DistributedDataParallel around the model: that reads and writes parameters, and they are paged out. Everything else that
accelerate does to a model (autocast, compiling) it does, and loaders, gathering and losses are divided over the
processes as ever. Does not know runtimes. Guarantees that who trains by it has to average gradients itself.
"""

from __future__ import annotations

import functools
from typing import Any

import transformers
from torch import nn


class UnwrappedTrainer(transformers.Trainer):
    """`transformers.Trainer`, but for DistributedDataParallel."""

    def __init__(self, model: nn.Module, args: Any, *others: Any, **named: Any) -> None:
        """As transformers'. By name where that will do: a trainer of that family may have arguments between them."""
        if others:
            super().__init__(model, args, *others, **named)
        else:  # as trl's DPOTrainer
            super().__init__(model=model, args=args, **named)

    def create_accelerator_and_postprocess(self) -> None:
        """As transformers', with an Accelerator that prepares every model as it does those that are not trained.

        Not by `_wrap_model` of Trainer: it is accelerate that puts DistributedDataParallel around all that is trained.
        """
        super().create_accelerator_and_postprocess()
        as_it_is = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.accelerator.prepare_model = as_it_is  # the Accelerator is this Trainer's own
