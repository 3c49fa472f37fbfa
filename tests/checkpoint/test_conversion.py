"""Folders that transformers converts while it loads: the same bits, streamed; and what does not fit, named."""

from __future__ import annotations

import errno
import functools
import inspect
import json
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from doubles_combinations import half_of, number_of
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    MixtralModel,
    Qwen3MoeConfig,
    core_model_loading,
)
from transformers import conversion_mapping as mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    PermuteForRope,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

import swap
import tiermem
from tiermem.checkpoint import weights as weights_module
from tiermem.checkpoint.conversion import find_origins
from tiermem.checkpoint.naming import Expected, Rules, match
from tiermem.checkpoint.pieces import Divide, Join, Origin, Piece, Recipe, Stack
from tiermem.checkpoint.pieces import Transpose as Transposed
from tiermem.checkpoint.tensor_file import TensorInfo, TensorLoader
from tiermem.checkpoint.weights import open_weights

OLDER = Version(transformers.__version__) < Version("5.23")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
EXPERTS = 12  # more than ten: their numbers are not in the order of the alphabet


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=EXPERTS, num_experts_per_tok=2))


def qwen3_moe() -> Any:
    settings = SIZES | {"head_dim": 4, "moe_intermediate_size": 8, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    return transformers.Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, tie_word_embeddings=True))


def llama(**changed: Any) -> Any:
    return transformers.LlamaForCausalLM(LlamaConfig(**(SIZES | changed)))


MIXTURES = {"mixtral": mixtral, "qwen3_moe": qwen3_moe}


def offloaded(make: Any, directory: Path, weights: Path, *, deferred: bool = True, **changed: Any) -> Any:
    directory.mkdir(exist_ok=True)
    values = {"device": "cpu", "host_memory": "4MiB", "swap_dirs": [directory], "param_dtype": "float32"}
    resume = changed.pop("resume", False)
    with tiermem.deferred_init() if deferred else torch.device("meta"):
        model = make()
    return model, tiermem.offload(model, tiermem.Config(**(values | changed)), weights=weights, resume=resume)


def check(runtime: tiermem.Runtime, plain: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    for name, parameter in runtime.model.named_parameters():
        values = plain.get_parameter(name).detach()
        assert torch.equal(runtime.parameter(parameter), values.to(dtype)), name
        assert torch.equal(runtime.master(parameter), values), name


def saved(folder: Path, make: Any = mixtral, **settings: Any) -> Any:
    torch.manual_seed(1)
    model = make()
    model.save_pretrained(folder, **settings)
    return model


def file_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


# Mixtures of experts


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize(
    ("dtypes", "shard"),
    half_of([("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")], ["1GB", "10KB"]),
)
def test_experts_kept_apart_are_those_of_from_pretrained(
    tmp_path: Path, name: str, shard: str, dtypes: tuple[str, str]
) -> None:
    kind, param = dtypes
    torch.manual_seed(1)
    MIXTURES[name]().to(getattr(torch, kind)).save_pretrained(tmp_path / "saved", max_shard_size=shard)
    if shard == "10KB":
        names = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())["weight_map"]
        of_one = [file for each, file in names.items() if "layers.0." in each and ".experts." in each]
        assert len(set(of_one)) > 1, "pieces of one parameter in several files"
        assert f".experts.{EXPERTS - 1}." in " ".join(names)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    _, runtime = offloaded(
        MIXTURES[name], tmp_path / "swap", tmp_path / "saved", deferred=kind == "float32", param_dtype=param
    )
    with runtime:
        check(runtime, plain, getattr(torch, param))


@pytest.mark.parametrize("name", MIXTURES)
def test_back_through_our_own_folder_and_through_theirs(tmp_path: Path, name: str) -> None:
    plain = saved(tmp_path / "apart", MIXTURES[name])
    _, runtime = offloaded(MIXTURES[name], tmp_path / "swap", tmp_path / "apart")
    with runtime:
        runtime.save_pretrained(tmp_path / "merged", max_shard_size="20KB")
    assert "model.layers.1.mlp.experts.gate_up_proj" in weights_module.find_tensors(tmp_path / "merged")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for key, parameter in theirs.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(key)), key
    theirs.save_pretrained(tmp_path / "again")
    for folder in ("merged", "again"):
        _, runtime = offloaded(MIXTURES[name], tmp_path / "swap", tmp_path / folder)
        with runtime:
            check(runtime, plain)


def test_the_base_of_a_mixture_and_its_head(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole")
    _, runtime = offloaded(lambda: MixtralModel(whole.config), tmp_path / "swap", tmp_path / "whole")
    with runtime:
        check(runtime, whole.model)
    tied = MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2, tie_word_embeddings=True)
    base = saved(tmp_path / "base", lambda: MixtralModel(tied))
    _, runtime = offloaded(lambda: transformers.MixtralForCausalLM(tied), tmp_path / "swap", tmp_path / "base")
    with runtime:
        for name, parameter in runtime.model.model.named_parameters():
            assert torch.equal(runtime.parameter(parameter), base.get_parameter(name)), name


def test_a_run_that_began_with_them_is_resumed(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    tokens = torch.arange(16).reshape(2, 8)
    model, runtime = offloaded(mixtral, tmp_path / "swap", tmp_path / "saved")
    with runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        runtime.commit().wait()
        expected = {name: runtime.master(parameter) for name, parameter in model.named_parameters()}
    model, runtime = offloaded(mixtral, tmp_path / "swap", tmp_path / "saved", resume=True)
    with runtime:
        assert all(torch.equal(runtime.master(model.get_parameter(name)), expected[name]) for name in expected)


def test_what_does_not_fit_is_named_as_the_file_has_it(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    start = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"
    tensors = file_of(tmp_path / "saved")
    del tensors[start.format(0, 2, "w1")]  # in the middle: the others must not close ranks
    del tensors[start.format(0, 11, "w2")]
    tensors[start.format(0, 5, "w3")] = torch.zeros(24, 15)
    tensors[start.format(1, EXPERTS, "w2")] = torch.zeros(16, 24)
    tensors[start.format(1, 3, "w2")] = torch.zeros(16, 24, dtype=torch.int64)
    for number in range(EXPERTS):
        del tensors[start.format(1, number, "w3")]
    save_file(tensors, tmp_path / "saved" / "model.safetensors")
    with pytest.raises(tiermem.ConfigError) as caught:
        offloaded(mixtral, tmp_path / "swap", tmp_path / "saved")
    said = str(caught.value)
    missing, surplus, shapes, kinds = said.split("; ")
    assert missing.endswith(
        "missing from the file: " + ", ".join([start.format(0, 2, "w1"), start.format(0, 11, "w2")]
        + [start.format(1, number, "w3") for number in range(4)]) + f" and {EXPERTS - 4} more"
    )  # fmt: skip
    assert surplus == f"not in the model: {start.format(1, EXPERTS, 'w2')}"
    assert shapes == f"of another shape: {start.format(0, 5, 'w3')} (expected [24, 16], found [24, 15])"
    assert kinds == f"of another kind: {start.format(1, 3, 'w2')} (expected torch.float32, found torch.int64)"
    assert list((tmp_path / "swap").iterdir()) == []


def test_a_parameter_that_is_there_both_ways_and_one_that_is_not_there(tmp_path: Path) -> None:
    plain = saved(tmp_path / "saved")
    tensors = file_of(tmp_path / "saved")
    own = "model.layers.0.mlp.experts.down_proj"
    tensors[own] = plain.get_parameter(own).detach().clone()
    tensors = {name: values for name, values in tensors.items() if not ("layers.1." in name and "w2" in name)}
    save_file(tensors, tmp_path / "saved" / "model.safetensors")
    with pytest.raises(tiermem.ConfigError) as caught:
        offloaded(mixtral, tmp_path / "swap", tmp_path / "saved")
    said = str(caught.value)
    assert "missing from the file: model.layers.1.mlp.experts.down_proj; " in said
    assert "not in the model: model.layers.0.block_sparse_moe.experts.0.w2.weight, " in said
    assert "gate_up" not in said


def test_with_init_a_merged_parameter_is_there_wholly_or_not_at_all(tmp_path: Path) -> None:
    plain = saved(tmp_path / "saved")
    read = file_of(tmp_path / "saved")  # some versions of safetensors map the file, which is written anew below
    tensors = {name: values.clone() for name, values in read.items() if "w2" not in name}

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.125)

    def begin() -> Any:
        save_file(tensors, tmp_path / "saved" / "model.safetensors")
        with tiermem.deferred_init():
            model = mixtral()
        (tmp_path / "swap").mkdir(exist_ok=True)
        config = tiermem.Config(device="cpu", host_memory="4MiB", swap_dirs=[tmp_path / "swap"], param_dtype="float32")
        return tiermem.offload(model, config, weights=tmp_path / "saved", init=init)

    with begin() as runtime:
        for name, parameter in runtime.model.named_parameters():
            expected = plain.get_parameter(name)
            expected = torch.full_like(expected, 0.125) if name.endswith("experts.down_proj") else expected
            assert torch.equal(runtime.parameter(parameter), expected), name
    del tensors["model.layers.1.block_sparse_moe.experts.7.w3.weight"]
    with pytest.raises(tiermem.ConfigError, match=r"missing from the file: model.layers.1.block.*experts.7.w3.weight$"):
        begin()


@pytest.mark.parametrize("way", ["no mapping", "another mapping"])
def test_versions_of_transformers_without_such_a_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    plain = saved(tmp_path / "apart")
    save_file({name: values.clone() for name, values in plain.state_dict().items()}, tmp_path / "merged.safetensors")
    if way == "no mapping":
        monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    else:
        monkeypatch.delattr(mapping, "get_model_conversion_mapping")
    with pytest.raises(tiermem.ConfigError, match=r"missing from the file: .*mlp.experts.gate_up_proj.* not in .*w1"):
        offloaded(mixtral, tmp_path / "swap", tmp_path / "apart")
    _, runtime = offloaded(mixtral, tmp_path / "swap", tmp_path / "merged.safetensors")
    with runtime:
        check(runtime, plain)


# Renamings


def vit() -> Any:
    return transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4
        )
    )


def clip_text() -> Any:
    own = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    config = transformers.CLIPTextConfig(**own, num_attention_heads=4, bos_token_id=0, eos_token_id=1)
    return transformers.CLIPTextModel(config)


@pytest.mark.parametrize("make", [vit, clip_text])
def test_renamed_weights_are_those_of_from_pretrained(tmp_path: Path, make: Any) -> None:
    plain = saved(tmp_path / "saved", make)
    tensors = file_of(tmp_path / "saved")
    if make is clip_text:  # as on the hub; transformers leaves the prefix out when it saves what it has not loaded
        tensors = {f"text_model.{name}": values for name, values in tensors.items()}
        save_file(tensors, tmp_path / "saved" / "model.safetensors", metadata={"format": "pt"})
    if not mapping.get_model_conversion_mapping(plain, add_legacy=False):
        assert OLDER, "transformers renames, in this version"
        pytest.skip("this transformers renames nothing in it")
    assert set(tensors) - set(plain.state_dict())
    _, runtime = offloaded(make, tmp_path / "swap", tmp_path / "saved")
    with runtime:
        check(runtime, type(plain).from_pretrained(tmp_path / "saved"))
        runtime.save_pretrained(tmp_path / "ours")
    assert set(file_of(tmp_path / "ours")) == set(plain.state_dict())
    _, runtime = offloaded(make, tmp_path / "swap", tmp_path / "ours")
    with runtime:
        check(runtime, type(plain).from_pretrained(tmp_path / "ours"))


# Other conversions, each against from_pretrained


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives Llama a mapping, in transformers' own table."""
    mapping.get_checkpoint_conversion_mapping("llama")  # fills the table

    def register(*transforms: Any) -> None:
        for name in ("LlamaForCausalLM", "llama"):  # by class; in older versions by the model's type
            monkeypatch.setitem(mapping._checkpoint_conversion_mapping_cache, name, list(transforms))

    return register


# Operations that transformers did not have from the first on.
Interleave, Split = (getattr(core_model_loading, name, None) for name in ("Interleave", "Split"))
# Before 5.16 transformers takes `row_10` before `row_2`.
NUMBERED = {"join columns", "stack columns", "numbered from one"}
COUNTS = "num_shards_attribute" in inspect.signature(Chunk).parameters
CountedChunk = functools.partial(Chunk, num_shards_attribute="parts") if COUNTS else Chunk
needs_split = pytest.mark.skipif(Split is None, reason="this transformers has no operation that splits unevenly")


def converter(sources: Any, targets: Any, *operations: Any) -> WeightConverter:
    return WeightConverter(sources, targets, operations=list(operations))


QKV = [f"self_attn.{name}_proj.weight" for name in "qkv"]
CONVERSIONS: dict[str, Any] = {
    "chunk": (
        converter(r"self_attn\.qkv\.weight", QKV, Chunk(dim=0)),
        lambda own: {"self_attn.qkv.weight": torch.cat([own.pop(name) for name in QKV])},
        {"num_key_value_heads": 4},
    ),
    "transpose": (
        converter("mlp.up.weight", "mlp.up_proj.weight", Transpose(0, 1)),
        lambda own: {"mlp.up.weight": own.pop("mlp.up_proj.weight").t().contiguous()},
        {},
    ),
    "transpose if needed": (
        converter("_proj.weight", "_proj.weight", Transpose(0, 1, check_dims=True)),
        lambda own: {"mlp.up_proj.weight": own.pop("mlp.up_proj.weight").t().contiguous()},
        {},
    ),
    "join rows": (
        converter(["self_attn.first.weight", "self_attn.last.weight"], "self_attn.q_proj.weight", Concatenate(dim=0)),
        lambda own: dict(
            zip(
                ["self_attn.first.weight", "self_attn.last.weight"],
                [part.clone() for part in own.pop("self_attn.q_proj.weight").split([5, 11])],
                strict=True,
            )
        ),
        {},
    ),
    "join columns": (
        converter("mlp.down_*.weight", "mlp.down_proj.weight", Concatenate(dim=1)),
        lambda own: {
            f"mlp.down_{number}.weight": part.clone()
            for number, part in enumerate(own.pop("mlp.down_proj.weight").split(2, dim=1))
        },
        {},
    ),
    "stack columns": (
        converter("mlp.column_*.weight", "mlp.down_proj.weight", MergeModulelist(dim=1)),
        lambda own: {
            f"mlp.column_{number}.weight": part.clone()
            for number, part in enumerate(own.pop("mlp.down_proj.weight").unbind(1))
        },
        {},
    ),
    "numbered from one": (
        converter("mlp.row_*.weight", "mlp.down_proj.weight", MergeModulelist(dim=0)),
        lambda own: {
            f"mlp.row_{number}.weight": part.clone()
            for number, part in enumerate(own.pop("mlp.down_proj.weight").unbind(0), 1)
        },
        {},
    ),
    "renamed": (
        WeightRenaming(r"attention\.(\w)_lin\.", r"self_attn.\1_proj."),
        lambda own: {f"attention.{letter}_lin.weight": own.pop(f"self_attn.{letter}_proj.weight") for letter in "qko"},
        {},
    ),
}
if Split is not None:
    CONVERSIONS["split"] = (
        converter("self_attn.qkv.weight", QKV, Split(dim=0)),
        lambda own: {"self_attn.qkv.weight": torch.cat([own.pop(name) for name in QKV])},
        {},
    )


@pytest.mark.parametrize("name", CONVERSIONS if COUNTS else [name for name in CONVERSIONS if name not in NUMBERED])
@pytest.mark.parametrize("block", [64, 4 << 20])
def test_every_conversion_gives_what_from_pretrained_gives(
    tmp_path: Path, registered: Any, monkeypatch: pytest.MonkeyPatch, name: str, block: int
) -> None:
    transform, convert, changed = CONVERSIONS[name]
    torch.manual_seed(1)
    original = llama(**changed)
    registered(transform)
    tensors: dict[str, torch.Tensor] = {}
    for key, values in original.state_dict().items():
        if ".layers." not in key:
            tensors[key] = values.clone()
    for number in range(2):
        start = f"model.layers.{number}."
        own = {key.removeprefix(start): each.clone() for key, each in original.state_dict().items() if start in key}
        tensors.update({start + key: each for key, each in (convert(own) | own).items()})
    assert set(tensors) != set(original.state_dict()) or "if needed" in name
    (tmp_path / "saved").mkdir()
    original.config.save_pretrained(tmp_path / "saved")
    save_file(tensors, tmp_path / "saved" / "model.safetensors", metadata={"format": "pt"})
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert all(torch.equal(plain.get_parameter(key), original.get_parameter(key)) for key in plain.state_dict())
    monkeypatch.setattr(weights_module, "BLOCK_NBYTES", block)
    _, runtime = offloaded(lambda: llama(**changed), tmp_path / "swap", tmp_path / "saved")
    with runtime:
        check(runtime, plain)


@pytest.mark.parametrize(
    ("operations", "said"),
    [
        ([PermuteForRope()], r"PermuteForRope, for model.layers.0.self_attn.q_proj.weight"),
        pytest.param(
            [(Interleave or MergeModulelist)(dim=0)],
            r"Interleave\(dim=0\), for",
            marks=pytest.mark.skipif(Interleave is None, reason="this transformers has no operation that interleaves"),
        ),
        pytest.param(
            [CountedChunk(dim=0)],
            r"Chunk\(dim=0\), for",
            marks=pytest.mark.skipif(not COUNTS, reason="this transformers has no chunks counted by an attribute"),
        ),
        ([Chunk(dim=1)], r"Chunk\(dim=1\), for"),
        ([Transpose(0, 1), MergeModulelist(dim=0)], r"Transpose, MergeModulelist\(dim=0\), for"),
        ([type("Renumber", (MergeModulelist,), {})()], r"Renumber\(dim=0\), for"),
    ],
)
def test_what_cannot_be_streamed_is_named_and_nothing_is_guessed(
    tmp_path: Path, registered: Any, operations: list[Any], said: str
) -> None:
    registered(converter("attention.wq.weight", "self_attn.q_proj.weight", *operations))
    tensors = {
        name.replace("self_attn.q_proj", "attention.wq"): values.clone()
        for name, values in llama().state_dict().items()
    }
    save_file(tensors, tmp_path / "file.safetensors")
    with pytest.raises(tiermem.ConfigError, match=said) as caught:
        offloaded(llama, tmp_path / "swap", tmp_path / "file.safetensors")
    message = str(caught.value)
    assert "cannot be streamed: model.layers.0.attention.wq.weight (" in message
    assert "from_pretrained" in message
    assert "missing" not in message
    assert "not in the model" not in message


@needs_split
def test_parts_that_do_not_fit_are_named(tmp_path: Path, registered: Any) -> None:
    registered(
        converter("self_attn.qkv.weight", QKV, Split(dim=0)),
        converter("mlp.down_*.weight", "mlp.down_proj.weight", Concatenate(dim=1)),
        converter(["mlp.a.weight", "mlp.b.weight"], "mlp.up_proj.weight", Concatenate(dim=0)),
    )
    tensors = {name: values.clone() for name, values in llama().state_dict().items()}
    for name in QKV:
        del tensors[f"model.layers.0.{name}"]
    tensors["model.layers.0.self_attn.qkv.weight"] = torch.zeros(31, 16)
    del tensors["model.layers.0.mlp.down_proj.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors |= {f"model.layers.0.mlp.down_{number}.weight": torch.zeros(16, 8) for number in (0, 2)}
    tensors["model.layers.1.mlp.b.weight"] = torch.zeros(12, 16)
    save_file(tensors, tmp_path / "file.safetensors")
    with pytest.raises(tiermem.ConfigError) as caught:
        offloaded(llama, tmp_path / "swap", tmp_path / "file.safetensors")
    message = str(caught.value)
    assert "of another shape: model.layers.0.self_attn.qkv.weight (expected [32, 16], found [31, 16])" in message
    assert "missing from the file: model.layers.0.mlp.down_1.weight, model.layers.1.mlp.a.weight; " in message


# What is held


class Held(TorchDispatchMode):
    """The most bytes that tensors made under it have held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
        for each in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given | self._known:
                storage = each.untyped_storage()
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return made

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


@pytest.fixture
def loader() -> Iterator[TensorLoader]:
    with TensorLoader() as loader:
        yield loader


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
def test_beside_the_parameter_a_block_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: TensorLoader, dtype: torch.dtype, strided: bool
) -> None:
    block = 128
    plain = saved(tmp_path / "saved", max_shard_size="10KB")
    with torch.device("meta"):
        model = mixtral().to(dtype)
    source = open_weights(tmp_path / "saved", model, loader)
    monkeypatch.setattr(weights_module, "BLOCK_NBYTES", block)
    for name, parameter in plain.named_parameters():
        values = torch.full(parameter.shape, torch.nan, dtype=dtype)
        values = values.transpose(0, -1).contiguous().transpose(0, -1) if strided else values
        with Held() as held:
            assert source.fill((name,), values)
        assert torch.equal(values, parameter.detach().to(dtype)), name
        straight = dtype == torch.float32 and values.is_contiguous()
        assert held.most <= (0 if straight else block), (name, held.most)
        assert straight or held.most > 0, "the counting counts"


@pytest.mark.parametrize("fault", ["EIO", "cut short"])
def test_a_fault_in_the_middle_of_a_merged_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: TensorLoader, fault: str
) -> None:
    saved(tmp_path / "saved", max_shard_size="10KB")
    with torch.device("meta"):
        model = mixtral()
    source = open_weights(tmp_path / "saved", model, loader)
    own = "model.layers.1.mlp.experts.gate_up_proj"
    piece = f"model.layers.1.block_sparse_moe.experts.{EXPERTS // 2}.w3.weight"
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    file = tmp_path / "saved" / index["weight_map"][piece]
    offset = weights_module.find_tensors(tmp_path / "saved")[piece][1].offset
    if fault == "cut short":
        os.truncate(file, offset + 4)
        expected: type[Exception] = swap.FormatError
    else:
        read, expected = swap.SystemCalls.preadv, swap.SwapIOError

        def failing(system: Any, fd: int, view: memoryview, at: int) -> int:
            if at == offset and os.path.samestat(os.fstat(fd), file.stat()):
                raise OSError(errno.EIO, "broken")
            return read(system, fd, view, at)

        monkeypatch.setattr(swap.SystemCalls, "preadv", failing)
    with pytest.raises(expected, match=file.name):
        source.fill((own,), torch.empty(model.get_parameter(own).shape))


def test_pieces_that_are_not_the_whole_are_a_bug(tmp_path: Path, loader: TensorLoader) -> None:
    saved(tmp_path / "saved")
    file, info = weights_module.find_tensors(tmp_path / "saved")["model.norm.weight"]
    source = weights_module.PretrainedWeights({"a": [(file, Piece(info))], "b": []}, None, loader)
    assert source.fill(("a",), torch.empty(16))
    for name, shape in (("a", (2, 16)), ("b", (16,))):
        with pytest.raises(tiermem.InvariantError, match="pieces are not"):
            source.fill((name,), torch.empty(shape))


# Pure


@st.composite
def merges(draw: st.DrawFn) -> Any:
    """A recipe, its tensors in an order of the file's own, and what torch makes of them."""
    sources = draw(st.integers(1, 3))
    stack = draw(st.integers(0, 2)) if sources == 1 or draw(st.booleans()) else None
    join = draw(st.sampled_from([dim for dim in range(3 if stack is not None else 2) if dim != stack]))
    count = draw(st.integers(1, 12)) if stack is not None else 1
    axis = join - 1 if stack is not None and join > stack else join
    tensors, groups = {}, []
    for source in range(sources):
        shape = [3, 4]
        shape[axis] = draw(st.integers(1, 3))
        group = {f"x.{number}.part{source}": torch.randn(shape) for number in range(count)}
        tensors |= group
        groups.append(list(group.values()))
    whole = groups[0][0] if stack is None else torch.stack(groups[0], stack)
    if sources > 1:
        whole = torch.cat([each[0] if stack is None else torch.stack(each, stack) for each in groups], join)
    operations: list[Any] = [] if stack is None else [Stack(stack)]
    operations += [Join(join)] if sources > 1 else []
    patterns = [f"x.*.part{source}" for source in range(sources)]
    recipe = Recipe(tuple(patterns), ("x.whole",), tuple(operations))
    names = draw(st.permutations(sorted(tensors)))
    origins = {name: Origin(name, "x.whole", recipe, int(name[-1]), int(name.split(".")[1])) for name in names}
    return origins, tensors, whole


def infos_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, each.dtype, tuple(each.shape), 0) for name, each in tensors.items()}


@settings(max_examples=number_of(80, 200))
@given(case=merges(), lost=st.integers(0, 40))
def test_pieces_cover_the_parameter_and_what_is_lost_is_named(case: Any, lost: int) -> None:
    origins, tensors, whole = case
    expected = [Expected(("x.whole",), tuple(whole.shape), whole.dtype)]
    found = match(expected, infos_of(tensors), Rules(), origins)
    assert found.problems() == ""
    values = torch.full_like(whole, torch.nan)
    for piece in found.found["x.whole"]:
        place = piece.place(values)
        assert place.isnan().all(), "nothing is written twice"
        place.copy_(tensors[piece.info.name])
    assert torch.equal(values, whole)
    name = sorted(tensors)[lost % len(tensors)]
    del tensors[name], origins[name]
    found = match(expected, infos_of(tensors), Rules(), origins)
    if tensors:
        assert found.incomplete == [name]
    else:
        assert found.missing == ["x.whole"]
    assert found.shapes == found.surplus == []


@pytest.mark.parametrize("operations", [(), (Join(0), Stack(0)), (Transposed(0, 1), Join(0)), (Divide(True), Join(0))])
def test_a_chain_that_cannot_be_streamed_is_no_recipe(operations: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="chains of operations"):
        Recipe(("a",), ("b",), operations)


def test_a_model_that_is_not_of_transformers_keeps_its_names() -> None:
    names = ["b.10.gamma", "b.2.LayerNorm.gamma", "a"]
    origins = find_origins(nn.Linear(2, 2), names, lambda _: True)
    assert origins == {name: Origin(name, name) for name in names}
    assert list(origins) == ["a", "b.2.LayerNorm.gamma", "b.10.gamma"]
