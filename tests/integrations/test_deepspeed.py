"""DeepSpeed configurations: every key is translated, listed with a reason, or refused; none is dropped."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_models import mlp, mlp_step

import tiermem
from tiermem import ConfigError
from tiermem.integrations import deepspeed_keys as keys
from tiermem.integrations.deepspeed import translate

NVME = {"device": "nvme", "nvme_path": "/nvme0", "pin_memory": True, "buffer_count": 4}
CONFIGURATION: dict[str, Any] = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {
        "stage": 2,
        "offload_param": NVME,
        "offload_optimizer": NVME | {"nvme_path": "/nvme1", "pipeline_read": True, "ratio": 1.0},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "stage3_param_persistence_threshold": "auto",
    },
    "aio": {"block_size": 1 << 20, "queue_depth": 16, "single_submit": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.2}},
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": 4,
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 16,
    "steps_per_print": 10,
    "tensorboard": {"enabled": True, "output_path": "somewhere"},
    "autotuning": {"enabled": False},
}


def changed(**sections: Any) -> dict[str, Any]:
    return copy.deepcopy(CONFIGURATION) | sections


def at(key: str, value: Any) -> dict[str, Any]:
    """The configuration with one key, by its dotted name, set."""
    whole = copy.deepcopy(CONFIGURATION)
    *sections, name = key.split(".")
    section = whole
    for each in sections:
        section = section.setdefault(each, {})
    section[name] = value
    return whole


def test_what_is_translated() -> None:
    found = translate(CONFIGURATION, host_memory="1GiB")
    assert found.config == tiermem.Config(
        param_dtype="bfloat16",
        stage=2,
        swap_dirs=["/nvme0", "/nvme1"],
        block_size=1 << 20,
        queue_depth=16,
        host_memory="1GiB",
    )
    assert found.adamw == {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.2, "max_grad_norm": 0.5}
    assert found.loop == {
        "gradient_accumulation_steps": 4,
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 16,
    }


def test_every_key_is_accounted_for() -> None:
    found = translate(CONFIGURATION)
    assert set(found.without_effect) == {
        "fp16.enabled",
        "fp16.loss_scale",
        *(f"zero_optimization.offload_param.{name}" for name in ("pin_memory", "buffer_count")),
        *(
            f"zero_optimization.offload_optimizer.{name}"
            for name in ("pin_memory", "buffer_count", "pipeline_read", "ratio")
        ),
        *(f"zero_optimization.{n}" for n in ("overlap_comm", "sub_group_size", "stage3_param_persistence_threshold")),
        "aio.single_submit",
        "steps_per_print",
        "tensorboard",
        "autotuning",
    }
    assert all(found.without_effect.values()), "a reason for each"


OTHER_VALUES = {
    "bf16.enabled": False,
    "optimizer.type": "Adam",
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 0,
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "aio.block_size": 2 << 20,
    "aio.queue_depth": 4,
    "zero_optimization.stage": 3,
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_param.nvme_path": "/other",
    "zero_optimization.offload_optimizer.nvme_path": "/other",
    "optimizer.params.lr": 1.0,
    "optimizer.params.betas": [0.1, 0.2],
    "optimizer.params.eps": 1.0,
    "optimizer.params.weight_decay": 0.0,
    "optimizer.params.torch_adam": True,
}
SAME_RESULT = {"optimizer.type", "optimizer.params.torch_adam"}  # by themselves; see below


@pytest.mark.parametrize("key", sorted(keys.TRANSLATED))
def test_a_translated_key_changes_the_result(key: str) -> None:
    before, after = translate(CONFIGURATION), translate(at(key, OTHER_VALUES[key]))
    assert (before == after) == (key in SAME_RESULT)


@pytest.mark.parametrize("key", sorted(keys.WITHOUT_EFFECT))
def test_a_key_without_effect_is_listed_and_changes_nothing(key: str) -> None:
    before, after = translate(CONFIGURATION), translate(at(key, 1))
    assert after.without_effect[key] == keys.WITHOUT_EFFECT[key]
    assert (before.config, before.adamw, before.loop) == (after.config, after.adamw, after.loop)


@pytest.mark.parametrize("key", sorted(keys.ONLY))
def test_a_key_that_must_be_off(key: str) -> None:
    wanted, advice = keys.ONLY[key]
    assert key in translate(at(key, wanted)).without_effect
    with pytest.raises(ConfigError) as caught:
        translate(at(key, 7 if not isinstance(wanted, bool) else not wanted))
    assert key in str(caught.value)
    assert advice in str(caught.value)


@pytest.mark.parametrize("key", sorted(keys.OFF))
def test_a_section_that_must_be_off(key: str) -> None:
    for off in ({"enabled": False, "more": 1}, {}, None, False):
        assert translate(at(key, off)).without_effect[key] == "it is off"
    for on in ({"enabled": True}, {"more": 1}, True):
        with pytest.raises(ConfigError, match=f"{key!r} is switched on"):
            translate(at(key, on))


def test_tables_do_not_contradict_each_other() -> None:
    tables = [keys.TRANSLATED, keys.WITHOUT_EFFECT, keys.ONLY, keys.OFF, keys.LOGGING]
    for one, other in itertools.combinations(tables, 2):
        assert not set(one) & set(other)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        changed(gradient_cliping=1.0),
        "'gradient_cliping' is not known here, found 1.0; did you mean 'gradient_clipping'",
    ),
    (at("zero_optimization.no_such_thing", 1), "'zero_optimization.no_such_thing' is not known"),
    (at("optimizer.params.freeze_step", 1), "'optimizer.params.freeze_step' is not known"),
    (changed(no_such_section={}), "'no_such_section' is not known here, found {}"),
    (at("zero_optimization.no_such_section", {}), "'zero_optimization.no_such_section' is not known here, found {}"),
    (at("zero_optimization.stage", {}), "expected 1, 2 or 3, found {}"),
    (changed(zero_optimization=True), "'zero_optimization': expected a section, found True"),
    (at("zero_optimization.stage", 0), "expected 1, 2 or 3, found 0"),
    (at("zero_optimization.offload_param.device", "disk"), "expected none, cpu or nvme, found 'disk'"),
    (at("zero_optimization.offload_param.nvme_path", None), "expected an nvme_path, found none"),
    (changed(zero_optimization={"stage": 3}), "pass swap_dirs="),
    (at("optimizer.type", "Lamb"), "expected AdamW or Adam, found 'Lamb'"),
    (changed(optimizer={"params": {"lr": 1.0}}), "expected a type beside params"),
    (changed(scheduler={"type": "WarmupLR"}), "torch.optim.lr_scheduler"),
    (at("bf16.enabled", "yes"), "expected true or false, found 'yes'"),
    (at("bf16.enabled", "auto"), "pass param_dtype="),
    (at("fp16.enabled", True), "take bf16"),
    (at("data_types.grad_accum_dtype", "fp32"), "expected bfloat16 or nothing, found 'fp32'"),
    (at("data_types.grad_accum_dtype", ["bf16"]), "expected bfloat16 or nothing, found ['bf16']"),
    (at("train_batch_size", 12), "expected a multiple of 2 x 4"),
    (at("gradient_accumulation_steps", 0.5), "expected a whole number above 0, found 0.5"),
    (at("aio.queue_depth", 100000), "queue_depth"),
]


@pytest.mark.parametrize(("configuration", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(configuration: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(configuration)
    assert message in str(caught.value)


def test_a_path_that_is_not_used_and_sections_that_are_empty() -> None:
    found = translate(changed(scheduler={}, fp16={}) | at("zero_optimization.offload_param.device", "cpu"))
    assert found.config.swap_dirs == ("/nvme1",)
    assert "not nvme" in found.without_effect["zero_optimization.offload_param.nvme_path"]
    assert translate(changed(scheduler={}, fp16={})).without_effect["scheduler"] == "it is not given"


def test_what_the_trainer_fills_in() -> None:
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    names = ("gradient_clipping", "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
    configuration = changed(
        optimizer={"type": "AdamW", "params": params},
        bf16={"enabled": "auto"},
        fp16={"enabled": "auto"},
        **dict.fromkeys(names, "auto"),
    )
    found = translate(configuration, param_dtype="float32")
    assert (found.adamw, found.loop, found.config.param_dtype) == ({}, {}, "float32")
    filled = [key for key, reason in found.without_effect.items() if "filled in by transformers' Trainer" in reason]
    assert set(filled) == {*names, *(f"optimizer.params.{name}" for name in params), "bf16.enabled", "fp16.enabled"}


@pytest.mark.parametrize(("params", "decay"), [({}, 0.0), ({"torch_adam": True}, None), ({"weight_decay": 0.3}, 0.3)])
def test_a_decay_that_is_not_given_is_deepspeeds(params: dict[str, Any], decay: float | None) -> None:
    found = translate(changed(optimizer={"type": "Adam", "params": params}))
    assert found.adamw.get("weight_decay") == decay, "None leaves it to tiermem.AdamW, as torch's"


def test_accumulation_in_the_dtype_of_parameters() -> None:
    for dtype, settings in (("bf16", {}), (None, {}), ("fp32", {"param_dtype": "float32"})):
        found = translate(at(keys.ACCUMULATION, dtype), **settings)
        assert "dtype of the parameters" in found.without_effect[keys.ACCUMULATION]


@pytest.mark.parametrize("other", ["/{}/", "/{}/.", "/{}/../{}", "/link"])
def test_a_folder_spelled_in_two_ways_is_one(tmp_path: Path, other: str) -> None:
    folder, link = tmp_path / "nvme", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    second = NVME | {"nvme_path": f"{tmp_path}{other.format('nvme', 'nvme')}"}
    zero = {"stage": 3, "offload_param": NVME | {"nvme_path": str(folder)}, "offload_optimizer": second}
    assert translate(changed(zero_optimization=zero)).config.swap_dirs == (str(folder),)


@pytest.mark.parametrize("stage", ["auto", None])
def test_a_stage_that_is_none_is_named_as_it_was_found(stage: str | None) -> None:
    with pytest.raises(ConfigError, match=f"expected 1, 2 or 3, found {stage!r}; pass stage= to translate"):
        translate(at("zero_optimization.stage", stage))
    assert translate(at("zero_optimization.stage", stage), stage=2).config.stage == 2


def test_what_is_no_configuration() -> None:
    with pytest.raises(ConfigError, match="or the name of its file, found list"):
        translate([])  # type: ignore[arg-type]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIGURATION))
    assert translate(path) == translate(CONFIGURATION)
    broken = [
        ("{", "expected a DeepSpeed configuration"),
        ("[]", "expected a JSON object, found list"),
        ('{"gradient_clipping": 1.0, "gradient_clipping": 0.0}', "a key twice"),
    ]
    for text, message in broken:
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            translate(str(path))
    with pytest.raises(ConfigError, match="expected a DeepSpeed configuration, found"):
        translate(tmp_path / "none.json")


def test_a_model_trains_with_what_comes_out(tmp_path: Path) -> None:
    configuration = changed(bf16={"enabled": False}, zero_optimization={"stage": 3})
    found = translate(configuration, swap_dirs=[tmp_path], host_memory="16MiB", device="cpu")
    torch.manual_seed(1)
    model, expected = mlp(), mlp()
    expected.load_state_dict(model.state_dict())
    settings = dict(found.adamw)
    norm = settings.pop("max_grad_norm")
    plain = torch.optim.AdamW(expected.parameters(), fused=True, **settings)
    with tiermem.offload(model, found.config) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), **found.adamw)
        for seed in range(3):
            torch.manual_seed(seed)
            mlp_step(model)
            optimizer.step()
            torch.manual_seed(seed)
            mlp_step(expected)
            torch.nn.utils.clip_grad_norm_(expected.parameters(), norm)
            plain.step()
            plain.zero_grad()
        for parameter, values in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(runtime.parameter(parameter), values)
