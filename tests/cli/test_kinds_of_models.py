"""Architectures that keep their sizes, tables or limits in places of their own, planned and trained by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermem
from tiermem.cli import main
from tiermem.cli.modelwork import model_workload
from tiermem.cli.presets import build_model, convert_buffers, find_model, is_models_own
from tiermem.config import Config
from tiermem.errors import CapacityError, ConfigError

XGLM = {
    "model_type": "xglm",
    "d_model": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "attention_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
ROBERTA = {
    "model_type": "roberta",
    "is_decoder": True,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "vocab_size": 100,
        "max_position_embeddings": 32,
    },
    "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
}


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("a text to learn " * 100)


def a_model(values: dict[str, Any]) -> str:
    Path("config.json").write_text(json.dumps(values))
    return "."


def train(model: str, seq: int, *rest: str) -> int:
    arguments = ["--text", "text", "--seq", str(seq), "--host-memory", "4MiB", "--steps", "2", "--batch", "1"]
    return main.run(["train", "--model", model, *arguments, *rest])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_table_of_positions_that_is_no_parameter_has_their_dtype(dtype: str) -> None:
    assert train(a_model(XGLM), 32, "--param-dtype", dtype) == 0


def test_buffers_have_the_dtypes_that_transformers_gives_them() -> None:
    """As `from_pretrained(dtype=)` does; frequencies of rotary positions stay float32."""
    config = find_model(a_model(XGLM))
    with tiermem.deferred_init():
        model = build_model(config)
    before = model.model.embed_positions.weights
    convert_buffers(model, config, torch.bfloat16)
    assert torch.equal(model.model.embed_positions.weights, before.to(torch.bfloat16))
    assert model.model.embed_positions.weights.dtype == torch.bfloat16
    llama = build_model(find_model("llama-tiny"))
    convert_buffers(llama, find_model("llama-tiny"), torch.bfloat16)
    assert llama.model.rotary_emb.inv_freq.dtype == torch.float32
    assert next(llama.parameters()).dtype == torch.float32, "those are the runtime's"


def test_sizes_below_text_config_are_those_that_count(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="100 tokens in its vocabulary, the text needs 256"):
        find_model(a_model(GEMMA3))
    text: dict[str, Any] = GEMMA3["text_config"]  # type: ignore[assignment]
    settings = Config(host_memory="8MiB", swap_dirs=["."])

    def flops(seq: int) -> float:
        config = find_model(a_model(GEMMA3), vocabulary=0)
        work = model_workload(config, "gemma3", batch=32 // seq, seq=seq, batches=1, settings=settings)
        return sum(unit.flops for unit in work.units)

    assert flops(32) > flops(16), "attention's width is known"
    assert train(a_model(GEMMA3 | {"text_config": text | {"vocab_size": 300}}), 33) == 1
    assert "takes at most 32 tokens in a sequence, --seq is 33" in capsys.readouterr().err


@pytest.mark.parametrize("values", [XGLM, GEMMA3], ids=["xglm", "gemma3"])
def test_a_plan_has_no_longer_sequences_than_training(
    capsys: pytest.CaptureFixture[str], values: dict[str, Any]
) -> None:
    rest = ["--machine", "laptop", "--host-memory", "8MiB", "--seq"]
    assert main.run(["plan", a_model(values), *rest, "32"]) == 0
    capsys.readouterr()
    assert main.run(["plan", a_model(values), *rest, "65"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "tokens in a sequence, --seq is 65" in captured.err


def test_what_a_model_says_of_its_first_batch_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """RoBERTa counts positions from the padding token's number on, so that it takes two tokens less than it says."""
    dtype = ("--param-dtype", "float32")  # of which nothing is remarked, whatever the processor
    assert train(a_model(ROBERTA), 62, *dtype) == 0
    capsys.readouterr()
    assert train(a_model(ROBERTA), 64, *dtype) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "cannot compute a batch of sequences of 64 tokens: index 64 is out of bounds" in captured.err
    assert "give a shorter --seq, or correct the sizes in the model's configuration" in captured.err
    assert [path.name for path in Path().iterdir() if path.is_dir()] == [], "swap files are removed"


def test_errors_of_others_than_the_model_keep_their_kind() -> None:
    own = IndexError("index out of range in self")
    asserted = RuntimeError("CUDA error: device-side assert triggered")  # how a GPU says the same
    others = [CapacityError("HOST"), torch.OutOfMemoryError("so many bytes"), OSError("the disk")]
    others += [RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")]
    others += [torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)]
    for error, expected in ((own, True), (asserted, True), *((other, False) for other in others)):
        with pytest.raises(type(error)):
            raise error
        assert is_models_own(error) is expected
    with pytest.raises(ValueError, match="not a number") as caught:
        tiermem.config.parse_dtype("x", "not a number")
    assert not is_models_own(caught.value)


GEMMA2: dict[str, Any] = GEMMA3["text_config"] | {"model_type": "gemma2", "vocab_size": 300}  # type: ignore[operator]
OPT = {
    "model_type": "opt",
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 64,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(("values", "words"), [(GEMMA2, "embed_tokens"), (OPT, "embed_positions")])
def test_a_look_up_of_a_kind_of_its_own_is_brought_in_backward_as_in_training(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Gemma's words are scaled by a subclass of Embedding: where they are tied to the output, they are read again."""
    settings = Config(device="cpu", host_memory="256KiB", swap_dirs=[tmp_path])
    config = find_model(a_model(values))
    work = model_workload(config, "it", batch=1, seq=8, batches=1, settings=settings)
    (unit,) = [number for number, unit in enumerate(work.units) if unit.name.endswith(words)]
    with tiermem.deferred_init():
        model = build_model(config)
    with tiermem.offload(model, settings) as runtime:
        optimizer = tiermem.AdamW(model.parameters())
        model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
        order = runtime._house.scheduler.order.expected
        assert order is not None
        real = [access for access in order.accesses if access.unit == unit]
    assert [access for access in work.order if access.unit == unit] == real
