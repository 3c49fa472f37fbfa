"""What ranks do in the tests of the Trainer: one script on transformers' own with DDP, and on an offloaded model.

tiermem rounds two things otherwise, so the references are transformers' Trainer with that one thing changed. The norm
is joined from the ranks' parts of each gradient: the references clip by the norms that the offloaded run had, and hold
them to their own (`Given`). And at stages 2 and 3 the mean over ranks is taken of each micro-batch, where DDP takes it
of their sum (`EachBatch`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import transformers
from doubles_combinations import number_of, some_of
from doubles_rank_idioms import told
from doubles_rank_scenarios import parameters_of
from doubles_ranks import STALL
from doubles_trainer import Trained, arguments, data, llama, plain, trained
from torch import nn
from transformers import Seq2SeqTrainingArguments, TrainerCallback

import tiermem
from tiermem.integrations.checkpoints import KEY
from tiermem.integrations.trainer import Seq2SeqTrainer, Trainer

ROWS = 10
# Three batches an epoch on each of two ranks, the last with rows of the first, two of them an update: the second update
# of an epoch has one.
RUN: dict[str, Any] = {
    "max_steps": 5,
    "gradient_accumulation_steps": 2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "per_device_eval_batch_size": 4,
}
# Of three, which have two batches an epoch, no more than one resume needs.
THREE = RUN | {"max_steps": number_of(3, 5), "eval_steps": number_of(2, 3)}


def counted(answers: transformers.EvalPrediction) -> dict[str, float]:
    """What depends on each row, and on how many there are."""
    right = answers.predictions.argmax(-1)[:, :-1] == answers.label_ids[:, 1:]
    return {"right": float(right.mean()), "rows": len(right), "sum": float(np.abs(answers.predictions).sum())}


class Given(transformers.Trainer):
    """transformers' own, which clips by given norms, of one step after the other; its own differ in the last bits."""

    def __init__(self, *others: Any, norms: list[float], **named: Any) -> None:
        self.norms = norms
        super().__init__(*others, **named)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.clip_grad_norm_ = self._clip  # type: ignore[method-assign]

    def _clip(self, parameters: Any, max_norm: float) -> torch.Tensor:
        gradients = [parameter for parameter in parameters if parameter.grad is not None]
        own = torch.nn.utils.get_total_norm([parameter.grad for parameter in gradients])
        norm = torch.tensor(self.norms[self.state.global_step])
        torch.testing.assert_close(norm, own, rtol=1e-6, atol=0)
        torch.nn.utils.clip_grads_with_norm_(gradients, max_norm, norm)
        return norm


class EachBatch(Given):
    """And without DistributedDataParallel: gradients are averaged behind each micro-batch, and then added up."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        prepare = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.accelerator.prepare_model = prepare  # type: ignore[method-assign]

    def training_step(self, model: nn.Module, *others: Any, **named: Any) -> torch.Tensor:
        kept = [parameter.grad for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
        loss = super().training_step(model, *others, **named)
        for parameter, earlier in zip(model.parameters(), kept, strict=True):
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
            if earlier is not None:
                parameter.grad.add_(earlier)
        return loss


def dropping() -> nn.Module:
    """Dropout draws random numbers in every step."""
    return llama(layers=1, attention_dropout=0.2)


def offloaded(
    directory: Path, make: Callable[[], nn.Module] = dropping, *, resume: Any = False, **settings: Any
) -> tiermem.Runtime:
    """Under a budget that does not hold a rank's part of it."""
    swap = directory / "swap"
    swap.mkdir(exist_ok=True, parents=True)
    there = {"param_dtype": "float32", "update": "forward", "stall_timeout": STALL, "device": "cpu", "poison": True}
    config = tiermem.Config(swap_dirs=[swap], **there | {"host_memory": "48KiB"} | settings)
    return tiermem.offload(make(), config, resume=resume, coalesce=0)


def paged(
    directory: Path,
    *,
    make: Callable[[], nn.Module] = dropping,
    kind: type[Trainer] = Trainer,
    how: dict[str, Any],
    script: Callable[[Any], None] = lambda trainer: trainer.train(),
    resume: Any = False,
    named: dict[str, Any] | None = None,
    arguments_kind: Any = transformers.TrainingArguments,
    **settings: Any,
) -> Trained:
    """The run with an offloaded model; `how`: of the Config."""
    args = arguments(directory / "out", arguments_kind, **settings)
    with offloaded(directory, make, resume=resume, **how) as runtime:
        given = {"train_dataset": data(ROWS), "eval_dataset": data(11)} | (named or {})
        trainer = kind(args=args, runtime=runtime, **given)
        script(trainer)
        return trained(trainer, parameters_of(runtime))


def plainly(directory: Path, kind: type[Given], found: Trained, *, named: Any = None, **settings: Any) -> Trained:
    """The same on transformers' own, with the norms of `found`."""
    norms = [line["grad_norm"] for line in found.history if "loss" in line]
    named = {"norms": norms, "train_dataset": data(ROWS), "eval_dataset": data(11)} | (named or {})
    return plain(directory, kind=kind, make=dropping, named=named, **settings)


def sharing(rank: int, size: int, directory: Path, name: str) -> Path:
    """A folder that all ranks of a scenario have, and that outlives it."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.environ.update({"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)})
    return directory.parent / name


class KilledError(Exception):
    pass


class Killer(TrainerCallback):
    """Ends a run as the power does: nobody saves anything more."""

    def __init__(self, step: int = -1) -> None:
        self.step = step

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KilledError


def empty() -> nn.Module:
    """As after a restart: no weights, and none can be guessed."""
    with tiermem.deferred_init():
        return llama(9, layers=1, attention_dropout=0.2)


METRICS = {"compute_metrics": counted}


def at_stage(stage: int) -> Callable[[Path, int, int], Any]:
    """Accumulation with a remainder, a schedule, clipping, evaluation with metrics; all of an uneven data set."""

    def scenario(directory: Path, rank: int, size: int) -> Any:
        folder = sharing(rank, size, directory, "whole")
        reference = Given if stage == 1 else EachBatch
        settings = RUN if size == 2 else THREE
        found = paged(folder, how={"stage": stage}, named=METRICS, **settings)
        result = {"found": found, "expected": plainly(folder / "plain", reference, found, named=METRICS, **settings)}
        return result | ({"continued": begun_elsewhere(folder, found)} if stage == 1 else {})

    scenario.__name__ = f"trainer_stage_{stage}"
    return scenario


def begun_elsewhere(folder: Path, found: Trained) -> Trained:
    """A run of transformers' own, broken off after a checkpoint in the middle of an epoch, goes on at stage 1."""
    settings = RUN | {"save_strategy": "steps", "save_steps": 3}
    killed = told(lambda: plainly(folder, Given, found, named=METRICS | {"callbacks": [Killer(4)]}, **settings))
    assert killed.startswith("KilledError")

    def script(trainer: Trainer) -> None:
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))

    return paged(folder, make=empty, how={"stage": 1}, script=script, named=METRICS, **settings)


def trainer_best(directory: Path, rank: int, size: int) -> Any:
    """Without accumulation, updated under backward; the last is not the best, and both are saved."""
    folder = sharing(rank, size, directory, "best")
    settings = RUN | {"gradient_accumulation_steps": 1, "learning_rate": 1.0, "max_steps": 4}
    settings |= {"save_strategy": "steps", "save_steps": 2, "eval_steps": 2, "load_best_model_at_end": True}

    def script(trainer: Trainer) -> None:
        trainer.train()
        trainer.save_model(str(folder / "saved"))

    found = paged(folder, how={"update": "backward"}, script=script, **settings)
    saved = transformers.LlamaForCausalLM.from_pretrained(folder / "saved")
    weights = {name: values.detach() for name, values in saved.named_parameters()}
    expected = plainly(folder / "plain", Given, found, **settings)
    return {"found": found, "expected": expected, "saved": Trained([], weights)}


# Where the run is broken off, one time after the other: what replaces which method, in which step, in which process.
DEATHS: dict[str, tuple[Any, str, int, int | None]] = {
    "saved": (Trainer, "_seal", 2, 0),
    "one has not saved": (Trainer, "_save_rng_state", 3, 1),
    "sealed": (tiermem.Runtime, "commit", 4, None),
    "committed": (Trainer, "_clear", 4, 0),
    "in a step": (Killer, "on_substep_end", 4, None),
}
# That three go on as two do is shown by one of them.
OF_THREE = some_of(["in a step"], set(DEATHS) - {"in a step"})


def dying(when: str, rank: int, last: int) -> Callable[..., Any]:
    """What does it, in a run whose `last` step is an earlier one, too."""
    owner, name, fatal_step, only = DEATHS[when]
    fatal_step -= RUN["max_steps"] - last
    real = getattr(owner, name)

    def call(first: Any, *others: Any, **named: Any) -> Any:
        ticket = others[0][KEY] if isinstance(first, tiermem.Runtime) else None
        state = others[1] if isinstance(first, Killer) else getattr(first, "state", None)
        step = ticket["global_step"] if ticket else state.global_step
        if step == fatal_step and only in (None, rank):
            raise KilledError(when)
        return real(first, *others, **named)

    return call


def trainer_killed(directory: Path, rank: int, size: int) -> Any:
    """Broken off again and again, in the middle of an epoch and while checkpoints are made."""
    folder = sharing(rank, size, directory, "killed")
    settings = RUN if size == 2 else THREE
    settings = settings | {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}

    def script(trainer: Trainer) -> None:
        trainer.train(resume_from_checkpoint=trainer.runtime.committed is not None)

    def attempt() -> Trained:
        named = METRICS | {"callbacks": [Killer()]}
        return paged(folder, make=make, how={}, script=script, resume="auto", named=named, **settings)

    def left() -> list[str]:
        return sorted(path.name for path in (folder / "out").iterdir())

    found, make = {}, dropping
    for when in [when for when in DEATHS if size == 2 or when in OF_THREE]:
        owner, name, *_ = DEATHS[when]
        with mock.patch.object(owner, name, dying(when, rank, settings["max_steps"])):
            found[when] = {"error": told(attempt), "left": left()}
        make = empty
    return {"deaths": found, "run": attempt(), "left": left()}


def trainer_alone(directory: Path, rank: int, size: int) -> Any:
    """What the first cannot do, and what it does alone: errors for both."""
    folder = sharing(rank, size, directory, "alone")
    args = arguments(folder / "out")
    (folder / "file").parent.mkdir(exist_ok=True)
    (folder / "file").touch()
    with offloaded(folder) as runtime:
        trainer = Trainer(args=args, runtime=runtime)
        some = next(runtime.model.parameters())
        refused = told(lambda: trainer.save_model(str(folder / "file" / "model")))
        return [refused, told(lambda: trainer.save_model() if rank == 0 else runtime.parameter(some))]


def trainer_generates(directory: Path, rank: int, size: int) -> Any:
    """Ranks that generate different numbers of tokens."""
    folder = sharing(rank, size, directory, "generating")

    def t5() -> nn.Module:
        torch.manual_seed(1)
        shape = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0)
        )
        model.generation_config.eos_token_id = list(range(0, 64, 2))  # of which most rows have one at once
        return model

    answers = []

    def script(trainer: transformers.Seq2SeqTrainer) -> None:
        answer = trainer.predict(trainer.eval_dataset)
        answers.append([answer.predictions.tolist(), answer.metrics["test_loss"]])

    settings = {"predict_with_generate": True, "generation_max_length": 6, "per_device_eval_batch_size": 1}
    how = {"make": t5, "script": script, "arguments_kind": Seq2SeqTrainingArguments}
    named = {"eval_dataset": data(3)}
    paged(folder, how={"host_memory": "1MiB"}, kind=Seq2SeqTrainer, named=named, **how, **settings)
    plain(folder / "plain", kind=transformers.Seq2SeqTrainer, named=named, **how, **settings)
    return answers


def trainer_adapters(directory: Path, rank: int, size: int) -> Any:
    """LoRA with dropout around a frozen offloaded model, accumulated, broken off and resumed."""
    import peft

    from tiermem.integrations.adapters import AdapterTrainer

    folder = sharing(rank, size, directory, "adapters")
    settings = RUN | {"save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.1}

    def lora(base: nn.Module, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(base, config)

    def run(kind: type[transformers.Trainer], model: nn.Module, out: Path, named: Any, resume: Any = None) -> Trained:
        args = arguments(out, **settings)
        trainer = kind(model, args, train_dataset=data(ROWS), eval_dataset=data(11), **named)
        trainer.train(resume_from_checkpoint=resume)
        return trained(trainer, {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})

    base = functools.partial(llama, layers=1)
    expected = run(transformers.Trainer, lora(base(), 7), folder / "plain", {})
    with offloaded(folder, base) as runtime:
        model = lora(runtime.model, 7 + rank)  # all begin with those of the first, as in DDP
        named = {"runtime": runtime, "callbacks": [Killer(4)]}
        killed = told(lambda: run(AdapterTrainer, model, folder / "out", named))
    with offloaded(folder, base) as runtime:
        model = lora(runtime.model, 9)
        found = run(AdapterTrainer, model, folder / "out", {"runtime": runtime}, str(folder / "out" / "checkpoint-3"))
    return {"found": found, "expected": expected, "killed": killed}


def trainer_prompts(directory: Path, rank: int, size: int) -> Any:
    """Prompts that were offloaded with their model: peft saves what they compute."""
    import peft

    folder = sharing(rank, size, directory, "prompts")

    def make() -> nn.Module:
        base = llama()
        return peft.get_peft_model(base, peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2))

    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    found = paged(folder, make=make, how={}, **settings)
    saved = peft.PeftModel.from_pretrained(llama(), folder / "out" / "checkpoint-2")
    return {"found": found, "saved": Trained([], {name: values.detach() for name, values in saved.named_parameters()})}


SCENARIOS: dict[str, Callable[[Path, int, int], Any]] = {
    function.__name__: function
    for function in (
        *map(at_stage, (1, 2, 3)),
        trainer_best,
        trainer_killed,
        trainer_alone,
        trainer_generates,
        trainer_adapters,
        trainer_prompts,
    )
}
