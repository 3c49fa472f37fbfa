"""A model as the planner sees it: units, sizes and order, from its configuration alone.

Owns the way from a Hugging Face configuration (or a number of parameters) to a `Workload`. Does not allocate the
model: it is built on the meta device and divided as `tiermem.offload` would divide it. Guarantees that unit sizes are
those the runtime would have; the order is that of the modules' names, the order of use in ordinary models.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from tiermem.cli.presets import empty_model
from tiermem.config import Config
from tiermem.errors import ConfigError
from tiermem.planner.workload import UnitWork, Workload, order_of, unit_flops
from tiermem.runtime.blueprint import Blueprint, draw
from tiermem.zero3.coalesce import small_nbytes
from tiermem.zero3.hooks import may_checkpoint_itself
from tiermem.zero3.keep import Keep, Keeping
from tiermem.zero3.order import Phase
from tiermem.zero3.units import ModelUnits

# 70B, 1.5T, 125000000; and as programs and people write the last: 1.25e8, 125_000_000, 125,000,000.
_COUNT = re.compile(
    r"\s*([0-9]{1,30}(?:[_,][0-9]{3}){0,9}(?:\.[0-9]{1,30})?)(?:\s*([KMBT])|e\+?([0-9]{1,2}))?\s*", re.IGNORECASE
)
_SCALES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_ANY_BUDGET = 1 << 60


def is_count(text: str) -> bool:
    """Whether `parse_count` takes it, and no file has that name."""
    return _COUNT.fullmatch(text) is not None and not Path(text).exists()


def parse_count(text: str) -> int:
    """A number of parameters from text such as "70B", "1.5e9" or "125000000". Raises ConfigError for anything else."""
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ConfigError(f"expected a number of parameters such as 125M, 70B or 1T, found {text!r}")
    digits, scale, exponent = match.groups(default="")
    number = float(re.sub("[_,]", "", digits))
    return round(number * (10 ** int(exponent) if exponent else _SCALES[scale.upper()]))


def model_workload(config: Any, name: str, *, batch: int, seq: int, batches: int, settings: Config) -> Workload:
    """The step of the model that `config` describes. Raises ConfigError if it is no causal language model.

    `settings`: the run's, whose budgets decide which small units become one.
    """
    model = empty_model(config)
    width = getattr(config.get_text_config(decoder=True), "hidden_size", 0)
    dtype = str(settings.param_dtype)
    budgets = [budget for budget in (settings.host_nbytes, settings.device_nbytes) if budget is not None]
    small = small_nbytes("auto", min(budgets, default=_ANY_BUDGET))
    return workload_of(
        model,
        name,
        batch=batch,
        seq=seq,
        batches=batches,
        dtype=dtype,
        moments=settings.moments,
        width=width,
        coalesce=small,
    )


def workload_of(
    model: nn.Module,
    name: str,
    *,
    batch: int,
    seq: int,
    batches: int,
    dtype: str,
    moments: str = "float32",
    width: int = 0,
    keep: Keep = None,
    coalesce: int | str = 0,
) -> Workload:
    """The step of a model (on any device) that sees `batch` sequences of `seq` tokens, `batches` times.

    `width`: of its attention, for the operations that do not depend on weights. `keep`, `coalesce`: as
    `tiermem.offload` takes them; "auto" as with a budget of 128 MiB or more.
    """
    types: dict[str, Any] = {"param_dtype": dtype, "moments": moments}
    settings = Config(device="cpu", host_memory=_ANY_BUDGET, swap_dirs=["."], **types)
    blueprint = draw(model, settings, None, keeping=Keeping(keep), coalesce=coalesce)
    itemsize = settings.dtype.itemsize
    calls = list(_passes(_calls(blueprint.divided)))
    tokens = batch * seq
    used: dict[int, int] = {}
    for called in calls:
        used[called.unit] = used.get(called.unit, 0) + called.product
    units = []
    # Backward comes to what forward used last first, and that is mostly what was made last.
    runs = blueprint.runs(slot.parameter for layout in blueprint.layouts for slot in reversed(layout.trainable))
    for size, unit in zip(blueprint.sizes, blueprint.divided.units, strict=True):
        numel = size.param_nbytes // itemsize
        attends = next(iter(unit.root.children()), None) is not None
        flops = unit_flops(numel, tokens, seq=seq, width=width if attends else 0) if used.get(unit.number) else 0.0
        nested = size.nested_nbytes - size.nested_kept
        count = size.nested_count
        work = UnitWork(unit.name, numel, size.trainable_numel, flops, nested, kept=unit.kept, nested_count=count)
        exact = _exact(blueprint, unit.number) if moments == "int8" else ()
        units.append(replace(work, runs=tuple(runs.get(unit.number, ())), exact=exact))
    counted = sum(parameter.numel() for parameter in model.parameters())
    order = order_of([(called.unit, called.product and called.reached) for called in calls])
    arriving = [access for access in order if access.phase is not Phase.GRADIENT or units[access.unit].trainable]
    return Workload(name, tuple(units), tuple(arriving), tokens, batches, dtype, moments, counted)


def _exact(blueprint: Blueprint, unit: int) -> tuple[tuple[int, int], ...]:
    """Where the parameters of a unit lie whose moments stay float32 beside 8-bit ones."""
    state = blueprint.states.get(unit)
    return tuple((part.start, part.numel) for part in state.segments if not part.quantized) if state else ()


class _Call(NamedTuple):
    """`product`: more than a look-up, which needs no values in backward. `reached`: by backward, if there are any."""

    unit: int
    product: bool
    reached: bool


def _passes(calls: Iterator[_Call]) -> Iterator[_Call]:
    """Calls of one coalesced unit that follow one another as the one use of it that they are."""
    for number, each in itertools.groupby(calls, key=operator.attrgetter("unit")):
        uses = list(each)
        yield _Call(number, any(use.product for use in uses), any(use.reached for use in uses))


def _calls(divided: ModelUnits) -> Iterator[_Call]:
    """The units in the order their modules are called.

    Backward ends where nothing before is trained: it does not come to the frozen layers that a model begins with.
    """
    reached = False
    roots: dict[int, list[int]] = {}
    for unit in divided.units:  # a root may have several: see "Frozen apart" and "Kept apart" in zero3/units.py
        for root, _ in unit.parts:
            roots.setdefault(id(root), []).append(unit.number)
    tops = [root for unit in divided.units for root, _ in unit.parts]
    inside = {id(inner) for root in tops for inner in root.modules() if inner is not root}
    for point in divided.points:
        # A unit may lie inside another one's module: an output layer below a head that has a bias of its own.
        if (id(point.module) in inside and id(point.module) not in roots) or point.module is divided.model:
            continue
        # A look-up needs no values in backward. But they are brought for a module that might compute its forward again.
        needed = not isinstance(point.module, nn.Embedding) or may_checkpoint_itself(point.module)
        reached = reached or any(parameter.requires_grad for parameter in point.module.parameters())
        for number in roots.get(id(point.module), point.units):
            yield _Call(number, needed, reached)
