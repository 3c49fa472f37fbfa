"""Which moments are kept in 8 bits, and what that makes of a unit's optimizer state.

Owns the choice, and the way from a unit's layout to the state the optimizer sees. Does not know how moments are coded.
Guarantees that the choice depends on the model and the configuration alone, so that a resumed run makes the same.

As in bitsandbytes, two kinds of parameters keep float32 moments when `moments="int8"`: those of embeddings, whose rows
see a gradient now and then and of very different sizes within a block, and small ones (norms, biases), which
are many and save nothing.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from torch import nn

from tiermem.memory.rounding import round_up
from tiermem.optim.tiles import Segment, UnitState, state_itemsize
from tiermem.pager.tiling import ALIGN_NUMEL
from tiermem.zero3.layout import UnitLayout
from tiermem.zero3.shards import Shard
from tiermem.zero3.units import Member, ModelUnits

# bitsandbytes' `min_8bit_size`.
SMALLEST_QUANTIZED = 4096


@dataclass(frozen=True, slots=True)
class StateSize:
    """Optimizer state in bytes per element, rounded up; `wide_numel` elements of a rank's have `wide_itemsize` more."""

    itemsize: int
    wide_numel: int
    wide_itemsize: int


def quantized_parameters(divided: ModelUnits, moments: str) -> frozenset[int]:
    """The numbers of the parameters whose moments are kept in 8 bits; `moments` as in `Config`."""
    if moments != "int8":
        return frozenset()
    return frozenset(
        member.number
        for _, member in divided.members()
        if member.parameter.numel() >= SMALLEST_QUANTIZED and not _embeds(member)
    )


def unit_state(shard: Shard, quantized: Container[int]) -> UnitState:
    """What this rank updates of a unit, as the optimizer sees it."""
    segments = tuple(
        Segment(
            piece.slot.parameter,
            piece.slot.start + piece.begin - shard.begin,
            piece.length,
            piece.slot.parameter in quantized,
        )
        for piece in shard.owned()
        if piece.slot.trainable
    )
    layout = shard.layout
    return UnitState(
        layout.unit, layout.dtype, segments, shard.trainable_numel, layout.tile_numel, param_start=shard.page_begin
    )


def state_size(layout: UnitLayout, quantized: Container[int]) -> StateSize:
    """What the budget has to know of a unit's optimizer state; at least one byte, that of a unit without any."""
    coded = [slot.parameter in quantized for slot in layout.trainable]
    if not coded:
        return StateSize(1, 0, 0)
    exact = state_itemsize(layout.dtype, quantized=False)
    if not any(coded):
        return StateSize(exact, 0, 0)
    narrow = state_itemsize(layout.dtype, quantized=True)
    pairs = zip(layout.trainable, coded, strict=True)
    # Each piece takes whole segments in its plane: of many short parameters that is most of it.
    wide = sum(round_up(slot.numel, ALIGN_NUMEL) for slot, is_coded in pairs if not is_coded)
    return StateSize(narrow, min(wide, layout.part_numel), exact - narrow)


def _embeds(member: Member) -> bool:
    """Whether the parameter is an embedding's, if only by one of its names (a tied output layer)."""
    return any(isinstance(place.module, (nn.Embedding, nn.EmbeddingBag)) for place in member.places)
