"""Presets are the models they are named after, and any config.json is taken as it is."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from tiermem.cli.presets import PRESETS, build_model, count_parameters, find_model, recompute_activations
from tiermem.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "millions"),
    [("llama-5m", 5), ("llama-20m", 20), ("llama-60m", 60), ("llama-168m", 168), ("llama-537m", 537)],
)
def test_a_preset_is_as_large_as_its_name_says(name: str, millions: int) -> None:
    assert count_parameters(find_model(name)) / 1e6 == pytest.approx(millions, rel=0.03)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-1b", 1_235_814_400),
        ("llama-3b", 3_212_749_824),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
    ],
)
def test_the_large_ones_are_metas(name: str, parameters: int) -> None:
    assert count_parameters(find_model(name)) == parameters


def test_a_presets_vocabulary_grows_with_the_tokenizer() -> None:
    assert find_model("llama-tiny").vocab_size == 256
    assert find_model("llama-tiny", vocabulary=1000).vocab_size == 1024
    assert find_model("llama-8b", vocabulary=1000).vocab_size == PRESETS["llama-8b"].vocabulary


def test_a_config_json_or_its_folder_is_a_model(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 300, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in (tmp_path / "config.json", tmp_path):
        found = find_model(str(name))
        assert found.model_type == "gpt2"
        # embeddings (tied), positions, two blocks of 12 d^2 + 13 d, the last norm
        assert count_parameters(found) == 300 * 32 + 64 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
    with pytest.raises(ConfigError, match="300 tokens in its vocabulary, the text needs 301"):
        find_model(str(tmp_path), vocabulary=301)


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 32}))
    with pytest.raises(ConfigError, match="not a causal language model"):
        count_parameters(find_model(str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "not a Hugging Face model configuration.*'hidden_size'.*found|expected int, got str"),
        ({"hidden_size": 30}, r"hidden size \(30\) is not a multiple of the number of attention heads \(4\)"),
        ({"hidden_size": -32}, "no llama can be built with this configuration"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}, "code of its own, which is not run"),
    ],
)
def test_values_that_a_model_refuses_are_a_config_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, object], message: str
) -> None:
    config = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 256} | changes))
    with pytest.raises(ConfigError, match=message):
        count_parameters(find_model(str(tmp_path)))
    assert capfd.readouterr().out == "", "nobody is asked, and --json has stdout for itself"


def test_layers_are_computed_again_in_backward() -> None:
    """By the name that the verb has, without a word about its being outdated."""
    model = build_model(find_model("llama-tiny")).train()
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recompute_activations(model)
    model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    assert len(calls) == 2


def test_a_transformers_of_before_has_another_name_for_it() -> None:
    asked: list[dict[str, bool]] = []

    class Before:
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, bool]) -> None:
            asked.append(gradient_checkpointing_kwargs)

    recompute_activations(Before())
    assert asked == [{"use_reentrant": False}]
