"""Carries out what `draws.py` draws: in plain PyTorch, and offloaded.

Owns what differs between the two, and the notes of what was seen. Knows the public face only, and the verbs by name.
Guarantees that both forms see the same batches in the same order, and that a runtime is closed whatever happens.
"""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_model
from torch import nn

import tiermem
from tools.draws import Draw
from tools.later_verbs import LATER_VERBS
from tools.subjects import ADAPTED_LATE, MODELS, WORDS, Adapters
from tools.verbs import VERBS, bring, look, one_by_one, some_module, update

Notes = list[tuple[str, torch.Tensor | None]]
_ALL_VERBS = VERBS | LATER_VERBS


class Course:
    """What both have: the draw, the batches, and the notes. `max_norm`: what is clipped by now, if anything is."""

    def __init__(self, drawn: Draw, rank: int = 0) -> None:
        self.draw, self.notes, self.skips = drawn, Notes(), False
        self.generator = torch.Generator().manual_seed(drawn.number + 7919 * rank)
        self.step = drawn.steps[0]
        self.max_norm: float | None = drawn.max_norm if drawn.clip else None
        self.adapters: Adapters | None = None

    def carry_out(self, verb: str) -> None:
        """By its name."""
        _ALL_VERBS[verb](self)  # type: ignore[arg-type]

    def note(self, what: str, value: torch.Tensor | None) -> None:
        """Something to be compared."""
        self.notes.append((what, None if value is None else value.detach().clone()))

    def batch(self) -> dict[str, torch.Tensor]:
        """The next micro-batch."""
        words = torch.randint(0, WORDS, (2, 7), generator=self.generator)
        return {"input_ids": words, "labels": words}

    def make(self) -> nn.Module:
        """The model with its first values."""
        torch.manual_seed(self.draw.number)
        return MODELS[self.draw.model]()


class Plain(Course):
    """Carries a draw out in plain PyTorch."""

    runtime: tiermem.Runtime | None = None

    def __init__(self, drawn: Draw, rank: int = 0) -> None:
        super().__init__(drawn, rank)
        # A power of two, so that what is scaled and unscaled has the bits it had.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2, enabled=drawn.scaled)
        self.begin(self.make())

    def begin(self, model: nn.Module) -> None:
        """Train this one from now on, with parameters in one group or two."""
        parameters = [each for each in model.parameters() if self.adapters is None or not self.adapters.have(each)]
        for parameter in parameters[self.draw.hooked - 1 :: 3] if self.draw.hooked else ():
            if parameter.requires_grad:
                parameter.register_hook(_clamp)  # type: ignore[no-untyped-call]
        cut = len(parameters) // 3 if self.draw.groups == 2 else 0
        groups: list[dict[str, Any]] = [{"params": parameters[:cut], "lr": 3e-3, "weight_decay": 0.1}] if cut else []
        groups.append({"params": parameters[cut:]})
        several = [[group] for group in groups] if self.draw.apart else [groups]
        self.model, self.optimizers = model, [self.adamw(each) for each in several]
        if self.draw.model == ADAPTED_LATE:
            self.adapters = self.adapters or Adapters(model)  # type: ignore[arg-type]
            self.adapters.put_on(model)  # type: ignore[arg-type]

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
            with self.lent(some_module(self), write=False) if step.inside else nullcontext():
                bring(self, step.batches)
            for verb in step.before:
                self.carry_out(verb)
            for parameter in frozen:
                parameter.requires_grad_(True)
            update(self)
            for verb in step.behind:
                self.carry_out(verb)
        look(self)
        self.notes += [(name, buffer.clone()) for name, buffer in self.model.named_buffers()]
        return self.notes

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
        if self.max_norm is not None and not self.skips:
            self.scaler.unscale_(optimizer)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.note("norm", nn.utils.clip_grad_norm_(parameters, self.max_norm))
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

    def lent(self, _: nn.Parameter | nn.Module, *, write: bool = True) -> Any:  # noqa: ARG002 - as of the other
        """Where a parameter, or a module's, have storage, and may be written."""
        return nullcontext()

    def keep(self, how: str) -> None:
        """Keep the step, or keep it and go on from there; nothing to plain PyTorch."""

    def saved(self) -> dict[str, torch.Tensor]:
        """The model as it is saved."""
        return self.model.state_dict()

    def anew(self) -> None:
        """Go on with the values alone."""
        self.begin(self.model)

    def home(self) -> None:
        """One step, at home."""
        loss = self.loss(self.batch())
        loss.backward()  # type: ignore[no-untyped-call]
        self.note("loss at home", loss)
        for parameter in self.model.parameters() if dist.is_initialized() else ():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
                parameter.grad /= dist.get_world_size()
        update(self)

    def another_optimizer(self) -> None:
        """Go on with another optimizer, which takes over the moments."""
        before = self.optimizers
        self.begin(self.model)
        for optimizer, other in zip(self.optimizers, before, strict=True):
            optimizer.state.update(other.state)


def _clamp(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.01, 0.01)


class Offloaded(Plain):
    """Carries it out offloaded. `budgets`: of memory, as `Config` has them."""

    runtime: tiermem.Runtime

    def __init__(self, drawn: Draw, directory: Path, budgets: dict[str, int], rank: int = 0) -> None:
        self.directory, self.budgets = directory, budgets
        self.lives, self.kept, self.at_home = 0, 0, False
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
        groups = [each.state_dict()["param_groups"] for each in self.optimizers] if resume else []
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
        for optimizer, its in zip(self.optimizers, groups, strict=False):
            for group, settings in zip(optimizer.param_groups, its, strict=True):
                group.update({name: settings[name] for name in ("lr", "betas", "eps", "weight_decay")})

    def adamw(self, groups: list[dict[str, Any]]) -> Any:
        """Ours."""
        max_norm = self.max_norm if self.draw.clip == "in step" else None
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
        if self.at_home:
            super().update_by(optimizer)
            return
        by_call = self.draw.clip == "by call" and self.max_norm is not None
        norm = optimizer.clip_grad_norm_(self.max_norm) if by_call else None
        self.scaler.step(optimizer)
        if self.max_norm is not None and not self.skips:
            self.note("norm", optimizer.grad_norm if norm is None else norm)

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """From its pages."""
        if self.adapters is not None and self.adapters.have(parameter):
            return parameter.grad
        return self.runtime.gradient(parameter)

    def value_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """From its page."""
        if self.adapters is not None and self.adapters.have(parameter):
            return parameter
        return self.runtime.parameter(parameter)

    def master_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """From its page and what completes it."""
        if self.adapters is not None and self.adapters.have(parameter):
            return parameter
        return self.runtime.master(parameter)

    def moments_of(self, optimizer: Any) -> dict[str, Any]:
        """From their pages."""
        return optimizer.full_state_dict()  # type: ignore[no-any-return]

    def lent(self, part: nn.Parameter | nn.Module, *, write: bool = True) -> Any:
        """Gathered."""
        return self.runtime.gathered(part, write=write)

    def keep(self, how: str) -> None:
        """By the runtime's verbs; a commit beside what comes next, every other time."""
        path = self.free(how)
        pending = self.runtime.commit() if how in ("commit", "resume") else self.runtime.snapshot(path)
        if how != "commit" or self.kept % 2:
            pending.wait()
        if how in ("resume", "move"):
            self.go_on(None if how == "resume" else path)

    def free(self, what: str) -> Path:
        """A free name."""
        self.kept += 1
        return self.directory / f"{what} {self.kept}"

    def go_on(self, snapshot: Path | None, *, died: bool = False) -> None:
        """From what was committed, or elsewhere from a snapshot; from what lay on disk if the process had died now."""
        image = self.free("image")
        for swap in self.directory.glob(f"swap {self.lives} *") if died else ():
            shutil.copytree(swap, image / swap.name)
        self.runtime.close(remove=died or snapshot is not None)
        for swap in image.glob("*") if died else ():
            shutil.copytree(swap, self.directory / swap.name, dirs_exist_ok=True)
        self.lives += snapshot is not None
        self.begin(self.make(), resume=True if snapshot is None else snapshot)

    def saved(self) -> dict[str, torch.Tensor]:
        """From its files."""
        folder = self.free("saved")
        self.runtime.save_pretrained(folder, max_shard_size=4096)
        return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}

    def anew(self) -> None:
        """Give the model back, and offload it again."""
        self.runtime.close(restore_model=True, remove=True)
        self.lives, self.weights = self.lives + 1, None
        self.begin(self.model)

    def home(self) -> None:
        """Take the moments along, there and back."""
        states, groups = [each.full_state_dict() for each in self.optimizers], self.optimizers
        self.runtime.close(restore_model=True, remove=True)
        self.optimizers = [super(Offloaded, self).adamw(list(each.param_groups)) for each in groups]
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        self.at_home, self.weights = True, None
        super().home()
        self.at_home, self.lives = False, self.lives + 1
        states = [each.state_dict() for each in self.optimizers]
        self.begin(self.model)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def another_optimizer(self) -> None:
        """Made for the same parameters."""
        super().begin(self.model)
