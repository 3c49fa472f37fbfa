"""The `Trainer` of transformers, for a model that is offloaded.

Owns what has to be done otherwise than in transformers: clipping and its norm, checkpoints, weights in and out, what is
logged. Does not know pages: it calls the public verbs of a `Runtime`, which it never closes. Everything else is
transformers' own code. Guarantees the losses and weights of the same script with torch.optim.AdamW(fused=True), bit for
bit in fp32, and that what it cannot do is refused when it is made. See README.md in this folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiermem.errors import ConfigError, ResumeError, TiermemError
from tiermem.integrations.checkpoints import (
    Ticket,
    export_adapters,
    export_weights,
    find_checkpoint,
    has_moments,
    is_of_peft,
    load_optimizer,
    load_weights,
    make_durable,
    set_aside,
    why_no_ticket,
)
from tiermem.integrations.ranks import by_first, joined, together
from tiermem.integrations.refusals import (
    choose_clipping,
    refuse_arguments,
    refuse_checkpoints,
    refuse_model,
    refuse_optim,
    refuse_other_than_runtime,
    require_adamw,
)
from tiermem.optim.adamw import AdamW
from tiermem.runtime import Runtime
from tiermem.stats import StepStatistics

try:
    import transformers
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers.trainer_utils import rotate_checkpoints

    from tiermem.integrations.unwrapped import UnwrappedTrainer
except ImportError as error:
    raise ImportError(
        "tiermem.integrations.trainer needs transformers 5.4 or newer and accelerate: pip install 'tiermem[hf]'"
    ) from error


class Trainer(UnwrappedTrainer):
    """`transformers.Trainer` for the model of a runtime; takes what that takes, and the runtime.

    With another trainer of that family it goes first: `class Mine(Trainer, trl.SFTTrainer)`, as `Seq2SeqTrainer` below.
    """

    def __init__(
        self, model: nn.Module | None = None, args: Any = None, *others: Any, runtime: Runtime, **named: Any
    ) -> None:
        """Everything but `runtime` goes to transformers' own.

        `model`: runtime.model, which may be left out. `optimizers`: a tiermem.AdamW and a scheduler, or nothing: both
        are then made from the arguments. Raises ConfigError for what README.md in this folder calls refused.
        """
        refuse_other_than_runtime(runtime)
        if named.get("model_init") is not None:
            raise ConfigError("model_init would make another model in train(); offload the one that is to be trained")
        model = runtime.model if model is None else model
        args = transformers.TrainingArguments("tmp_trainer") if args is None else args  # as transformers does
        refuse_model(model, runtime)
        refuse_arguments(args, runtime)
        refuse_checkpoints(args, runtime)
        self.runtime = runtime
        self._clipping: tuple[AdamW, float | None] | None = None  # in train(): whose max_grad_norm is lent, what it was
        self._logged = StepStatistics()
        ticket = Ticket.of_commit(runtime.committed)
        started = runtime.statistics().steps > 0
        self._state_of = None if ticket is None or started else (ticket, 0)  # what the pages hold, and after which step
        self._must_resume = self._state_of is not None
        super().__init__(model, args, *others, **named)
        if self.optimizer is not None:
            choose_clipping(require_adamw(self.optimizer).max_grad_norm, args.max_grad_norm)
        elif self.optimizer_cls_and_kwargs is None:
            refuse_optim(args)

    def train(self, resume_from_checkpoint: str | bool | None = None, *others: Any, **named: Any) -> Any:
        """As transformers'. A resume takes the model from the runtime, which must hold the state of that checkpoint.

        True: the checkpoint in `output_dir` that belongs to the runtime's commit. A folder that transformers' own
        Trainer has written is read instead, weights and moments, so that its run goes on.

        Raises:
            ResumeError: the runtime does not hold the state of that checkpoint; or it holds that of one, and is to
                begin anew.
        """
        if resume_from_checkpoint is True:
            ticket = Ticket.of_commit(self.runtime.committed)
            if ticket is None:
                raise ResumeError(
                    "resume_from_checkpoint=True, and the runtime holds no commit of a Trainer; offload the model with "
                    "resume=True (or 'auto') in the swap directories of that run"
                )
            resume_from_checkpoint = str(find_checkpoint(Path(str(self.args.output_dir)), ticket))
        if not resume_from_checkpoint and self._must_resume:
            raise ResumeError(
                "the runtime goes on from a Trainer's checkpoint, and train() was to begin anew with its weights and "
                "moments; pass resume_from_checkpoint=True, or, if that is meant, call runtime.commit().wait() and "
                "make the Trainer again"
            )
        try:
            return super().train(resume_from_checkpoint, *others, **named)
        finally:
            if self._clipping is not None:
                optimizer, own = self._clipping
                optimizer.max_grad_norm = own
                self._clipping = None

    def create_optimizer(self, *others: Any, **named: Any) -> Any:
        """As transformers', with tiermem.AdamW."""
        super().create_optimizer(*others, **named)
        self._begin()
        return self.optimizer

    def create_scheduler(self, *others: Any, **named: Any) -> Any:
        """As transformers'. By now there is an optimizer, also where a subclass makes one without asking us."""
        if self.is_in_train:
            self._begin()
        return super().create_scheduler(*others, **named)

    def _begin(self) -> None:
        """As training begins the optimizer learns how to clip, and forgets old gradients; twice does no harm."""
        optimizer: Any = self.optimizer
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        optimizer = require_adamw(optimizer)
        if self.is_in_train:
            if self._clipping is None:  # else the Trainer begins again within train(), with smaller batches
                self._clipping = (optimizer, optimizer.max_grad_norm)
            optimizer.max_grad_norm = self._max_norm(self._clipping[1])
            optimizer.zero_grad()  # the Trainer asks the model to, which has no .grad: those of a run broken off
            self._logged = self.runtime.statistics().total

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:  # noqa: ARG004
        """The optimizer of `args`: tiermem.AdamW. Raises ConfigError if another is asked for."""
        refuse_optim(args)
        return AdamW, {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}

    def log(self, logs: dict[str, float], *others: Any, **named: Any) -> None:
        """As transformers', with the true gradient norm, and what was moved since the last such line."""
        if "loss" in logs and self._clipping is not None:
            optimizer, _ = self._clipping
            logs.pop("grad_norm", None)  # transformers' own is of .grad: 0
            if optimizer.grad_norm is not None and optimizer.max_grad_norm is not None:
                logs["grad_norm"] = optimizer.grad_norm.item()
            total, before = self.runtime.statistics().total, self._logged
            for name in ("stall_seconds", "bytes_read", "bytes_written"):
                logs[f"tiermem/{name}"] = getattr(total, name) - getattr(before, name)
            self._logged = total
        super().log(logs, *others, **named)

    def _max_norm(self, own: float | None) -> float | None:
        """What the optimizer clips by in train(). Infinity clips nothing and has the norm known, as transformers does.

        Only update="backward" would pay for it, with updates that can be undone; there it stays unknown.
        """
        chosen = choose_clipping(own, self.args.max_grad_norm)
        return float("inf") if chosen is None and self.runtime.config.update != "backward" else chosen

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As transformers', in all processes, which have to call it; not all of its versions do more than the first."""
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Weights by `Runtime.save_pretrained`, so in all processes; the rest as transformers does."""
        if state_dict is not None:
            raise TiermemError("expected to save the weights of the runtime, found a state_dict given; leave it out")
        folder = Path(str(output_dir or self.args.output_dir))
        export_weights(self.runtime, folder)
        by_first("save what stands beside the weights", lambda: self._save_beside(folder))
        if is_of_peft(self.runtime.model):
            export_adapters(self.runtime, folder)

    def _save_beside(self, folder: Path) -> None:
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        torch.save(self.args, folder / "training_args.bin")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As transformers', and a commit of the runtime that belongs to it. Earlier ones go when it is durable.

        Of several processes each writes its random states and its part of the commit, the first all else, and none is a
        step ahead of the others.
        """
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        committed, save = Ticket.of_commit(self.runtime.committed), super()._save_checkpoint
        replaced = by_first("begin a checkpoint", lambda: set_aside(folder, committed))
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # what is committed may be the oldest
        try:
            together("save a checkpoint", lambda: save(model, trial))
        finally:
            self.args.save_total_limit = limit
        ticket = by_first("finish a checkpoint", lambda: self._seal(folder))
        if ticket is not None:
            self.runtime.commit(ticket.extra).wait()
            self._state_of = (ticket, self.runtime.statistics().steps)
        by_first("remove earlier checkpoints", lambda: self._clear(folder.parent, replaced))

    def _seal(self, folder: Path) -> Ticket | None:
        """Complete a checkpoint whose files are there: the ticket for its commit, if it is to have one."""
        torch.save(self.args, folder / "training_args.bin")  # as they are: while it was saved they had no limit
        if self.args.save_only_model:
            return None
        ticket = Ticket.new(folder, self.state.global_step)
        ticket.write(folder)
        make_durable(folder)
        return ticket

    def _clear(self, output_dir: Path, replaced: Path) -> None:
        """Remove what the commit that is now durable has no need of."""
        if not self.args.save_only_model:
            shutil.rmtree(replaced, ignore_errors=True)
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        rotate_checkpoints(str(output_dir), save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:  # noqa: ARG002
        """Nothing is read: the pages hold it already. Raises ResumeError if they do not.

        Of a checkpoint that transformers' own Trainer made the weights are read here; moments come with the optimizer.
        """
        folder = Path(resume_from_checkpoint)
        found = Ticket.of_folder(folder)
        if found is None:
            if not has_moments(folder):
                raise ResumeError(
                    f"{resume_from_checkpoint!r} belongs to no commit of a runtime: {why_no_ticket(folder)}. It has "
                    "weights at most: to begin anew from them, offload the model with weights= and leave "
                    "resume_from_checkpoint out"
                )
            if self._must_resume:
                raise ResumeError(
                    f"{resume_from_checkpoint!r} was made by transformers' own Trainer, and the runtime goes on from a "
                    "checkpoint of its own; offload the model with resume=False to begin from that folder"
                )
            load_weights(self.runtime, folder)
            return
        held, steps = self._state_of or (Ticket.of_commit(self.runtime.committed), None)
        if held != found or steps != self.runtime.statistics().steps:
            name = "no checkpoint" if held is None else held.checkpoint
            since = "" if steps == self.runtime.statistics().steps else ", and has been trained or changed since"
            raise ResumeError(
                f"{resume_from_checkpoint!r} is to be resumed, and the runtime holds the state of {name}{since}. A "
                "commit is of the last checkpoint only: offload the model with resume=True and pass "
                "resume_from_checkpoint=True"
            )
        self._must_resume = False

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As transformers', but that moments stay in their file until they are taken, one after the other."""
        if checkpoint is not None:
            load_optimizer(Path(checkpoint), self.optimizer, self.lr_scheduler, mapped=True)

    def _load_best_model(self) -> None:
        """Weights of the best checkpoint, into pages, layer by layer."""
        load_weights(self.runtime, Path(str(self.state.best_model_checkpoint)))
        self._state_of = None


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` for the model of a runtime: as `Trainer`, with generation in evaluation."""

    def evaluate(self, *others: Any, **named: Any) -> dict[str, float]:
        """As transformers'; of several processes the first to have generated its part goes on until all have."""
        metrics: dict[str, float] = super().evaluate(*others, **{"synced_gpus": joined() > 1, **named})
        return metrics

    def predict(self, *others: Any, **named: Any) -> Any:
        """As `evaluate`."""
        return super().predict(*others, **{"synced_gpus": joined() > 1, **named})
