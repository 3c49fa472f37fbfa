"""The same Trainer script on plain PyTorch and on an offloaded model, and their comparison bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from doubles_models import small_llama
from doubles_training import budget_for, config_for
from torch import nn
from transformers import TrainingArguments

import tiermem
from tiermem.integrations.trainer import Trainer

COMPARED = ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss", "epoch", "step", "total_flos")
COMPARED += ("eval_right", "eval_rows", "eval_sum")  # of doubles_rank_trainer
_ALWAYS: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "max_grad_norm": 0.1,
}

After = Callable[[transformers.Trainer], None]


def llama(seed: int = 1, layers: int = 2, **more: Any) -> nn.Module:
    torch.manual_seed(seed)
    return small_llama(words=64, width=16, mlp_width=24, layers=layers, **more)


def data(count: int = 16) -> list[dict[str, torch.Tensor]]:
    """Labels that are not all counted, so that num_items_in_batch differs from batch to batch."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for number in range(count):
        tokens = torch.randint(0, 64, (6,), generator=generator)
        labels = tokens.clone()
        labels[: number % 4] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def arguments(directory: Path, kind: type[TrainingArguments] = TrainingArguments, **settings: Any) -> TrainingArguments:
    return kind(str(directory), **(_ALWAYS | settings))


@dataclass
class Trained:
    """What is compared: log lines, weights at the end, what `after` noted."""

    history: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    logs: list[dict[str, Any]] = field(default_factory=list)


def trained(trainer: transformers.Trainer, weights: dict[str, torch.Tensor]) -> Trained:
    history = trainer.state.log_history
    lines = [{name: line[name] for name in COMPARED if name in line} for line in history]
    return Trained(lines, weights, history)


def plain(
    directory: Path,
    *,
    make: Callable[[], nn.Module] = llama,
    kind: type[transformers.Trainer] = transformers.Trainer,
    arguments_kind: type[TrainingArguments] = TrainingArguments,
    named: dict[str, Any] | None = None,
    script: After | None = None,
    **settings: Any,
) -> Trained:
    """transformers' own Trainer, with torch's fused AdamW (its default)."""
    model = make()
    trainer = kind(
        model,
        arguments(directory, arguments_kind, **settings),
        **{"train_dataset": data(), "eval_dataset": data(6)} | (named or {}),
    )
    (script or _train)(trainer)
    return trained(trainer, {name: values.detach().clone() for name, values in model.named_parameters()})


@contextlib.contextmanager
def runtime_for(
    directory: Path,
    *,
    make: Callable[[], nn.Module] = llama,
    update: str = "forward",
    resume: Any = False,
    **config: Any,
) -> Iterator[tiermem.Runtime]:
    """An offloaded model whose budget does not hold it."""
    swap = directory / "swap"
    swap.mkdir(exist_ok=True, parents=True)
    model = make()
    budget = budget_for(model, swap, "tight")
    with tiermem.offload(model, config_for(swap, budget, update, **config), resume=resume) as runtime:
        yield runtime


def paged(
    directory: Path,
    *,
    make: Callable[[], nn.Module] = llama,
    kind: type[Trainer] = Trainer,
    arguments_kind: type[TrainingArguments] = TrainingArguments,
    named: dict[str, Any] | None = None,
    script: After | None = None,
    update: str = "forward",
    resume: Any = False,
    out: Path | None = None,
    **settings: Any,
) -> Trained:
    """The same with an offloaded model."""
    with runtime_for(directory, make=make, update=update, resume=resume) as runtime:
        args = arguments(out or directory / "out", arguments_kind, **settings)
        trainer = kind(args=args, train_dataset=data(), eval_dataset=data(6), runtime=runtime, **(named or {}))
        (script or _train)(trainer)
        names = runtime.model.named_parameters()
        return trained(trainer, {name: runtime.parameter(parameter) for name, parameter in names})


def _train(trainer: transformers.Trainer) -> None:
    trainer.train()


def check(found: Trained, expected: Trained) -> None:
    assert found.history == expected.history
    assert found.weights.keys() == expected.weights.keys()
    for name, values in expected.weights.items():
        assert torch.equal(found.weights[name], values), f"{name} differs"
