"""Carries out what `draws.py` draws: in plain PyTorch, and offloaded.

Owns the verbs of a training loop, each in both forms, and the notes of what was seen. Knows the public face only.
Guarantees that both forms see the same batches in the same order, and that a runtime is closed whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import tiermem
from tools.draws import MODELS, WORDS, Draw

Notes = list[tuple[str, torch.Tensor | None]]


class Plain:
    """Carries a draw out in plain PyTorch."""

    def __init__(self, drawn: Draw, rank: int = 0) -> None:
        self.draw, self.notes, self.skips = drawn, Notes(), False
        self.generator = torch.Generator().manual_seed(drawn.number + 7919 * rank)
        self.step = drawn.steps[0]
        # A power of two, so that what is scaled and unscaled has the bits it had.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2, enabled=drawn.scaled)
        self.begin(self.make())

    def make(self) -> nn.Module:
        """The model with its first values."""
        torch.manual_seed(self.draw.number)
        return MODELS[self.draw.model]()

    def begin(self, model: nn.Module) -> None:
        """Train this one from now on, with parameters in one group or two."""
        parameters = list(model.parameters())
        cut = len(parameters) // 3 if self.draw.groups == 2 else 0
        groups: list[dict[str, Any]] = [{"params": parameters[:cut], "lr": 3e-3, "weight_decay": 0.1}] if cut else []
        self.model, self.optimizer = model, self.adamw([*groups, {"params": parameters[cut:]}])

    def adamw(self, groups: list[dict[str, Any]]) -> Any:
        """The optimizer that is compared."""
        return torch.optim.AdamW(groups, lr=1e-2, fused=True)

    def run(self) -> Notes:
        """Carry out everything; what was to be seen."""
        for step in self.draw.steps:
            self.step, self.skips = step, False
            self.backward(step.batches)
            for verb in step.before:
                VERBS[verb](self)
            self.update()
            for verb in step.behind:
                VERBS[verb](self)
        look(self)
        self.notes += [(name, buffer.clone()) for name, buffer in self.model.named_buffers()]
        return self.notes

    def note(self, what: str, value: torch.Tensor | None) -> None:
        """Something to be compared."""
        self.notes.append((what, None if value is None else value.detach().clone()))

    def batch(self) -> dict[str, torch.Tensor]:
        """The next micro-batch."""
        words = torch.randint(0, WORDS, (2, 7), generator=self.generator)
        return {"input_ids": words, "labels": words}

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of a micro-batch, scaled if that was drawn."""
        result = self.model(**batch)
        return self.scaler.scale(result if isinstance(result, torch.Tensor) else result.loss)

    def backward(self, count: int) -> None:
        """Bring so many micro-batches."""
        batches = [self.batch() for _ in range(count)]
        for loss in self.together(batches) if self.step.together else map(self.alone, batches):
            self.note("loss", loss)

    def together(self, batches: list[Any]) -> list[torch.Tensor]:
        """Bring them through each unit in turn, where that can be done."""
        return [self.alone(batch) for batch in batches]

    def alone(self, batch: Any) -> torch.Tensor:
        """Forward and backward, perhaps twice."""
        with self.paging() if self.step.paging else nullcontext():
            loss = self.loss(batch)
        loss.backward(retain_graph=self.step.again)
        if self.step.again:
            (loss * 0.5).backward()
        return loss

    def paging(self) -> Any:
        """Where activations are paged."""
        return nullcontext()

    def update(self) -> None:
        """The optimizer's step, which gradients that are not finite skip."""
        clip, parameters = self.draw.clip, list(self.model.parameters())
        if clip and not self.skips:
            self.scaler.unscale_(self.optimizer)
            self.note("norm", nn.utils.clip_grad_norm_(parameters, self.draw.max_norm))
        if self.draw.scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif not self.skips:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Accumulated so far."""
        return parameter.grad

    def value_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """As it is now."""
        return parameter

    def lent(self, _: nn.Parameter) -> Any:
        """Where a parameter has storage that may be written."""
        return nullcontext()

    def keep(self, how: str) -> None:
        """Keep the step, or keep it and go on from there; nothing to plain PyTorch."""

    def saved(self) -> dict[str, torch.Tensor]:
        """The model as it is saved."""
        return self.model.state_dict()

    def anew(self) -> None:
        """Go on with the values alone."""
        self.begin(self.model)

    def another_optimizer(self) -> None:
        """Go on with another optimizer, which takes over the moments."""
        before = self.optimizer
        self.begin(self.model)
        self.optimizer.state.update(before.state)


class Offloaded(Plain):
    """Carries it out offloaded. `budgets`: of memory, as `Config` has them."""

    def __init__(self, drawn: Draw, directory: Path, budgets: dict[str, int], rank: int = 0) -> None:
        self.directory, self.budgets = directory, budgets
        self.lives, self.kept = 0, 0
        super().__init__(drawn, rank)

    def begin(self, model: nn.Module, resume: Any = False) -> None:
        """Offload it, continuing from there."""
        rates = [group["lr"] for group in self.optimizer.param_groups] if resume else []
        swap = self.directory / f"swap {self.lives}"
        swap.mkdir(exist_ok=True)
        config = tiermem.Config(
            swap_dirs=[swap],
            poison=True,
            stall_timeout=30.0,
            **(self.draw.config | self.budgets),
        )
        self.runtime = tiermem.offload(model, config, resume=resume, **self.draw.offload)
        super().begin(model)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = rate

    def adamw(self, groups: list[dict[str, Any]]) -> Any:
        """Ours."""
        return tiermem.AdamW(groups, lr=1e-2, max_grad_norm=self.draw.max_norm if self.draw.clip == "in step" else None)

    def run(self) -> Notes:
        """As in plain PyTorch; closed at the end, whatever happens."""
        try:
            notes = super().run()
            for tier in self.runtime.statistics().tiers:
                if tier.high_water > tier.budget:
                    raise RuntimeError(f"beyond its budget: {tier}")
        except BaseException:
            self.runtime.close()
            raise
        self.runtime.close(remove=True)
        return notes

    def together(self, batches: list[Any]) -> list[torch.Tensor]:
        """By the runtime's verb."""
        with self.paging() if self.step.paging else nullcontext():
            return self.runtime.forward_backward(batches, self.loss)

    def paging(self) -> Any:
        """Nearly all activations."""
        return self.runtime.offload_activations(threshold=64)

    def update(self) -> None:
        """Skipping is the optimizer's business."""
        norm = self.optimizer.clip_grad_norm_(self.draw.max_norm) if self.draw.clip == "by call" else None
        if self.draw.scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.draw.clip and not self.skips:
            self.note("norm", self.optimizer.grad_norm if norm is None else norm)
        self.optimizer.zero_grad()

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """From its pages."""
        return self.runtime.gradient(parameter)

    def value_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """From its page."""
        return self.runtime.parameter(parameter)

    def lent(self, parameter: nn.Parameter) -> Any:
        """Gathered."""
        return self.runtime.gathered(parameter, write=True)

    def keep(self, how: str) -> None:
        """By the runtime's verbs; a commit beside what comes next, every other time."""
        self.kept += 1
        path = self.directory / f"{how} {self.kept}"
        pending = self.runtime.commit() if how in ("commit", "resume") else self.runtime.snapshot(path)
        if how != "commit" or self.kept % 2:
            pending.wait()
        if how in ("resume", "move"):
            self.runtime.close(remove=how == "move")
            self.lives += how == "move"
            self.begin(self.make(), resume=True if how == "resume" else path)

    def saved(self) -> dict[str, torch.Tensor]:
        """From its files."""
        self.kept += 1
        folder = self.directory / f"saved {self.kept}"
        self.runtime.save_pretrained(folder, max_shard_size=4096)
        return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}

    def anew(self) -> None:
        """Give the model back, and offload it again."""
        self.runtime.close(restore_model=True, remove=True)
        self.lives += 1
        self.begin(self.model)

    def another_optimizer(self) -> None:
        """Made for the same parameters."""
        super().begin(self.model)


def gradients(trainee: Plain) -> None:
    """Look at all gradients."""
    for name, parameter in trainee.model.named_parameters():
        trainee.note(f"gradient of {name}", trainee.gradient_of(parameter))


def look(trainee: Plain) -> None:
    """Look at all values."""
    for name, parameter in trainee.model.named_parameters():
        trainee.note(name, trainee.value_of(parameter))


def evaluate(trainee: Plain) -> None:
    """Bring a batch forward without gradients."""
    trainee.model.eval()
    with torch.no_grad():
        trainee.note("evaluation", trainee.loss(trainee.batch()))
    trainee.model.train()


def drop(trainee: Plain) -> None:
    """Forget the gradients, and bring others."""
    trainee.optimizer.zero_grad()
    trainee.skips = False
    trainee.backward(1 + trainee.draw.number % 2)


def change_rate(trainee: Plain) -> None:
    """Set another learning rate."""
    for group in trainee.optimizer.param_groups:
        group["lr"] *= 0.7


def fail(trainee: Plain) -> None:
    """Bring a batch to an error in a module."""
    modules = [module for module in trainee.model.modules() if list(module.parameters(recurse=False))]

    def refuse(*_: Any) -> None:
        raise KeyError("on purpose")

    hook = modules[trainee.draw.number % len(modules)].register_forward_pre_hook(refuse)
    try:
        trainee.loss(trainee.batch())
    except KeyError:
        trainee.note("failed", None)
    finally:
        hook.remove()


def overflow(trainee: Plain) -> None:
    """Go backward once more, with gradients that are not finite."""
    (trainee.loss(trainee.batch()) * float("inf")).backward()  # type: ignore[no-untyped-call]
    trainee.skips = True


def write(trainee: Plain) -> None:
    """Change a parameter by hand."""
    parameters = list(trainee.model.parameters())
    parameter = parameters[trainee.draw.number % len(parameters)]
    with trainee.lent(parameter), torch.no_grad():
        parameter.mul_(0.9)


def reload_settings(trainee: Plain) -> None:
    """Take the optimizer's state out, and put it in again."""
    trainee.optimizer.load_state_dict(trainee.optimizer.state_dict())


def save(trainee: Plain) -> None:
    """Save the model, and look at what is in the files."""
    found = trainee.saved()
    for name, _ in (*trainee.model.named_parameters(), *trainee.model.named_buffers()):
        trainee.note(f"saved {name}", found.get(name))


VERBS: dict[str, Callable[[Plain], None]] = {
    **{each.__name__: each for each in (gradients, look, evaluate, drop, change_rate, fail, overflow, write)},
    "reload_settings": reload_settings,
    "save": save,
    "anew": lambda trainee: trainee.anew(),
    "another_optimizer": lambda trainee: trainee.another_optimizer(),
    **{how: lambda trainee, how=how: trainee.keep(how) for how in ("commit", "snapshot", "resume", "move")},
}
