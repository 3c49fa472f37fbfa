"""What a run that goes on from an earlier one takes over.

Owns the taking over of committed pages, and of what lies beside pages: step counts, changed buffers, random states.
Does not decide whether to go on (`beginning.py`) and reads no files. Guarantees that a commit which lacks a page, or
holds one of another size, is refused before anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from swap import align_up
from tiermem.checkpoint.generation import generation_in, take_generation
from tiermem.checkpoint.restoring import SnapshotWeights
from tiermem.checkpoint.shard import holdings_of
from tiermem.errors import ResumeError
from tiermem.optim.masters import StateStore
from tiermem.pager.page import PageKey
from tiermem.runtime import randomness
from tiermem.runtime.blueprint import Blueprint
from tiermem.runtime.buffers import BufferWatch
from tiermem.runtime.devices import move_buffers
from tiermem.runtime.record import step_counts
from tiermem.runtime.storage import Storage
from tiermem.zero3.layout import UnitLayout
from tiermem.zero3.materialize import Materializer, StoreMaster, WeightSource
from tiermem.zero3.shards import Shard


def add_committed(storage: Storage, pages: Iterable[tuple[PageKey, int]], layouts: Sequence[UnitLayout]) -> None:
    """Make all pages known, those of the commit as written. Raises ResumeError if a page is missing or too many."""
    sizes = dict(pages)
    copies = storage.recovered.mark.copies if storage.recovered is not None else {}
    for key, copy in copies.items():
        expected = align_up(sizes[key]) if isinstance(key, PageKey) and key in sizes else None
        if copy.extent.nbytes != expected:
            raise ResumeError(f"the commit holds {copy.extent.nbytes} bytes of {key}, expected {expected}")
    for layout in layouts:
        if layout.key not in copies:
            raise ResumeError(f"the commit holds no copy of {layout.key}")
    for key, nbytes in sizes.items():
        storage.pager.add_page(key, nbytes, saved=key in copies)


def master_store(states: StateStore, weights: WeightSource | None, shards: Sequence[Shard]) -> StoreMaster:
    """Where masters are kept while the model becomes pages: those of a snapshot with their moments, in one write."""
    of_snapshot = weights if isinstance(weights, SnapshotWeights) else None
    holdings = {each.slot.parameter: each for each in holdings_of(shards)} if of_snapshot is not None else {}

    def store(unit: int, parameter: int, values: torch.Tensor) -> None:
        moments = None if of_snapshot is None else of_snapshot.moments(holdings[parameter])
        states.store_master(unit, parameter, values, moments)

    return store


def fill_pages(blueprint: Blueprint, storage: Storage, materializer: Materializer) -> list[nn.Parameter]:
    """Turn the model into pages: those of a commit as they are, or new ones; returns its parameters by number.

    Buffers go to where the computation will be.
    """
    divided = blueprint.divided
    if storage.recovered is not None:
        add_committed(storage, blueprint.pages, blueprint.layouts)
        parameters = materializer.adopt(divided, blueprint.shards)
    else:
        for key, nbytes in blueprint.state_pages:
            storage.pager.add_page(key, nbytes)
        parameters = materializer.run(divided, blueprint.shards)
    move_buffers(divided.model, storage.torch_device)
    return parameters


def take_over(record: Mapping[str, Any], buffers: BufferWatch, model: nn.Module) -> dict[int, int]:
    """Go on with the buffers, random generators and generation settings of `record`; returns the update counts.

    Raises ResumeError if they do not fit, FormatError for generation settings that are none.
    """
    take_generation(model, generation_in(model, record))
    try:
        counts = step_counts(record)
    except (KeyError, TypeError, ValueError) as error:
        raise ResumeError(f"the optimizers' step counts cannot be restored: {error!r}") from error
    buffers.restore(record["buffers"])
    if record["random"] is not None:
        randomness.restore(record["random"])
    return counts
