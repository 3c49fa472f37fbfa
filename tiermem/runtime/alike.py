"""Whether all ranks have brought the same model and the same settings.

Owns the comparison, and what of them is compared: all on which the bytes that ranks exchange depend. Does not compare
values, which are rank 0's (but of a snapshot each reads its part, so all have the same), nor what is each rank's own
affair (directories, look-ahead, seeds). Guarantees that ranks which differ are all told how, before anything is opened
or exchanged.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

from torch import nn

from tiermem.config import Config
from tiermem.errors import ConfigError
from tiermem.runtime.blueprint import Blueprint
from tiermem.runtime.company import Company
from tiermem.zero3.collectives import by_rank


def require_alike(model: nn.Module, blueprint: Blueprint, config: Config, company: Company, *, values: str) -> None:
    """Wait for all ranks; raise ConfigError on all unless they have the same layout, buffers and source of `values`."""
    if company.size == 1:
        return
    summary = _summary(model, blueprint, config)
    told = company.computing.tell_text(f"{summary}, {values}")
    if len(set(told)) > 1:
        raise ConfigError(
            f"the ranks have different models or settings: {by_rank(told)}. All of them build the same model, freeze "
            "the same parameters, and call offload with the same settings"
        )


def _summary(model: nn.Module, blueprint: Blueprint, config: Config) -> str:
    """The settings in words, and the rest as sums of which the first that differs says where to look."""
    record = blueprint.record(config)
    units = record.pop("units")
    slots = [slot for _, inside in units for slot in inside]
    buffers = [[name, list(each.shape), str(each.dtype)] for name, each in model.named_buffers()]
    kept = record.pop("kept") or []
    words = {name: value for name, value in record.items() if value is not None}
    words |= {"kept": f"{len(kept)} units", "units": _sum([[name, len(inside)] for name, inside in units])}
    words["parameters"] = _sum([slot[:3] for slot in slots])
    words |= {"trained": _sum([slot[4] for slot in slots]), "layout": _sum(units), "buffers": _sum(buffers)}
    return ", ".join(f"{name}={value}" for name, value in words.items())


def _sum(what: Sequence[object]) -> str:
    return f"{len(what)}:{zlib.crc32(json.dumps(what).encode()):08x}"
