"""A `Trainer` of transformers whose model stays as it is, however many processes there are.

Owns the one thing that keeps accelerate from putting DistributedDataParallel around the model: that reads and writes
parameters, and they are paged out. Everything else that accelerate does to a model (autocast, compiling) it does, and
loaders, gathering and losses are divided over the processes as ever. Does not know runtimes. Guarantees that who trains
by it has to average gradients itself.
"""

from __future__ import annotations

import functools

import transformers


class UnwrappedTrainer(transformers.Trainer):
    """`transformers.Trainer`, but for DistributedDataParallel."""

    def create_accelerator_and_postprocess(self) -> None:
        """As transformers', with an Accelerator that prepares every model as it does those that are not trained.

        Not by `_wrap_model` of Trainer: it is accelerate that puts DistributedDataParallel around all that is trained.
        """
        super().create_accelerator_and_postprocess()
        as_it_is = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.accelerator.prepare_model = as_it_is  # the Accelerator is this Trainer's own
