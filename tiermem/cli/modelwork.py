"""A model as the planner sees it: units, sizes and order, from its configuration alone.

Owns the way from a Hugging Face configuration (or a number of parameters) to a `Workload`. Does not allocate the
model: it is built on the meta device and divided as `tiermem.offload` would divide it. Guarantees that unit sizes are
those the runtime would have; the order is that of the modules' names, the order of use in ordinary models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import nn

import tiermem
from tiermem.cli.presets import empty_model
from tiermem.errors import ConfigError
from tiermem.planner.workload import UnitWork, Workload, order_of, unit_flops
from tiermem.runtime.blueprint import draw
from tiermem.zero3.keep import Keep, Keeping
from tiermem.zero3.units import ModelUnits

_COUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMBT]?)\s*", re.IGNORECASE)
_SCALES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_ANY_BUDGET = 1 << 60


def is_count(text: str) -> bool:
    """Whether `parse_count` takes it, and no file has that name."""
    return _COUNT.fullmatch(text) is not None and not Path(text).exists()


def parse_count(text: str) -> int:
    """A number of parameters from text such as "70B", "1.5T" or "125000000". Raises ConfigError for anything else."""
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ConfigError(f"expected a number of parameters such as 125M, 70B or 1T, found {text!r}")
    return round(float(match.group(1)) * _SCALES[match.group(2).upper()])


def model_workload(
    config: Any, name: str, *, batch: int, seq: int, batches: int, dtype: str, moments: str = "float32"
) -> Workload:
    """The step of the model that `config` describes. Raises ConfigError if it is no causal language model."""
    model = empty_model(config)
    width = getattr(config, "hidden_size", 0)
    found = workload_of(model, name, batch=batch, seq=seq, batches=batches, dtype=dtype, width=width)
    return replace(found, moments=moments)


def workload_of(
    model: nn.Module, name: str, *, batch: int, seq: int, batches: int, dtype: str, width: int = 0, keep: Keep = None
) -> Workload:
    """The step of a model (on any device) that sees `batch` sequences of `seq` tokens, `batches` times.

    `width`: of its attention, for the operations that do not depend on weights. `keep`: as `tiermem.offload` takes it.
    """
    settings = tiermem.Config(device="cpu", host_memory=_ANY_BUDGET, swap_dirs=["."], param_dtype=cast("Any", dtype))
    blueprint = draw(model, settings, None, keeping=Keeping(keep))
    itemsize = settings.dtype.itemsize
    calls = list(_calls(blueprint.divided))
    tokens = batch * seq
    used: dict[int, int] = {}
    for called, product in calls:
        used[called] = used.get(called, 0) + product
    units = []
    for size, unit in zip(blueprint.sizes, blueprint.divided.units, strict=True):
        numel = size.param_nbytes // itemsize
        attends = next(iter(unit.root.children()), None) is not None
        flops = unit_flops(numel, tokens, seq=seq, width=width if attends else 0) if used.get(unit.number) else 0.0
        nested = size.nested_nbytes - size.nested_kept
        count = size.nested_count
        units.append(
            UnitWork(unit.name, numel, size.trainable_numel, flops, nested, kept=unit.kept, nested_count=count)
        )
    return Workload(name, tuple(units), order_of(calls), tokens, batches, dtype)


def _calls(divided: ModelUnits) -> Iterator[tuple[int, bool]]:
    """The units in the order their modules are called, and whether backward needs their values there."""
    roots: dict[int, list[int]] = {}
    for unit in divided.units:  # a root may have several: see "Frozen apart" and "Kept apart" in zero3/units.py
        roots.setdefault(id(unit.root), []).append(unit.number)
    inside = {id(inner) for unit in divided.units for inner in unit.root.modules() if inner is not unit.root}
    for point in divided.points:
        if id(point.module) in inside or point.module is divided.model:
            continue
        for number in roots.get(id(point.module), point.units):
            yield number, not isinstance(point.module, nn.Embedding)
