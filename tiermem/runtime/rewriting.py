"""A snapshot of what is committed, without the model.

Owns the way from the records of a commit back to layouts, and from its ranks' pages to a snapshot. Does not open swap
files. Guarantees that a record which does not give the places that were recorded is a FormatError, before a page is
read, and that the snapshot holds what `Runtime.snapshot` would have written, but for the buffers that a commit lacks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swap import FormatError
from tiermem.checkpoint.draft import Draft
from tiermem.checkpoint.exporting import held_buffers, recorded
from tiermem.checkpoint.reading import Snapshot, open_snapshot
from tiermem.checkpoint.shard import MarkedPages, MarkedState
from tiermem.checkpoint.writing import finish_snapshot, write_buffers, write_part
from tiermem.errors import ConfigError
from tiermem.runtime.moments import unit_state
from tiermem.zero3.layout import ParameterInfo, UnitLayout, plan_layout
from tiermem.zero3.shards import shards_of


@dataclass(frozen=True, slots=True)
class CommittedRank:
    """What one rank has committed: the record of its manifest, and the pages under a mark."""

    record: Mapping[str, Any]
    pages: MarkedPages


def snapshot_of(ranks: Sequence[CommittedRank], path: str | os.PathLike[str], *, seconds: float) -> Snapshot:
    """Write the commit of all `ranks`, in their order, to `path` as a snapshot of as many; waits.

    Of several copies of the model the first is written, as one of as many ranks as share it. `seconds`: when it was
    committed, since 1970 UTC. Raises ConfigError for a commit that this cannot be made of and a path that is taken,
    FormatError for a damaged record, swap.SwapError for damaged pages and a failing disk; nothing is left then.
    """
    records = [rank.record for rank in ranks]
    first = records[0]
    layouts = _layouts(first)
    whole = len(ranks) > 1 and int(first["layout"]["stage"]) < 3
    coded = frozenset(first["parameters"]["coded"])
    holders = _first_copy(ranks)
    held = []
    for number, rank in enumerate(holders):
        own = shards_of(layouts, number, whole=whole, copies=1)
        states = {each.unit: unit_state(each, coded) for each in own if each.layout.trainable}
        held.append(MarkedState(rank.pages, own, states))
    moments = set().union(*(each.moments for each in held))
    with Draft(path) as draft:
        parts = []
        for number, each in enumerate(held):
            each.moments = moments
            parts.append(write_part(draft, each, rank=number))
        parts.append(write_buffers(draft, held_buffers(first, recorded(first).buffers)))
        finish_snapshot(draft, parts, _record(records), seconds=seconds, world_size=len(holders))
    return open_snapshot(draft.path)


def _first_copy(ranks: Sequence[CommittedRank]) -> list[CommittedRank]:
    """Those who hold the first copy of the model, in order of its parts: all ranks, where there is one only."""
    try:
        parts = {tuple(rank.record.get("part", (0, number))): rank for number, rank in enumerate(ranks)}
        return [parts[0, number] for number in range(ranks[0].record["layout"]["world_size"])]
    except (KeyError, TypeError) as error:
        raise FormatError(f"expected ranks that hold all parts of a copy, found {error!r}") from error


def _record(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = ("step", "param_dtype", "optimizers", "pretrained", "extra", "buffers")
    found = {name: records[0][name] for name in names}
    found |= {"random": [record["random"] for record in records], "others as built": True}
    extras = [record["extra"] for record in records]
    if any(extra != extras[0] for extra in extras):
        found["extras"] = extras
    return found


def _layouts(record: Mapping[str, Any]) -> list[UnitLayout]:
    """The layouts that the run had. Raises ConfigError where the record says too little, FormatError for another."""
    if "parameters" not in record or ("part" not in record and record["layout"].get("copies") is not None):
        raise ConfigError(
            "a snapshot cannot be made of this commit without its model, as it is of an earlier version: resume the "
            "run, and call runtime.snapshot(path)"
        )
    try:
        layout = record["layout"]
        numbers = {names[0]: (number, names) for number, names in enumerate(record["parameters"]["names"])}
        return [_layout(unit, name, slots, numbers, layout) for unit, (name, slots) in enumerate(layout["units"])]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"expected the layout of a commit, found {error!r}") from error


def _layout(
    unit: int, name: str, slots: Any, numbers: Mapping[str, tuple[int, Sequence[str]]], layout: Mapping[str, Any]
) -> UnitLayout:
    infos = []
    for first, shape, stride, dtype, trained, _ in slots:
        number, names = numbers[first]
        infos.append(ParameterInfo(number, tuple(names), tuple(shape), tuple(stride), _dtype(dtype), trained))
    floating = [info.dtype for info in infos if info.dtype.is_floating_point]
    found = plan_layout(
        unit,
        name,
        infos,
        dtype=floating[0] if floating else torch.float32,
        tile_numel=layout["tile_numel"],
        ranks=layout["world_size"],
    )
    places = [(slot.names[0], str(slot.dtype), slot.offset) for slot in found.slots]
    if places != [(first, dtype, offset) for first, _, _, dtype, _, offset in slots]:
        raise ValueError(f"the places of unit {name!r} are not those of its parameters")
    return found


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise TypeError(f"expected a dtype, found {name!r}")
    return found
