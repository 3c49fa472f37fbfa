"""Adapters by peft around an offloaded model, trained by a Trainer: as around a plain one, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from doubles_trainer import Trained, arguments, check, data, llama, runtime_for, trained
from doubles_training import budget_for, config_for
from safetensors.torch import load_file
from torch import nn

import swap
import tiermem
from tiermem import ConfigError, ResumeError
from tiermem.integrations.adapter_files import adapter_state, load_adapters
from tiermem.integrations.adapters import AdapterTrainer
from tiermem.integrations.trainer import Trainer
from tiermem.registry import registry

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


def second_of_two(base: nn.Module) -> nn.Module:
    model = lora(base)
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["k_proj"], init_lora_weights=False))
    model.set_adapter("second")
    return model


def of_transformers(base: nn.Module) -> nn.Module:
    try:
        base.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    except ValueError as error:  # 5.24 asks for 0.22, which there is not yet
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(f"this transformers takes no adapters of this peft: {error}")
    return base


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "magnitudes": lambda base: lora(base, use_dora=True),
    "tables": lambda base: lora(base, target_modules=["embed_tokens", "v_proj"]),
    "whole modules": lambda base: lora(base, modules_to_save=["norm"]),
    "tokens": lambda base: lora(base, trainable_token_indices=[1, 2]),
    "scales": lambda base: peft.get_peft_model(base, peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])),
    "buffers": lambda base: peft.get_peft_model(base, peft.VeraConfig(r=2, target_modules=["q_proj"])),
    "prompts": lambda base: peft.get_peft_model(base, peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2)),
    "second of two": second_of_two,
    "of transformers": of_transformers,
}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True` as embedding layers found:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters_are_saved_and_resumed_as_by_transformers(kind: str, tmp_path: Path) -> None:
    """Its folders are read, too, also those that hold the table itself beside its adapter, as it saves tables."""
    # It cannot read the best of the second of two, nor of what itself has put on.
    settings = {"learning_rate": 0.3, "load_best_model_at_end": kind not in ("second of two", "of transformers")}

    def run(trainer: Any, out: Path, resume: Path | None, runtime: Any = None) -> Trained:
        base = llama() if runtime is None else runtime.model
        torch.manual_seed(7)
        with contextlib.nullcontext() if runtime is None else runtime.gathered(base, write=True):
            model = KINDS[kind](base)
        given = {} if runtime is None else {"runtime": runtime}
        args = arguments(out, **RUN | settings)
        made = trainer(model, args, train_dataset=data(), eval_dataset=data(6), **given)
        made.train(resume_from_checkpoint=resume and str(resume / "checkpoint-2"))
        return trained(made, {n: p.detach().clone() for n, p in model.named_parameters() if registry.find(p) is None})

    def saved(out: Path) -> dict[Path, bytes]:
        return {path.relative_to(out): path.read_bytes() for path in out.rglob("*.safetensors")}

    expected = run(transformers.Trainer, tmp_path / "plain", None)
    for resume in (None, tmp_path / "paged", tmp_path / "plain"):
        with runtime_for(tmp_path / f"runtime for {resume and resume.name}") as runtime:
            found = run(AdapterTrainer, tmp_path / "paged", resume, runtime)
        check(Trained([], found.weights), Trained([], {name: expected.weights[name] for name in found.weights}))
        assert found.history[:-1] == expected.history[:-1]
        if kind != "tables":
            assert saved(tmp_path / "paged") == saved(tmp_path / "plain")


def test_saved_adapters_come_around_a_model_that_never_fits(tmp_path: Path) -> None:
    """peft's own ways look at the state of all of it."""
    plain_model = lora(llama())
    plain_model.save_pretrained(tmp_path)
    rows = data(1)[0]["input_ids"][None]
    with runtime_for(tmp_path) as runtime:
        with pytest.raises(tiermem.TiermemError, match="state_dict"):
            peft.PeftModel.from_pretrained(runtime.model, tmp_path)
    with runtime_for(tmp_path / "again") as runtime:
        model = peft.get_peft_model(runtime.model, peft.PeftConfig.from_pretrained(tmp_path))
        load_adapters(model, str(tmp_path))  # as peft is given one
        assert torch.equal(model.eval()(rows).logits, plain_model.eval()(rows).logits)


def test_adapters_of_which_peft_saves_only_what_they_compute(tmp_path: Path) -> None:
    """Nothing goes on from that. transformers' own takes what was computed for what computes it."""
    args = arguments(tmp_path / "out", **RUN | {"max_steps": 2})
    with runtime_for(tmp_path) as runtime:
        how = peft.PromptEncoderConfig("CAUSAL_LM", num_virtual_tokens=2, encoder_hidden_size=4)
        model = peft.get_peft_model(runtime.model, how)
        trainer = AdapterTrainer(model, args, train_dataset=data(), eval_dataset=data(6), runtime=runtime)
        trainer.train()
        before = [parameter.detach().clone() for parameter in model.prompt_encoder.parameters()]
        with pytest.raises(ResumeError, match=r"peft saves nothing of prompt_encoder\.default\.embedding\.weight"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
        assert all(map(torch.equal, before, model.prompt_encoder.parameters()))
        best = arguments(tmp_path / "out", **RUN | {"load_best_model_at_end": True})
        with pytest.raises(ConfigError, match=r"load_best_model_at_end=True, and peft saves nothing of prompt_encoder"):
            AdapterTrainer(model, best, train_dataset=data(), eval_dataset=data(6), runtime=runtime)


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


PROMPTS: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2}


@pytest.mark.parametrize(
    "how",
    [
        peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"]),  # buffers that are in no state
        peft.VeraConfig(r=2, target_modules=["q_proj"]),  # buffers that layers share
        peft.PromptEncoderConfig(**PROMPTS, encoder_hidden_size=4),
        peft.MultitaskPromptTuningConfig(**PROMPTS, num_tasks=2),
    ],
    ids=lambda how: str(how.peft_type.value),
)
def test_what_is_saved_of_adapters_that_were_offloaded_with_their_base(how: peft.PeftConfig, tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = peft.get_peft_model(llama(), how)
    model.save_pretrained(tmp_path / "plain")
    least = config_for(tmp_path, budget_for(model, tmp_path, "least"), "forward")
    with tiermem.offload(model, least, coalesce=0) as runtime:
        Trainer(args=arguments(tmp_path / "out"), runtime=runtime).save_model(str(tmp_path / "paged"))
    found, expected = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("paged", "plain"))
    check(Trained([], found), Trained([], expected))


def test_adapters_are_saved_by_hand_while_their_base_is_paged_out(tmp_path: Path) -> None:
    """For a base that never fits, without a Trainer: as IDIOMS.md says."""
    lora(llama()).save_pretrained(tmp_path / "plain")
    with runtime_for(tmp_path) as runtime:
        model: Any = lora(runtime.model)
        model.save_pretrained(tmp_path / "paged", state_dict=adapter_state(model))
    found, expected = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("paged", "plain"))
    check(Trained([], found), Trained([], expected))


def test_what_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out")
    with runtime_for(tmp_path) as runtime:
        none: Any = None
        with pytest.raises(ConfigError, match=r"runtime: expected what tiermem\.offload has returned, found a None"):
            AdapterTrainer(lora(llama()), args, runtime=none)
        with pytest.raises(ConfigError, match="expected adapters around the model that was offloaded"):
            AdapterTrainer(lora(llama()), args, runtime=runtime)
        with pytest.raises(ConfigError, match=r"model.embed_tokens.weight is offloaded and to be trained.*peft_config"):
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
