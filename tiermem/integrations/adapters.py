"""The `Trainer` of transformers for adapters (peft) around an offloaded model that stays frozen.

Owns how adapters are saved and loaded without the model around them, whose values are pages. Does not know pages, and
needs no commit: nothing paged changes. Everything else is transformers' own, the optimizer (torch's) and clipping too,
since adapters are ordinary parameters. Guarantees that what is saved is all that is trained, and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiermem.errors import ConfigError
from tiermem.integrations.checkpoints import load_optimizer
from tiermem.integrations.ranks import average_gradients, share_values
from tiermem.integrations.refusals import (
    refuse_arguments,
    refuse_other_than_runtime,
    refuse_senseless_adapters,
    refuse_trained_pages,
)
from tiermem.runtime import Runtime

try:
    import transformers

    from tiermem.integrations.adapter_files import adapter_state, load_adapters, not_saved, trained_adapters
    from tiermem.integrations.unwrapped import UnwrappedTrainer
except ImportError as error:
    raise ImportError(
        "tiermem.integrations.adapters needs transformers 5.4 or newer, accelerate and peft: "
        "pip install 'tiermem[hf]' peft"
    ) from error


class AdapterTrainer(UnwrappedTrainer):
    """`transformers.Trainer` for a `PeftModel` around the model of a runtime, offloaded before the adapters came."""

    def __init__(self, model: nn.Module, args: Any = None, *others: Any, runtime: Runtime, **named: Any) -> None:
        """Everything but `runtime` goes to transformers' own.

        Raises ConfigError if anything offloaded is to be trained, or NaN, or for arguments that cannot be honoured.
        """
        refuse_other_than_runtime(runtime)
        refuse_trained_pages(model, runtime)
        refuse_senseless_adapters(model)
        args = transformers.TrainingArguments("tmp_trainer") if args is None else args  # as transformers does
        refuse_arguments(args, runtime)
        lost = not_saved(model) if args.load_best_model_at_end else None
        if lost is not None:
            raise ConfigError(f"TrainingArguments: found load_best_model_at_end=True, and {lost}; leave it out")
        super().__init__(model, args, *others, **named)

    def create_optimizer(self, *others: Any, **named: Any) -> Any:
        """As transformers'. As training begins all processes have the adapters of the first, as DDP sees to."""
        if self.is_in_train:
            share_values(list(adapter_state(self.model).values()))
        return super().create_optimizer(*others, **named)

    def training_step(self, *others: Any, **named: Any) -> torch.Tensor:
        """As transformers'. After the last micro-batch of a step gradients become the mean over processes."""
        loss: torch.Tensor = super().training_step(*others, **named)
        if self.accelerator.sync_gradients:
            average_gradients(list(trained_adapters(self.model).values()))
        return loss

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As transformers', of the adapters: the state of the whole model would be full of NaN."""
        super()._save(output_dir, state_dict=adapter_state(self.model) if state_dict is None else state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:  # noqa: ARG002
        load_adapters(self.model, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_optimizer(Path(checkpoint), self.optimizer, self.lr_scheduler, mapped=False)

    def _load_best_model(self) -> None:
        load_adapters(self.model, str(self.state.best_model_checkpoint))
