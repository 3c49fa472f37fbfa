"""How a model generates text comes in beside its weights, goes through commits and snapshots, and out again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import tiermem
from swap import FormatError

CHAT = {"eos_token_id": [3, 5], "do_sample": True, "top_k": 7}


def llama() -> LlamaForCausalLM:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, max_position_embeddings=32, **shape))


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """A folder of weights that says how to generate."""
    model = llama()
    model.generation_config = GenerationConfig(**CHAT)
    model.save_pretrained(tmp_path / "chat")
    return tmp_path / "chat"


def offloaded(directory: Path, model: Any = None, **how: Any) -> tiermem.Runtime:
    directory.mkdir(exist_ok=True)
    if model is None:
        with tiermem.deferred_init():
            model = llama()
    config = tiermem.Config(device="cpu", host_memory="2MiB", swap_dirs=[directory], param_dtype="float32")
    return tiermem.offload(model, config, **how)


def said(runtime: tiermem.Runtime, folder: Path) -> dict[str, Any]:
    """What a model saved now says about generating."""
    runtime.save_pretrained(folder)
    found = json.loads((folder / "generation_config.json").read_text())
    return {name: found.get(name) for name in CHAT}


def test_it_stays_through_commits_and_snapshots_of_programs_that_never_saw_the_folder(
    tmp_path: Path, chat: Path
) -> None:
    with offloaded(tmp_path / "swap", weights=chat) as runtime:
        assert said(runtime, tmp_path / "first") == CHAT
        assert runtime.model.generation_config.eos_token_id == [3, 5]
        runtime.snapshot(tmp_path / "copy").wait()
        runtime.commit().wait()
    with offloaded(tmp_path / "swap", resume=True) as runtime:
        assert said(runtime, tmp_path / "resumed") == CHAT
    with offloaded(tmp_path / "elsewhere", resume=tmp_path / "copy") as runtime:
        assert said(runtime, tmp_path / "restored") == CHAT


def test_what_the_program_has_said_itself_stays(tmp_path: Path, chat: Path) -> None:
    model = llama()
    model.generation_config = GenerationConfig(top_k=9)
    with offloaded(tmp_path / "swap", model, weights=chat) as runtime:
        assert said(runtime, tmp_path / "saved") == {"eos_token_id": None, "do_sample": None, "top_k": 9}


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_damaged_one_is_named_before_anything_is_made(tmp_path: Path, chat: Path, text: str) -> None:
    (chat / "generation_config.json").write_text(text)
    with pytest.raises(FormatError, match=r"chat/generation_config\.json' to hold generation settings"):
        offloaded(tmp_path / "swap", weights=chat)
    assert list((tmp_path / "swap").iterdir()) == []


def test_models_that_do_not_generate_are_left_alone(tmp_path: Path, chat: Path) -> None:
    model = torch.nn.Linear(2, 2)
    (tmp_path / "plain").mkdir()
    save_file(dict(model.state_dict()), tmp_path / "plain" / "model.safetensors")
    (chat / "generation_config.json").rename(tmp_path / "plain" / "generation_config.json")
    with offloaded(tmp_path / "swap", model, weights=tmp_path / "plain"):
        assert not hasattr(model, "generation_config")
