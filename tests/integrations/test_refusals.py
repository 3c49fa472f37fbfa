"""What a Trainer cannot do with an offloaded model is refused when the Trainer is made, with what to do instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from doubles_trainer import arguments, data, llama, runtime_for
from transformers import TrainingArguments

import tiermem
from tiermem import ConfigError
from tiermem.integrations.refusals import choose_clipping, refuse_arguments
from tiermem.integrations.trainer import Trainer


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tiermem.Runtime]:
    with runtime_for(tmp_path_factory.mktemp("run")) as runtime:
        yield runtime


class SeveralProcesses(TrainingArguments):
    world_size = 2


class SeveralGpus(TrainingArguments):
    n_gpu = 2


class Elsewhere(TrainingArguments):
    @property
    def device(self) -> torch.device:
        assert super().device == torch.device("cpu")
        return torch.device("meta")


class Numbered(TrainingArguments):
    @property
    def device(self) -> torch.device:
        return torch.device(super().device.type, 0)


class Engine(TrainingArguments):
    """What DeepSpeed's own code would look for need not be there."""

    def __init__(self, *given: Any, engine: str, **named: Any) -> None:
        super().__init__(*given, **named)
        setattr(self, engine, {"some": "configuration"})


class OfTrl(TrainingArguments):
    """trl's DPOConfig and GRPOConfig have it; its callback reads parameters between steps."""

    sync_ref_model = True


ARGUMENTS = {
    "fp16": (TrainingArguments, {"fp16": True}, "fp16=True.*bf16=True"),
    "bf16_full_eval": (TrainingArguments, {"bf16_full_eval": True}, "keeps its dtype"),
    "fp16_full_eval": (TrainingArguments, {"fp16_full_eval": True}, "keeps its dtype"),
    "enable_jit_checkpoint": (TrainingArguments, {"enable_jit_checkpoint": True}, "between backward and step"),
    "debug": (TrainingArguments, {"debug": "underflow_overflow"}, "read as NaN"),
    "another optimizer": (TrainingArguments, {"optim": "adafactor"}, "found 'adafactor'; tiermem has AdamW only"),
    "several processes": (
        SeveralProcesses,
        {},
        "found world_size=2, where 1 processes have joined.*start them by torchrun",
    ),
    "several GPUs": (SeveralGpus, {}, "found 2 GPUs in one process"),
    "trl's sync_ref_model": (OfTrl, {}, "sync_ref_model=True.*read as NaN"),
    "another device": (Elsewhere, {}, "found device meta, and a runtime that computes on cpu"),
    "deepspeed": (Engine, {"engine": "deepspeed"}, "found deepspeed=.*nobody else can divide it"),
    "fsdp": (Engine, {"engine": "fsdp"}, "found fsdp="),
    "parallelism_config": (Engine, {"engine": "parallelism_config"}, "found parallelism_config="),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str, runtime: tiermem.Runtime, tmp_path: Path) -> None:
    kind, settings, message = ARGUMENTS[name]
    args, before = arguments(tmp_path / "out", kind, **settings), runtime.statistics().steps  # others train it
    with pytest.raises(ConfigError, match=message):
        Trainer(args=args, train_dataset=data(), runtime=runtime).train()
    assert runtime.statistics().steps == before


def test_a_device_is_the_same_with_its_number(runtime: tiermem.Runtime, tmp_path: Path) -> None:
    refuse_arguments(arguments(tmp_path / "out", Numbered), runtime)


def several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)


def test_processes_that_the_environment_does_not_tell_of(
    runtime: tiermem.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of torch.multiprocessing.spawn: each would take itself for the only one, and train on the same rows."""
    args = arguments(tmp_path / "out")
    several(monkeypatch)
    assert args.world_size == 1
    with pytest.raises(ConfigError, match=r"found world_size=1, where 2 processes have joined"):
        Trainer(args=args, train_dataset=data(), runtime=runtime)


def test_a_model_that_was_offloaded_before_processes_joined(
    runtime: tiermem.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(tmp_path / "out", SeveralProcesses)
    several(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"found world_size=2, and a model that was offloaded by 1: make TrainingArguments"
    ):
        Trainer(args=args, train_dataset=data(), runtime=runtime)


@pytest.mark.parametrize("name", ["save_on_each_node", "auto_find_batch_size", "ddp_broadcast_buffers"])
def test_what_one_of_several_processes_would_do_by_itself(
    name: str, runtime: tiermem.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(tmp_path / "out", SeveralProcesses, **{name: True})
    refuse_arguments(arguments(tmp_path / "out", **{name: True}), runtime)
    several(monkeypatch)
    told = dataclasses.replace(runtime.statistics(), ranks=2)
    monkeypatch.setattr(tiermem.Runtime, "statistics", lambda _: told)
    with pytest.raises(ConfigError, match=rf"found {name}=True"):
        Trainer(args=args, train_dataset=data(), runtime=runtime)


@pytest.mark.parametrize("found", [None, "model"])
def test_another_thing_than_a_runtime(found: str | None, runtime: tiermem.Runtime, tmp_path: Path) -> None:
    given: Any = None if found is None else runtime.model
    with pytest.raises(
        ConfigError, match=r"runtime: expected what tiermem\.offload has returned, found a (None|Llama)"
    ):
        Trainer(args=arguments(tmp_path / "out"), train_dataset=data(), runtime=given)


def test_an_optimizer_that_finds_no_gradients(runtime: tiermem.Runtime, tmp_path: Path) -> None:
    parameters = runtime.model.parameters()
    sgd = torch.optim.SGD(parameters, lr=1e-3)
    with pytest.raises(
        ConfigError, match=r"expected a tiermem.AdamW for an offloaded model, found torch.optim.sgd.SGD"
    ):
        Trainer(args=arguments(tmp_path), runtime=runtime, optimizers=(sgd, None))
    trainer = Trainer(
        args=arguments(tmp_path), runtime=runtime, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 1.0})
    )
    with pytest.raises(ConfigError, match=r"found torch.optim.sgd.SGD"):
        trainer.create_optimizer()


def test_two_words_about_clipping(runtime: tiermem.Runtime, tmp_path: Path) -> None:
    optimizer = tiermem.AdamW(runtime.model.parameters(), max_grad_norm=0.5)
    with pytest.raises(ConfigError, match=r"AdamW has max_grad_norm=0.5, TrainingArguments have max_grad_norm=1.0"):
        Trainer(args=arguments(tmp_path, max_grad_norm=1.0), runtime=runtime, optimizers=(optimizer, None))
    Trainer(args=arguments(tmp_path, max_grad_norm=0.5), runtime=runtime, optimizers=(optimizer, None))
    Trainer(args=arguments(tmp_path, max_grad_norm=0), runtime=runtime, optimizers=(optimizer, None))


@pytest.mark.parametrize(
    ("own", "asked", "chosen"),
    [(None, 1.0, 1.0), (None, 0, None), (None, None, None), (None, -1.0, None), (2.0, 0, 2.0), (2.0, 2.0, 2.0)],
)
def test_who_says_how_to_clip(own: float | None, asked: float | None, chosen: float | None) -> None:
    assert choose_clipping(own, asked) == chosen


def test_another_model(runtime: tiermem.Runtime, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected the model that was offloaded, a LlamaForCausalLM, found a Linear"):
        Trainer(torch.nn.Linear(2, 2), arguments(tmp_path), runtime=runtime)
    with pytest.raises(ConfigError, match="model_init would make another model"):
        Trainer(args=arguments(tmp_path), runtime=runtime, model_init=llama)


def test_a_part_that_is_not_offloaded_and_a_closed_runtime(tmp_path: Path) -> None:
    with runtime_for(tmp_path) as runtime:
        runtime.model.added = torch.nn.Linear(2, 2)
        with pytest.raises(ConfigError, match=r"parameter added.weight was put on after tiermem.offload"):
            Trainer(args=arguments(tmp_path), runtime=runtime)
        del runtime.model.added
    with pytest.raises(ConfigError, match="or the runtime is closed"):
        Trainer(args=arguments(tmp_path), runtime=runtime)


def test_nothing_is_closed(runtime: tiermem.Runtime, tmp_path: Path) -> None:
    trainer = Trainer(args=arguments(tmp_path), train_dataset=data(), runtime=runtime)
    trainer.train()
    # What it does is done, where transformers has no name for it yet (before 5.20).
    end = getattr(trainer, "end", trainer.accelerator.end_training)
    end()
    del trainer
    runtime.settle()  # an error if it were closed


def test_a_state_dict_given_to_save(runtime: tiermem.Runtime, tmp_path: Path) -> None:
    with pytest.raises(tiermem.TiermemError, match="found a state_dict given"):
        Trainer(args=arguments(tmp_path), runtime=runtime)._save(str(tmp_path), state_dict={})


def test_transformers_itself_is_what_is_extended(runtime: tiermem.Runtime, tmp_path: Path) -> None:
    assert isinstance(Trainer(args=arguments(tmp_path), runtime=runtime), transformers.Trainer)


@pytest.mark.parametrize(("own", "asked"), [(2.0, 1.0), (1.0, 2.0)])
def test_two_norms_to_clip_by_are_one_too_many_whichever_is_larger(own: float, asked: float) -> None:
    with pytest.raises(ConfigError, match="leave it out in AdamW"):
        choose_clipping(own, asked)
