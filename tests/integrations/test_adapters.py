"""Adapters by peft around an offloaded model, trained by a Trainer: as around a plain one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from doubles_trainer import Trained, arguments, check, data, llama, runtime_for, trained
from doubles_training import budget_for, config_for
from torch import nn

import swap
import tiermem
from tiermem import ConfigError, ResumeError
from tiermem.integrations.adapters import AdapterTrainer
from tiermem.integrations.trainer import Trainer

# transformers calls a name of its own that it has deprecated, from inside peft's.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning")

RUN: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


def lora(base: nn.Module, rank: int = 2, **more: Any) -> nn.Module:
    torch.manual_seed(7)
    how = {"lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | more
    return peft.get_peft_model(base, peft.LoraConfig(r=rank, **how))


def run(
    kind: type[transformers.Trainer], base: nn.Module, directory: Path, resume: Any, named: Any, **more: Any
) -> Trained:
    model = lora(base)
    args = arguments(directory / "out", **RUN | more)
    trainer = kind(model, args, train_dataset=data(), eval_dataset=data(6), **named)
    trainer.train(resume_from_checkpoint=resume)
    return trained(trainer, {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})


def paged(directory: Path, resume: Any = None, **more: Any) -> Trained:
    with runtime_for(directory) as runtime:
        found = run(AdapterTrainer, runtime.model, directory, resume, {"runtime": runtime}, **more)
        assert runtime.statistics().steps == 0, "nothing paged was updated"
        return found


def plain(directory: Path, **more: Any) -> Trained:
    return run(transformers.Trainer, llama(), directory, None, {}, **more)


def test_adapters_are_trained_saved_and_resumed_as_on_plain_pytorch(tmp_path: Path) -> None:
    expected = plain(tmp_path / "plain")
    check(paged(tmp_path / "paged"), expected)
    resumed = paged(tmp_path / "paged", resume=str(tmp_path / "paged" / "out" / "checkpoint-2"))
    assert resumed.history[:-1] == expected.history[:-1]
    check(Trained([], resumed.weights), Trained([], expected.weights))
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "paged" / "out" / "checkpoint-4")
    saved = {name: values for name, values in loaded.named_parameters() if name in expected.weights}
    check(Trained([], saved), Trained([], expected.weights))


def test_the_best_adapters_at_the_end(tmp_path: Path) -> None:
    settings = {"load_best_model_at_end": True, "learning_rate": 1.0, "max_steps": 8}
    found = paged(tmp_path / "paged", **settings)
    check(found, plain(tmp_path / "plain", **settings))
    losses = [line["eval_loss"] for line in found.history if "eval_loss" in line]
    assert min(losses) < losses[-1]


def test_adapters_that_were_offloaded_with_their_base_are_saved_as_peft_reads_them(tmp_path: Path) -> None:
    """By the Trainer for all of a model: the names of its weights are those of no plain model. What is frozen has no
    room on SWAP for what it is already, as the best weights are read beside a commit. Memory has none for all layers.
    """
    model = lora(llama(layers=6), modules_to_save=["norm"])
    least = config_for(tmp_path, budget_for(model, tmp_path, "least"), "forward")
    with tiermem.offload(model, least, coalesce=0) as runtime:
        with pytest.raises(tiermem.CapacityError), runtime.gathered(p for p in model.parameters() if p.requires_grad):
            pass
        args = arguments(tmp_path / "out", **RUN | {"load_best_model_at_end": True, "max_steps": 2})
        Trainer(args=args, train_dataset=data(), eval_dataset=data(4), runtime=runtime).train()
        Trainer(args=args, eval_dataset=data(4), runtime=runtime).save_model(str(tmp_path / "saved"))
        expected = {name: runtime.parameter(parameter) for name, parameter in runtime.model.named_parameters()}
    for folder in (tmp_path / "out" / "checkpoint-2", tmp_path / "saved"):
        loaded = peft.PeftModel.from_pretrained(llama(layers=6), folder)
        check(Trained([], dict(loaded.named_parameters())), Trained([], expected))


def test_what_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out")
    with runtime_for(tmp_path) as runtime:
        with pytest.raises(ConfigError, match="expected adapters around the model that was offloaded"):
            AdapterTrainer(lora(llama()), args, runtime=runtime)
        with pytest.raises(ConfigError, match=r"parameter model.embed_tokens.weight is offloaded and to be trained"):
            AdapterTrainer(runtime.model, args, runtime=runtime)
        model = lora(runtime.model)
        weight = next(each for each in model.parameters() if each.requires_grad)
        kept = weight.detach().clone()
        nn.init.constant_(weight, torch.nan)
        with pytest.raises(ConfigError, match=r"finite values in .*lora_A.*, found NaN.*runtime\.gathered"):
            AdapterTrainer(model, args, runtime=runtime)
        weight.data.copy_(kept)
        with pytest.raises(ConfigError, match="AdapterTrainer"):
            Trainer(model, args, runtime=runtime)
        with pytest.raises(ConfigError, match="fp16=True"):
            AdapterTrainer(model, arguments(tmp_path / "out", fp16=True), runtime=runtime)
        trainer = AdapterTrainer(model, args, train_dataset=data(), runtime=runtime)
        (tmp_path / "none").mkdir()
        with pytest.raises(ResumeError, match=r"expected adapter_model.safetensors"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "none"))
        (tmp_path / "none" / "adapter_model.safetensors").write_bytes(b"cut short")
        with pytest.raises(swap.FormatError, match=r"adapter_model\.safetensors' to be a whole safetensors file"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "none"))
        AdapterTrainer(model, args, runtime=runtime).save_model(str(tmp_path / "saved"))
        with runtime_for(tmp_path / "other") as other:
            wider = AdapterTrainer(lora(other.model, rank=3), args, train_dataset=data(), runtime=other)
            with pytest.raises(ResumeError, match="holds other adapters than this model"):
                wider.train(resume_from_checkpoint=str(tmp_path / "saved"))
