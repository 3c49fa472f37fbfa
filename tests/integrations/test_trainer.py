"""A Trainer script on an offloaded model against the same script on plain PyTorch: bit for bit, what is logged too."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from doubles_trainer import Trained, arguments, check, paged, plain, runtime_for
from transformers import Seq2SeqTrainingArguments, TrainerCallback

import tiermem
from tiermem.integrations.trainer import Seq2SeqTrainer, Trainer

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1}
# As newer versions of transformers call it, and as older ones do.
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in inspect.signature(transformers.TrainingArguments).parameters
)
SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes, clipping by 1.0": {"max_grad_norm": 1.0},
    "without clipping": {"max_grad_norm": 0},
    "accumulation with a remainder, a schedule, decay, evaluation": {
        "gradient_accumulation_steps": 3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_steps": 5,
        **EVERY_STEP,
    },
    "epochs, evaluation first": {"num_train_epochs": 1, "max_steps": -1, "eval_on_start": True},
    "autocast": {"bf16": True, **EVERY_STEP},
    "activation checkpointing": {CHECKPOINTING: True},
    "noise on embeddings, smooth labels": {"neftune_noise_alpha": 5.0, "label_smoothing_factor": 0.1},
    "a plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss", **EVERY_STEP},
    "tokens counted, logs now and then": {"include_num_input_tokens_seen": "all", "logging_steps": 3},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_arguments(name: str, tmp_path: Path) -> None:
    settings = SETTINGS[name]
    check(paged(tmp_path / "paged", **settings), plain(tmp_path / "plain", **settings))


ACCUMULATED: dict[str, Any] = {"gradient_accumulation_steps": 2, **EVERY_STEP}


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """By plain PyTorch."""
    return plain(tmp_path_factory.mktemp("plain"), **ACCUMULATED)


@pytest.mark.parametrize("update", ["step", "backward", "auto"])
def test_schedules_of_the_update(update: str, accumulated: Trained, tmp_path: Path) -> None:
    check(paged(tmp_path, update=update, **ACCUMULATED), accumulated)


def test_a_scheduler_and_an_optimizer_of_ones_own_with_groups(tmp_path: Path) -> None:
    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        first, *others = model.parameters()
        return [{"params": others, "lr": 3e-3}, {"params": [first], "weight_decay": 0.3}]

    def given(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.3))}

    class Own(Trainer):
        def __init__(self, **named: Any) -> None:
            adamw = tiermem.AdamW(groups(named["runtime"].model), lr=1e-2, max_grad_norm=0.1)
            super().__init__(**named, **given(adamw))

    class Plain(transformers.Trainer):
        def __init__(self, model: torch.nn.Module, args: Any, **named: Any) -> None:
            adamw = torch.optim.AdamW(groups(model), lr=1e-2, fused=True)
            super().__init__(model, args, **named, **given(adamw))

    expected = plain(tmp_path / "plain", kind=Plain)
    check(paged(tmp_path / "paged", kind=Own), expected)
    # 0 leaves the norm to the optimizer
    check(paged(tmp_path / "again", kind=Own, max_grad_norm=0), expected)


def _by_layers(trainer: transformers.Trainer, adamw: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Groups as scripts make them that have another learning rate for each layer."""
    if trainer.optimizer is None:
        parameters = enumerate(trainer.model.parameters())
        trainer.optimizer = adamw([{"params": [each], "lr": 1e-2 * 0.9**number} for number, each in parameters])
    return trainer.optimizer


class _PlainByLayers(transformers.Trainer):
    def create_optimizer(self, *others: Any) -> torch.optim.Optimizer:
        return _by_layers(self, functools.partial(torch.optim.AdamW, fused=True))


class _PagedByLayers(Trainer):
    def create_optimizer(self, *others: Any) -> torch.optim.Optimizer:
        return _by_layers(self, tiermem.AdamW)


def test_a_subclass_that_makes_the_optimizer_is_clipped_as_the_arguments_say(tmp_path: Path) -> None:
    check(paged(tmp_path / "paged", kind=_PagedByLayers), plain(tmp_path / "plain", kind=_PlainByLayers))


def test_gradients_of_a_run_broken_off_are_forgotten(tmp_path: Path) -> None:
    """transformers asks the model to forget them, which has none: they would be added to the next run's."""

    class Once(TrainerCallback):
        broken = False

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1 and not self.broken:
                self.broken = True
                raise KeyboardInterrupt

    def script(trainer: transformers.Trainer) -> None:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train()

    def both(run: Any, directory: Path) -> Trained:
        return run(directory, script=script, named={"callbacks": [Once()]}, gradient_accumulation_steps=2, max_steps=3)

    check(both(paged, tmp_path / "paged"), both(plain, tmp_path / "plain"))


def test_a_batch_size_that_is_found(tmp_path: Path) -> None:
    """Out of memory after the first backward: transformers begins again with smaller batches."""

    def short(kind: type[transformers.Trainer]) -> type[transformers.Trainer]:
        class Short(kind):  # type: ignore[valid-type, misc]
            calls = 0

            def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
                self.calls += 1
                loss = super().training_step(*given, **named)
                if self.calls == 1:
                    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate too much")
                return loss

        return Short

    settings = {"auto_find_batch_size": True, "max_grad_norm": 1.0}
    found = paged(tmp_path / "paged", kind=short(Trainer), **settings)
    check(found, plain(tmp_path / "plain", kind=short(transformers.Trainer), **settings))
    assert found.history[-1]["epoch"] == 4 / 16, "batches of one"


def test_generation_in_evaluation(tmp_path: Path) -> None:
    def t5() -> torch.nn.Module:
        torch.manual_seed(1)
        shape = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0)
        )

    found: list[list[Any]] = []

    def script(trainer: transformers.Seq2SeqTrainer) -> None:
        trainer.train()
        answer = trainer.predict(trainer.eval_dataset)
        found.append([answer.predictions.tolist(), answer.metrics["test_loss"]])

    how = {"kind": Seq2SeqTrainingArguments, "predict_with_generate": True, "generation_max_length": 7}
    settings = {"make": t5, "script": script, "arguments_kind": how.pop("kind"), **how, **EVERY_STEP}
    check(
        paged(tmp_path / "paged", kind=Seq2SeqTrainer, **settings),
        plain(tmp_path / "plain", kind=transformers.Seq2SeqTrainer, **settings),
    )
    assert found[0] == found[1]


def test_logs_say_what_was_moved(tmp_path: Path) -> None:
    seen: list[tiermem.Statistics] = []

    def script(trainer: Trainer) -> None:
        trainer.evaluate()
        seen.append(trainer.runtime.statistics())
        trainer.train()
        seen.append(trainer.runtime.statistics())

    lines = [line for line in paged(tmp_path, script=script, logging_steps=2).logs if "loss" in line]
    assert len(lines) == 2
    before, after = (each.total for each in seen)
    for name in ("stall_seconds", "bytes_read", "bytes_written"):
        logged = sum(line[f"tiermem/{name}"] for line in lines)
        assert 0 < logged <= getattr(after, name) - getattr(before, name), "what came before does not count"


def test_a_norm_that_is_not_known_is_not_logged_as_zero(tmp_path: Path) -> None:
    """Without clipping update="backward" uses gradients up; everywhere else the norm is logged as transformers does."""
    settings = {"max_grad_norm": 0}
    found, expected = paged(tmp_path / "paged", update="backward", **settings), plain(tmp_path / "plain", **settings)
    assert all("grad_norm" in line for line in expected.history if "loss" in line)
    assert not any("grad_norm" in line for line in found.history)
    for line in expected.history:
        line.pop("grad_norm", None)
    check(found, expected)


def test_the_optimizer_gets_its_own_norm_back(tmp_path: Path) -> None:
    def script(trainer: Trainer) -> None:
        trainer.create_optimizer()
        assert trainer.optimizer.max_grad_norm is None
        trainer.train()
        assert trainer.optimizer.optimizer.max_grad_norm is None

    def again(trainer: Trainer) -> None:
        script(trainer)
        trainer.args.max_grad_norm = 0.01  # a contradiction, if the first one had stayed
        trainer.train()

    plain_again = plain(tmp_path / "plain", script=_twice)
    check(paged(tmp_path / "paged", script=again), plain_again)


def _twice(trainer: transformers.Trainer) -> None:
    trainer.train()
    trainer.args.max_grad_norm = 0.01
    trainer.train()


class Between(transformers.Trainer):
    """As trl's DPOTrainer and GRPOTrainer: something of its own comes before the arguments."""

    def __init__(self, model: torch.nn.Module, reference: object = None, args: Any = None, **named: Any) -> None:
        super().__init__(model, args, **named)
        self.reference = reference


class OffloadedBetween(Trainer, Between):
    pass


def test_another_trainer_of_the_family_has_arguments_in_an_order_of_its_own(tmp_path: Path) -> None:
    with runtime_for(tmp_path) as runtime:
        args = arguments(tmp_path / "out")
        trainer = OffloadedBetween(args=args, reference="its own", runtime=runtime)
        assert (trainer.args, trainer.reference) == (args, "its own")
