"""A DeepSpeed configuration, read as what it means here: a `Config`, arguments of `AdamW`, and the rest with reasons.

Owns the translation. Does not import DeepSpeed, build anything, or know models. Guarantees that every key is
translated, listed as without effect and why, or refused with what to do: none is dropped in silence.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermem.config import Config
from tiermem.errors import ConfigError
from tiermem.integrations.deepspeed_keys import (
    ACCUMULATION,
    LOGGED,
    LOGGING,
    OFF,
    ONLY,
    TRANSLATED,
    WITHOUT_EFFECT,
    ZERO,
)
from tiermem.settings_file import once

AUTO = "auto"  # what transformers' Trainer fills in from its own arguments
_AUTO = "'auto' is filled in by transformers' Trainer: its arguments hold"
_KNOWN = (ACCUMULATION, *TRANSLATED, *WITHOUT_EFFECT, *ONLY, *OFF, *LOGGING)
_OFFLOADED = (f"{ZERO}.offload_param", f"{ZERO}.offload_optimizer")
_LOOP = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")


@dataclass(frozen=True, slots=True)
class Translation:
    """What a DeepSpeed configuration means here.

    `config`: for `tiermem.offload`. `adamw`: keyword arguments of `tiermem.AdamW`, DeepSpeed's own defaults spelled out
    where they are others. `loop`: sizes of batches, by DeepSpeed's names, which the training loop has to honour.
    `without_effect`: why, by key.
    """

    config: Config
    adamw: Mapping[str, Any]
    loop: Mapping[str, int]
    without_effect: Mapping[str, str]


def translate(configuration: Mapping[str, Any] | str | os.PathLike[str], **settings: Any) -> Translation:
    """Translate a configuration, or the JSON file of one.

    `settings` go to `Config`, in place of what was translated where both give one: budgets above all (host_memory,
    device_memory), for which DeepSpeed has no word, and swap_dirs where nothing was offloaded to NVMe.

    Raises ConfigError naming the key, for what is unknown, contradictory, or asks for what tiermem does not do.
    """
    leaves = dict(_leaves(_read(configuration)))
    without = {key: reason for key, value in leaves.items() if (reason := _judge(key, value)) is not None}
    known = {key: value for key, value in leaves.items() if key not in without}
    for what in _OFFLOADED:
        if f"{what}.nvme_path" in known and known.get(f"{what}.device") != "nvme":
            without[f"{what}.nvme_path"] = "the device beside it is not nvme"
    return Translation(
        Config(**(_config(known, leaves, settings) | settings)), _adamw(known, leaves), _loop(known), without
    )


def _read(configuration: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(configuration, Mapping):
        return configuration
    if not isinstance(configuration, str | os.PathLike):
        raise ConfigError(
            f"expected a DeepSpeed configuration or the name of its file, found {type(configuration).__name__}"
        )
    try:
        found = json.loads(Path(configuration).read_text("utf-8"), object_pairs_hook=once)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{os.fspath(configuration)!r}: expected a DeepSpeed configuration, found {error}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{os.fspath(configuration)!r}: expected a JSON object, found {type(found).__name__}")
    return found


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys joined by dots and their values; sections that are judged as a whole stay whole."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and (value or _is_section(key)) and key not in OFF and key not in LOGGING:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _is_section(key: str) -> bool:
    return any(name.startswith(f"{key}.") for name in _KNOWN)


def _judge(key: str, value: Any) -> str | None:
    """Why a key has no effect; None: it is translated. Raises ConfigError if it is neither."""
    if key in OFF:
        on = value.get("enabled", bool(value)) if isinstance(value, Mapping) else bool(value)
        if on:
            raise ConfigError(f"DeepSpeed's {key!r} is switched on: {OFF[key]}")
        return "it is off"
    if key in LOGGING:
        return LOGGED
    if key in ONLY:
        wanted, advice = ONLY[key]
        if key == "fp16.enabled" and value == AUTO:
            return _AUTO
        if value is not None and value != wanted:
            raise ConfigError(f"DeepSpeed's {key!r}: expected {wanted!r}, found {value!r}; {advice}")
        return "as it is here in any case"
    if key in WITHOUT_EFFECT:
        return WITHOUT_EFFECT[key]
    if key == ACCUMULATION:
        return "gradients are added up in the dtype of the parameters"
    if key not in TRANSLATED:
        _refuse_unknown(key, value)
    if value is None or key == "scheduler":
        return "it is not given"
    if value == AUTO:
        return _AUTO
    return None


def _refuse_unknown(key: str, value: Any) -> None:
    if key == "scheduler" and not value:
        return
    if key == "scheduler" or key.startswith("scheduler."):
        raise ConfigError(
            "DeepSpeed's 'scheduler': tiermem.AdamW takes the schedulers of torch.optim.lr_scheduler and of "
            "transformers; make one, and leave the section out"
        )
    if _is_section(key):
        if value is None:
            return
        raise ConfigError(f"DeepSpeed's {key!r}: expected a section, found {value!r}")
    close = difflib.get_close_matches(key, _KNOWN, 1)
    advice = f"did you mean {close[0]!r}?" if close else "leave it out if nothing depends on it"
    raise ConfigError(f"DeepSpeed's {key!r} is not known here, found {value!r}; {advice}")


def _config(known: Mapping[str, Any], leaves: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if leaves.get("bf16.enabled") == AUTO and "param_dtype" not in settings:
        raise ConfigError("DeepSpeed's 'bf16.enabled' is 'auto': pass param_dtype='bfloat16' or 'float32' to translate")
    config["param_dtype"] = "bfloat16" if _flag(known, "bf16.enabled") else "float32"
    _require_same_accumulation(leaves, settings.get("param_dtype", config["param_dtype"]))
    stage = leaves.get(f"{ZERO}.stage", 0)  # not of `known`: "auto" is no stage, and is to be named
    is_open = stage in (AUTO, None)
    if stage not in (1, 2, 3) and not (is_open and "stage" in settings):
        advice = "pass stage= to translate" if is_open else "tiermem divides state at least"
        raise ConfigError(f"DeepSpeed's '{ZERO}.stage': expected 1, 2 or 3, found {stage!r}; {advice}")
    config["stage"] = stage
    directories: dict[str, str] = {}  # by what they are, however they are spelled
    for what in _OFFLOADED:
        device = known.get(f"{what}.device", "none")
        path = known.get(f"{what}.nvme_path")
        if device not in ("none", "cpu", "nvme"):
            raise ConfigError(f"DeepSpeed's '{what}.device': expected none, cpu or nvme, found {device!r}")
        if device == "nvme":
            if not path:
                raise ConfigError(f"DeepSpeed's '{what}.device' is nvme: expected an nvme_path, found none")
            directories.setdefault(os.path.realpath(os.path.expanduser(str(path))), str(path))
    config["swap_dirs"] = list(directories.values())
    if not directories and not settings.get("swap_dirs"):
        raise ConfigError(
            "nothing is offloaded to nvme in this DeepSpeed configuration, and tiermem keeps what host_memory does not "
            "hold in files: pass swap_dirs=[...] to translate"
        )
    return config | {name: known[f"aio.{name}"] for name in ("block_size", "queue_depth") if f"aio.{name}" in known}


def _require_same_accumulation(leaves: Mapping[str, Any], param_dtype: Any) -> None:
    """Gradients of micro-batches are added up in the dtype of the parameters, as plain PyTorch does."""
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    found = leaves.get(ACCUMULATION)
    if found is not None and names.get(str(found), found) != str(param_dtype).removeprefix("torch."):
        raise ConfigError(
            f"DeepSpeed's {ACCUMULATION!r}: expected {param_dtype} or nothing, found {found!r}; gradients are "
            "added up in the dtype of the parameters"
        )


def _adamw(known: Mapping[str, Any], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `tiermem.AdamW`; where DeepSpeed's default is not tiermem's, it is given."""
    adamw: dict[str, Any] = {}
    kind = known.get("optimizer.type")
    if kind is not None:
        if str(kind).lower() not in ("adam", "adamw"):
            raise ConfigError(
                f"DeepSpeed's 'optimizer.type': expected AdamW or Adam, found {kind!r}; there is AdamW only"
            )
        for name in ("lr", "betas", "eps", "weight_decay"):
            if f"optimizer.params.{name}" in known:
                adamw[name] = known[f"optimizer.params.{name}"]
        if "optimizer.params.weight_decay" not in leaves and not _flag(known, "optimizer.params.torch_adam"):
            adamw["weight_decay"] = 0.0  # of DeepSpeed's own Adam; torch's, and tiermem's, is 0.01
        if isinstance(adamw.get("betas"), list):
            adamw["betas"] = tuple(adamw["betas"])
    elif any(key.startswith("optimizer.params.") for key in leaves):
        raise ConfigError("DeepSpeed's 'optimizer': expected a type beside params, found none")
    if known.get("gradient_clipping"):  # 0 clips nothing
        adamw["max_grad_norm"] = known["gradient_clipping"]
    return adamw


def _loop(known: Mapping[str, Any]) -> dict[str, int]:
    """What the loop has to do. Raises ConfigError where the three sizes cannot belong together."""
    loop = {name: known[name] for name in _LOOP if name in known}
    for name, size in loop.items():
        if type(size) is not int or size < 1:
            raise ConfigError(f"DeepSpeed's {name!r}: expected a whole number above 0, found {size!r}")
    if len(loop) == len(_LOOP):
        micro, accumulated, whole = (loop[name] for name in _LOOP)
        if whole % (micro * accumulated):
            raise ConfigError(
                f"DeepSpeed's train_batch_size: expected a multiple of {micro} x {accumulated} "
                f"(micro-batch x accumulation), found {whole}"
            )
    return loop


def _flag(known: Mapping[str, Any], key: str) -> bool:
    value = known.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"DeepSpeed's {key!r}: expected true or false, found {value!r}")
    return value
