"""Weights in and out: Hugging Face's folders, streamed, both ways."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_combinations import half_of
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    WhisperConfig,
    WhisperModel,
)

import swap
import tiermem
from swap.syscalls import SystemCalls
from tiermem.checkpoint.weights import find_tensors
from tiermem.zero3.materialize import Materializer

TOKENS = torch.arange(24).reshape(2, 12) % 64


def llama(**settings: Any) -> LlamaForCausalLM:
    values = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**(values | settings)))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(gpt2_config())


def gpt2_config() -> GPT2Config:
    return GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)


def config(directory: Path, **settings: Any) -> tiermem.Config:
    directory.mkdir(exist_ok=True)
    values = {"device": "cpu", "host_memory": "4MiB", "swap_dirs": [directory], "param_dtype": "float32"}
    return tiermem.Config(**(values | settings))


def offloaded(make: Any, directory: Path, *, init: Any = None, weights: Any = None, **settings: Any) -> Any:
    torch.manual_seed(5)
    with tiermem.deferred_init():
        model = make()
    return model.eval(), tiermem.offload(model, config(directory, **settings), weights=weights, init=init)


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=TOKENS).logits


# Weights out


@pytest.mark.parametrize("make", [llama, lambda: llama(tie_word_embeddings=True), gpt2], ids=["llama", "tied", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_transformers_loads_what_was_saved(tmp_path: Path, make: Any, dtype: str) -> None:
    model, runtime = offloaded(make, tmp_path / "swap", param_dtype=dtype)
    with runtime:
        runtime.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
        expected = logits(model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.dtype == getattr(torch, dtype)
    assert torch.equal(logits(loaded), expected)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 2
    assert set(index["weight_map"]) == set(make().state_dict()) - (
        {"lm_head.weight"} if make().config.tie_word_embeddings else set()
    )
    for path in (tmp_path / "saved").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        if path.name in shards:
            tensors = load_file(path)
            assert len(tensors) == 1 or sum(each.nbytes for each in tensors.values()) <= 20_000


def test_after_training_the_saved_model_is_the_trained_one(tmp_path: Path) -> None:
    model, runtime = offloaded(gpt2, tmp_path / "swap", param_dtype="bfloat16")
    with runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        model.train()
        for _ in range(2):
            model(input_ids=TOKENS, labels=TOKENS).loss.backward()
            with pytest.raises(tiermem.TiermemError, match="save_pretrained between backward and step"):
                runtime.save_pretrained(tmp_path / "half")
            optimizer.step()
        runtime.save_pretrained(tmp_path / "saved")
        expected = logits(model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "swap"]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(
        load_file(tmp_path / "saved" / "model.safetensors"), "model.safetensors"
    )
    assert torch.equal(logits(GPT2LMHeadModel.from_pretrained(tmp_path / "saved")), expected)


def test_saving_does_not_leave_frames_in_use(tmp_path: Path) -> None:
    model, runtime = offloaded(llama, tmp_path / "swap", poison=True)
    with runtime:
        for number in range(3):
            runtime.save_pretrained(tmp_path / str(number), max_shard_size=1000)
        model.train()
        optimizer = tiermem.AdamW(model.parameters())
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        assert torch.isfinite(logits(model)).all()


@pytest.mark.parametrize("at", [1, 9])
def test_an_error_that_is_kept_does_not_keep_frames_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    class Full(SystemCalls):
        writes = 0

        def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
            Full.writes += 1
            if Full.writes > at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().pwritev(fd, view, offset)

    model, runtime = offloaded(llama, tmp_path / "swap", poison=True)
    with runtime:
        with monkeypatch.context() as patch:
            patch.setattr("tiermem.checkpoint.draft.SystemCalls", Full)
            with pytest.raises(swap.SwapFullError) as caught:
                runtime.save_pretrained(tmp_path / "saved")
        model.train()
        optimizer = tiermem.AdamW(model.parameters())
        for _ in range(2):
            model(input_ids=TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
        assert "no room for" in str(caught.value)
        with pytest.raises(tiermem.ConfigError, match="max_shard_size: expected a size like"):
            runtime.save_pretrained(tmp_path / "saved", max_shard_size="x")
        runtime.save_pretrained(tmp_path / "saved")


def test_a_plain_model_with_buffers_and_odd_strides(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
            self.norm = nn.BatchNorm2d(5)
            self.register_buffer("scratch", torch.ones(3), persistent=False)
            self.register_buffer("mask", torch.randn(3).expand(4, 3))
            self.frozen = nn.Parameter(torch.arange(6), requires_grad=False)
            self.scalar = nn.Parameter(torch.tensor(2.5))

    torch.manual_seed(3)
    model = Net()
    expected = {name: values.clone() for name, values in model.state_dict().items()}
    with tiermem.offload(model, config(tmp_path / "swap")) as runtime:
        runtime.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], values) for name, values in expected.items())
    again = Net()
    with tiermem.offload(again, config(tmp_path / "swap"), weights=tmp_path / "saved") as runtime:
        assert torch.equal(runtime.parameter(again.conv.weight), expected["conv.weight"])
        assert torch.equal(runtime.parameter(again.frozen), expected["frozen"])
        assert torch.equal(again.norm.running_mean, expected["norm.running_mean"])
        assert torch.equal(again.mask, expected["mask"])


def a_new_head(model: nn.Module) -> None:
    model.lm_head = nn.Linear(model.config.hidden_size, 7, bias=False)


def one_layer_less(model: nn.Module) -> None:
    del model.model.layers[0]


@pytest.mark.parametrize("change", [a_new_head, one_layer_less])
def test_what_has_taken_the_name_of_an_offloaded_parameter_is_not_saved_as_that(tmp_path: Path, change: Any) -> None:
    """The file had the old head under the name of the new one, or a layer that is gone in the place of the next."""
    model, runtime = offloaded(llama, tmp_path / "swap")
    change(model)
    with pytest.raises(tiermem.ConfigError, match=r"is another one than when the model was offloaded .*gathered"):
        runtime.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    expected = logits(model)
    with runtime.gathered(model):
        copies = {name: values.clone() for name, values in model.state_dict().items()}
    runtime.close()
    again = llama().eval()
    change(again)
    again.load_state_dict(copies)
    assert torch.equal(logits(again), expected)


@pytest.mark.parametrize("taken", ["file", "full", "link", "nowhere"])
def test_what_is_there_is_never_replaced(tmp_path: Path, taken: str) -> None:
    _, runtime = offloaded(gpt2, tmp_path / "swap")
    path = tmp_path / "saved"
    if taken == "file":
        path.write_text("mine")
    elif taken == "full":
        path.mkdir()
        (path / "mine").touch()
    elif taken == "link":
        (tmp_path / "else").mkdir()
        path.symlink_to(tmp_path / "else")
    else:
        path = tmp_path / "none" / "saved"
    before = sorted(tmp_path.rglob("*"))
    with runtime:
        with pytest.raises(tiermem.ConfigError, match=r"expected .* to be (free|a folder)"):
            runtime.save_pretrained(path)
        assert sorted(tmp_path.rglob("*")) == before
        (tmp_path / "empty").mkdir()
        runtime.save_pretrained(tmp_path / "empty")
        assert (tmp_path / "empty" / "model.safetensors").exists()


# Weights in


@pytest.mark.parametrize("make", [llama, lambda: llama(tie_word_embeddings=True), gpt2], ids=["llama", "tied", "gpt2"])
@pytest.mark.parametrize(
    ("dtypes", "shard"),
    half_of([("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")], ["1GB", "20KB"]),
)
def test_weights_are_those_of_from_pretrained(tmp_path: Path, make: Any, shard: str, dtypes: tuple[str, str]) -> None:
    saved, param = dtypes
    torch.manual_seed(1)
    make().to(getattr(torch, saved)).save_pretrained(tmp_path / "saved", max_shard_size=shard)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    model, runtime = offloaded(make, tmp_path / "swap", weights=tmp_path / "saved", param_dtype=param)
    with runtime:
        for name, parameter in model.named_parameters():
            values = plain.get_parameter(name).detach()
            assert torch.equal(runtime.parameter(parameter), values.to(getattr(torch, param))), name
            assert torch.equal(runtime.master(parameter), values), name


def test_weights_open_a_file_for_its_header_and_for_all_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time, and none at the end: it had been opened for each parameter."""
    gpt2().save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    shards = sorted((tmp_path / "saved").glob("*.safetensors"))
    opened: list[str] = []
    open_file = SystemCalls.open

    def noting(self: SystemCalls, path: str, flags: int, mode: int = 0o600) -> int:
        opened.append(path)
        return open_file(self, path, flags, mode)

    monkeypatch.setattr(SystemCalls, "open", noting)
    _, runtime = offloaded(gpt2, tmp_path / "swap", weights=tmp_path / "saved")
    with runtime:
        assert not open_now().intersection(shards)
    assert [opened.count(str(path)) for path in shards] == [2] * len(shards)
    assert len(shards) > 1


def test_weights_that_fail_in_the_middle_leave_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2().save_pretrained(tmp_path / "saved")
    path, run = tmp_path / "saved" / "model.safetensors", Materializer.run

    def cutting(self: Materializer, *args: Any) -> Any:
        os.truncate(path, path.stat().st_size - 4)  # after its header was looked at
        return run(self, *args)

    monkeypatch.setattr(Materializer, "run", cutting)
    with pytest.raises(swap.FormatError, match="cut short"):
        offloaded(gpt2, tmp_path / "swap", weights=tmp_path / "saved")
    assert path not in open_now()


def open_now() -> set[Path]:
    """The files that this process has open."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found.add(entry.readlink())
    return found


def test_the_prefix_of_a_base_model_is_added_and_removed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    base, head = GPT2Model(gpt2_config()), gpt2()
    base.save_pretrained(tmp_path / "base")
    old = load_file(tmp_path / "base" / "model.safetensors")  # as on the hub: with the masks of old versions
    old |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file(old, tmp_path / "base" / "model.safetensors")
    head.save_pretrained(tmp_path / "head")
    model, runtime = offloaded(gpt2, tmp_path / "swap", weights=tmp_path / "base")
    with runtime:
        assert torch.equal(runtime.parameter(model.transformer.h[1].attn.c_attn.weight), base.h[1].attn.c_attn.weight)
        assert torch.equal(runtime.parameter(model.lm_head.weight), base.wte.weight)
    model, runtime = offloaded(lambda: GPT2Model(gpt2_config()), tmp_path / "swap", weights=tmp_path / "head")
    with runtime:
        assert torch.equal(runtime.parameter(model.ln_f.weight), head.transformer.ln_f.weight)
        assert torch.equal(runtime.parameter(model.wpe.weight), head.transformer.wpe.weight)


def test_a_classifier_begins_with_a_language_model(tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = llama()
    whole.save_pretrained(tmp_path / "whole")

    def classifier() -> LlamaForSequenceClassification:
        return LlamaForSequenceClassification(whole.config)

    message = (
        r"missing.*: score\.weight; not in the model: lm_head\.weight; pass init= to have what is missing .* left out"
    )
    with pytest.raises(tiermem.ConfigError, match=message):
        offloaded(classifier, tmp_path / "swap", weights=tmp_path / "whole")
    init = classifier()._init_weights
    model, runtime = offloaded(classifier, tmp_path / "swap", weights=tmp_path / "whole", init=init)
    with runtime:
        for name, expected in whole.model.named_parameters():
            assert torch.equal(runtime.parameter(model.model.get_parameter(name)), expected)
        assert 0.0 < runtime.parameter(model.score.weight).std() < 0.1


def test_a_head_that_may_just_have_another_name_is_not_left_out_in_silence(tmp_path: Path) -> None:
    model = LlamaForSequenceClassification(llama().config)
    tensors = {name: values.clone() for name, values in model.state_dict().items()}
    tensors["scores.weight"] = tensors.pop("score.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    swap_dir = tmp_path / "swap"
    with pytest.warns(RuntimeWarning, match=r"left out.*: scores\.weight for score\.weight\. Rename"):
        _, runtime = offloaded(
            lambda: model, swap_dir, weights=tmp_path / "model.safetensors", init=model._init_weights
        )
    runtime.close()


def test_everything_that_does_not_fit_is_named_in_one_error(tmp_path: Path) -> None:
    tensors = {name: values.clone() for name, values in llama().state_dict().items()}
    tensors["model.layers.0.self_attn.query.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.zeros(31)
    tensors["model.layers.1.input_layernorm.weight"] = torch.zeros(32, dtype=torch.int64)
    tensors["extra.weight"] = torch.zeros(7)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, tmp_path / "file.safetensors")
    with pytest.raises(tiermem.ConfigError) as caught:
        offloaded(llama, tmp_path / "swap", weights=tmp_path / "file.safetensors")
    message = str(caught.value)
    assert "missing from the file: model.layers.0.self_attn.q_proj.weight, model.layers.2.mlp.up_proj.weight" in message
    assert "not in the model: extra.weight, model.layers.0.self_attn.query.weight" in message
    assert "of another shape: model.norm.weight (expected [32], found [31])" in message
    assert "model.layers.1.input_layernorm.weight (expected torch.float32, found torch.int64)" in message
    assert (
        "perhaps renamed: model.layers.0.self_attn.query.weight for model.layers.0.self_attn.q_proj.weight" in message
    )
    assert "inv_freq" not in message
    assert list((tmp_path / "swap").iterdir()) == []


def test_with_init_parameters_may_be_missing(tmp_path: Path) -> None:
    torch.manual_seed(1)
    tensors = {name: values.clone() for name, values in llama().state_dict().items()}
    del tensors["lm_head.weight"]
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "file.safetensors")

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.125)

    model, runtime = offloaded(llama, tmp_path / "swap", weights=tmp_path / "file.safetensors", init=init)
    with runtime:
        for name, parameter in model.named_parameters():
            expected = tensors.get(name, torch.full(parameter.shape, 0.125))
            assert torch.equal(runtime.parameter(parameter), expected), name


def test_what_a_constructor_froze_stays_frozen(tmp_path: Path) -> None:
    settings = WhisperConfig(
        vocab_size=64,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
    )
    plain = WhisperModel(settings)
    plain.save_pretrained(tmp_path / "saved")
    with tiermem.deferred_init():
        model = WhisperModel(settings)
    with tiermem.offload(model, config(tmp_path / "swap"), weights=tmp_path / "saved") as runtime:
        for name, parameter in plain.named_parameters():
            assert model.get_parameter(name).requires_grad == parameter.requires_grad, name
        positions = model.encoder.embed_positions.weight
        assert not positions.requires_grad
        assert torch.equal(runtime.parameter(positions), plain.encoder.embed_positions.weight)


def test_buffers_of_the_file_are_loaded_and_come_back_on_resume(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    plain = make()
    plain(torch.randn(8, 4))
    save_file(plain.state_dict(), tmp_path / "file.safetensors")
    for weights in (tmp_path / "file.safetensors", None):
        with tiermem.deferred_init():
            model = make()
        runtime = tiermem.offload(model, config(tmp_path / "swap"), weights=weights, resume="auto")
        assert torch.equal(model[1].running_mean, plain[1].running_mean)
        assert torch.equal(model[1].num_batches_tracked, plain[1].num_batches_tracked)
        runtime.commit().wait()
        runtime.close()


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nothing", "found no"),
        (lambda folder: folder, "found none"),
        (lambda folder: (folder / "pytorch_model.bin").touch() or folder, "is a pickle, which is never read"),
        (lambda folder: [save_file({}, folder / f"{name}.safetensors") for name in "ab"] and folder, "2 safetensors"),
        (
            lambda folder: torch.save({}, folder / "model.pt") or folder / "model.pt",
            r"model\.pt'; pickles are never read",
        ),
        (lambda folder: write(folder / "model.safetensors.index.json", "{}"), "give the folder that it is in"),
        (lambda folder: write(folder / "manifest.json", "{}").parent, "holds a snapshot: give it as resume="),
    ],
)
def test_nothing_to_read(tmp_path: Path, make: Any, message: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(tiermem.ConfigError, match=message):
        find_tensors(make(tmp_path / "folder"))


def test_the_only_file_of_a_folder_may_have_any_name(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "any.safetensors")
    (file, info) = find_tensors(tmp_path)["weight"]
    assert (file.path.name, info.shape) == ("any.safetensors", (3,))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index: index.pop("weight_map"), "to be an index"),
        (lambda index: index.update(weight_map=list(index["weight_map"])), "an object weight_map"),
        (lambda index: index["weight_map"].update(a="../x"), "name of a file in this folder"),
        (lambda index: index["weight_map"].update(a=3), "name of a file in this folder"),
        (lambda index: index["weight_map"].update(a="gone.safetensors"), "found none"),
        (lambda index: index["weight_map"].update(a=next(iter(index["weight_map"].values()))), "found it without"),
    ],
)
def test_an_index_that_is_not_one(tmp_path: Path, damage: Any, message: str) -> None:
    gpt2().save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    path = tmp_path / "saved" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    damage(index)
    path.write_text(json.dumps(index))
    with pytest.raises(swap.FormatError, match=message):
        find_tensors(tmp_path / "saved")
    for text in ("", "[", "[]", "3", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(swap.FormatError, match="to be an index"):
            find_tensors(tmp_path / "saved")


def test_a_whole_file_is_taken_before_an_index_as_transformers_takes_it(tmp_path: Path) -> None:
    """The index may be what an earlier save left, of other values or of shards that are gone."""
    gpt2().save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    later = gpt2()
    save_model(later, tmp_path / "saved" / "model.safetensors", metadata={"format": "pt"})
    theirs = type(later).from_pretrained(tmp_path / "saved")
    with tiermem.deferred_init():
        model = gpt2()
    with tiermem.offload(model, config(tmp_path / "swap"), weights=tmp_path / "saved") as runtime:
        for ours, plain, own in zip(model.parameters(), theirs.parameters(), later.parameters(), strict=True):
            assert torch.equal(plain, own)
            assert torch.equal(runtime.parameter(ours), own)


@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
def test_a_model_on_the_meta_device_or_with_values_of_its_own(tmp_path: Path, make: Any) -> None:
    torch.manual_seed(1)
    plain = make()
    plain.save_pretrained(tmp_path / "saved")
    with torch.device("meta"):
        absent = make()
    for model in (absent, make()):
        for parameter in list(model.parameters())[::2]:
            parameter.requires_grad_(False)
        with tiermem.offload(model, config(tmp_path / "swap"), weights=tmp_path / "saved"):
            assert torch.equal(logits(model), logits(plain))
