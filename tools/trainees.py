"""Carries out what `draws.py` draws: in plain PyTorch, and offloaded.

Owns what differs between the two, and the notes of what was seen. Knows the public face only, and the verbs by name.
Guarantees that both forms see the same batches in the same order, and that a runtime is closed whatever happens.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_model
from torch import nn

import tiermem
from tools.draws import MODELS, WORDS, Draw
from tools.verbs import VERBS, bring, look, one_by_one, update

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
        groups.append({"params": parameters[cut:]})
        several = [[group] for group in groups] if self.draw.apart else [groups]
        self.model, self.optimizers = model, [self.adamw(each) for each in several]

    def adamw(self, groups: list[dict[str, Any]]) -> Any:
        """The optimizer that is compared."""
        return torch.optim.AdamW(groups, lr=1e-2, fused=True, **self.draw.adamw)

    def run(self) -> Notes:
        """Carry out everything; what was to be seen."""
        torch.manual_seed(self.draw.number)
        for step in self.draw.steps:
            self.step, self.skips = step, False
            frozen = [each for each in self.model.parameters() if each.requires_grad][step.frozen :: 3]
            for parameter in frozen if step.frozen else ():
                parameter.requires_grad_(False)
            bring(self, step.batches)
            for verb in step.before:
                VERBS[verb](self)
            for parameter in frozen:
                parameter.requires_grad_(True)
            update(self)
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

    def together(self, batches: list[Any]) -> list[torch.Tensor]:
        """Bring them through each unit in turn, where that can be done."""
        return one_by_one(self, batches)

    def paging(self) -> Any:
        """Where activations are paged."""
        return nullcontext()

    def update_by(self, optimizer: Any) -> None:
        """Clip and step."""
        if self.draw.clip and not self.skips:
            self.scaler.unscale_(optimizer)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.note("norm", nn.utils.clip_grad_norm_(parameters, self.draw.max_norm))
        if self.draw.scaled or not self.skips:
            self.scaler.step(optimizer)

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Accumulated so far."""
        return parameter.grad

    def value_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """As it is now."""
        return parameter

    def master_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """As it is updated."""
        return parameter

    def moments_of(self, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer, moments included."""
        return optimizer.state_dict()  # type: ignore[no-any-return]

    def lent(self, _: nn.Parameter | nn.Module) -> Any:
        """Where a parameter, or a module's, have storage that may be written."""
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
        before = self.optimizers
        self.begin(self.model)
        for optimizer, other in zip(self.optimizers, before, strict=True):
            optimizer.state.update(other.state)


class Offloaded(Plain):
    """Carries it out offloaded. `budgets`: of memory, as `Config` has them."""

    def __init__(self, drawn: Draw, directory: Path, budgets: dict[str, int], rank: int = 0) -> None:
        self.directory, self.budgets = directory, budgets
        self.lives, self.kept = 0, 0
        self.weights: Path | None = None
        super().__init__(drawn, rank)

    def make(self) -> nn.Module:
        """The same, or deferred, with its values in a file."""
        if not self.draw.from_file:
            return super().make()
        self.weights = self.directory / "weights.safetensors"
        save_model(super().make(), str(self.weights))
        with tiermem.deferred_init():
            return super().make()

    def begin(self, model: nn.Module, resume: Any = False) -> None:
        """Offload it, continuing from there."""
        rates = [[group["lr"] for group in each.param_groups] for each in self.optimizers] if resume else []
        swaps = [self.directory / f"swap {self.lives} {number}" for number in range(self.draw.places)]
        for swap in swaps:
            swap.mkdir(exist_ok=True)
        config = tiermem.Config(
            swap_dirs=swaps,
            poison=True,
            stall_timeout=30.0,
            **(self.draw.config | self.budgets),
        )
        self.runtime = tiermem.offload(model, config, resume=resume, weights=self.weights, **self.draw.offload)
        super().begin(model)
        for optimizer, its in zip(self.optimizers, rates, strict=False):
            for group, rate in zip(optimizer.param_groups, its, strict=True):
                group["lr"] = rate

    def adamw(self, groups: list[dict[str, Any]]) -> Any:
        """Ours."""
        max_norm = self.draw.max_norm if self.draw.clip == "in step" else None
        return tiermem.AdamW(groups, lr=1e-2, max_grad_norm=max_norm, **self.draw.adamw)

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

    def update_by(self, optimizer: Any) -> None:
        """Skipping is the optimizer's business."""
        norm = optimizer.clip_grad_norm_(self.draw.max_norm) if self.draw.clip == "by call" else None
        self.scaler.step(optimizer)
        if self.draw.clip and not self.skips:
            self.note("norm", optimizer.grad_norm if norm is None else norm)

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """From its pages."""
        return self.runtime.gradient(parameter)

    def value_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """From its page."""
        return self.runtime.parameter(parameter)

    def master_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """From its page and what completes it."""
        return self.runtime.master(parameter)

    def moments_of(self, optimizer: Any) -> dict[str, Any]:
        """From their pages."""
        return optimizer.full_state_dict()  # type: ignore[no-any-return]

    def lent(self, part: nn.Parameter | nn.Module) -> Any:
        """Gathered."""
        return self.runtime.gathered(part, write=True)

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
        self.lives, self.weights = self.lives + 1, None
        self.begin(self.model)

    def another_optimizer(self) -> None:
        """Made for the same parameters."""
        super().begin(self.model)
