"""Where each parameter of a unit lies in the unit's flat buffer.

Owns the arithmetic of slots, offsets and tiles, and the one function that lays a view over bytes. Does not know
modules, pages or values. Guarantees that slots do not overlap, trainable ones come first in elements of one dtype,
and that the same parameters give the same layout on every rank.

Two sections. Trainable elements come first, frozen bytes after them, and each section is divided over the ranks by
itself, so that what is updated is spread evenly, whatever is frozen. Parts are equal (padded), and cut at multiples of
64 elements (64 bytes) from the section's start, because fused AdamW has the same bits only there. One rank: no padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from tiermem.errors import ConfigError
from tiermem.memory.rounding import round_up
from tiermem.pager.page import Kind, PageKey
from tiermem.pager.tiling import ALIGN_NUMEL, SMALLEST_TILE, TileRange, tile_count, tile_ranges

ALIGN_NBYTES = 64


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """What a layout has to know of a parameter: its global number, all its names, its form."""

    number: int
    names: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place. `offset` in bytes; `start` and `numel` in elements of `dtype`.

    The elements lie in memory order: a dense parameter (channels last, for one) keeps its strides, so slot element
    i is the i-th element in memory of a tensor of this shape and stride.
    """

    parameter: int
    names: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def start(self) -> int:
        """First element, counted in elements of this slot's dtype from the start of the flat buffer."""
        return self.offset // self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class UnitLayout:
    """The flat buffer of one unit: trainable slots first, then frozen ones; `nbytes` includes the padding of parts.

    `kept`: whether the page that holds it stays in host memory by choice.
    """

    unit: int
    name: str
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    trainable_numel: int
    nbytes: int
    tile_numel: int
    ranks: int = 1
    kept: bool = False

    @cached_property
    def part_numel(self) -> int:
        """Trainable elements of one rank's part, padding included."""
        return part(self.trainable_numel, self.ranks, ALIGN_NUMEL)

    @cached_property
    def frozen_begin(self) -> int:
        """First byte of the frozen section."""
        return round_up(self.part_numel * self.ranks * self.dtype.itemsize, ALIGN_NBYTES)

    @cached_property
    def frozen_part(self) -> int:
        """Bytes of one rank's part of the frozen section, padding included."""
        return max(0, self.nbytes - self.frozen_begin) // self.ranks

    @cached_property
    def trainable(self) -> tuple[Slot, ...]:
        """The slots that are trained, by start."""
        return tuple(slot for slot in self.slots if slot.trainable)

    @cached_property
    def tiles(self) -> int:
        """How many tiles the trainable elements make."""
        return tile_count(self.trainable_numel, self.tile_numel)

    @cached_property
    def key(self) -> PageKey:
        """The page that holds the flat buffer."""
        return PageKey(self.unit, Kind.PARAM)

    def gradient_key(self, tile: int) -> PageKey:
        """The page that holds tile `tile` of the gradient."""
        return PageKey(self.unit, Kind.GRAD, tile)

    def ranges(self, slot: Slot) -> Sequence[TileRange]:
        """The pieces of a trainable slot by tile."""
        return tile_ranges(slot.start, slot.numel, self.tile_numel)


def plan_layout(
    unit: int, name: str, parameters: Sequence[ParameterInfo], *, dtype: torch.dtype, tile_numel: int, ranks: int = 1
) -> UnitLayout:
    """Lay out a unit's parameters, to be divided over `ranks`.

    Floating-point parameters become `dtype`; all others keep theirs and are frozen. Trainable ones start at multiples
    of 64 elements, frozen ones at multiples of 64 bytes. Raises ConfigError for a tile that is not a positive multiple
    of 2048 elements, and for a trainable complex parameter.
    """
    if tile_numel <= 0 or tile_numel % SMALLEST_TILE:
        raise ConfigError(f"a tile holds a positive multiple of {SMALLEST_TILE} elements, found {tile_numel}")
    trainable = [info for info in parameters if info.trainable]
    frozen = [info for info in parameters if not info.trainable]
    slots: list[Slot] = []
    numel = 0
    for info in trainable:
        if not info.dtype.is_floating_point:
            raise ConfigError(
                f"parameter {info.names[0]} is {info.dtype} and requires a gradient; only floating-point parameters "
                "are trained: freeze it with requires_grad_(False) or store its parts as real parameters"
            )
        start = round_up(numel, ALIGN_NUMEL)
        slots.append(_slot(info, dtype, start * dtype.itemsize))
        numel = start + slots[-1].numel
    nbytes = divided_nbytes(numel, 0, dtype.itemsize, ranks)
    frozen_begin = round_up(nbytes, ALIGN_NBYTES)
    for info in frozen:
        # One without elements takes no place; behind the last other one it would lie outside the buffer.
        offset = round_up(nbytes, ALIGN_NBYTES) if math.prod(info.shape) else 0
        slots.append(_slot(info, dtype if info.dtype.is_floating_point else info.dtype, offset))
        nbytes = max(nbytes, offset + slots[-1].nbytes)
    if frozen:
        nbytes = divided_nbytes(numel, nbytes - frozen_begin, dtype.itemsize, ranks)
    return UnitLayout(unit, name, dtype, tuple(slots), numel, max(nbytes, ranks), tile_numel, ranks)


def divided_nbytes(trainable_numel: int, frozen_nbytes: int, itemsize: int, ranks: int) -> int:
    """Bytes of both sections of a unit, each with the padding of its parts; frozen ones begin at multiples of 64."""
    trainable = part(trainable_numel, ranks, ALIGN_NUMEL) * ranks * itemsize
    if not frozen_nbytes:
        return trainable
    return round_up(trainable, ALIGN_NBYTES) + part(frozen_nbytes, ranks, ALIGN_NBYTES) * ranks


def part(length: int, ranks: int, multiple: int) -> int:
    """Return the length of each of `ranks` equal parts of `length`, the last ones padded; cuts lie at multiples."""
    return min(length, round_up(-(-length // ranks), multiple))


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return `stride` if it covers `numel` elements without holes or overlaps, else the contiguous one."""
    # With a stride of 0 it is no tensor with memory of its own: a placeholder of one element.
    kept = math.prod(shape) and 0 not in stride and is_dense(shape, stride)
    return tuple(stride) if kept else contiguous_stride(shape)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the strides reach every one of `numel` elements exactly once."""
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a row-major tensor."""
    steps: list[int] = []
    step = 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def view_bytes(
    base: torch.Tensor, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Lay a tensor over the storage of `base`; `offset` in elements of `dtype` from the storage's first byte."""
    empty = torch.empty(0, dtype=dtype, device=base.device)
    return empty.set_(base.untyped_storage(), offset, tuple(shape), tuple(stride))


def slot_view(base: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return the parameter in `slot` as a view of the unit's bytes `base` (1-D uint8, starting its storage)."""
    return view_bytes(base, slot.dtype, slot.start, slot.shape, slot.stride)


def typed_views(base: torch.Tensor, slots: Sequence[Slot]) -> dict[torch.dtype, torch.Tensor]:
    """The unit's bytes `base`, 1-D, as elements of each dtype that slots have."""
    return {
        dtype: view_bytes(base, dtype, 0, (base.numel() // dtype.itemsize,), (1,))
        for dtype in {slot.dtype for slot in slots}
    }


def slot_of(views: Mapping[torch.dtype, torch.Tensor], slot: Slot) -> torch.Tensor:
    """As `slot_view` of what `typed_views` was given, by one operation instead of two."""
    return views[slot.dtype].as_strided(slot.shape, slot.stride, slot.start)


def memory_order(tensor: torch.Tensor, slot: Slot, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return `tensor` (of the slot's shape) as 1-D in the slot's memory order; copies only if it must.

    `dtype` defaults to the slot's.
    """
    dtype = dtype or slot.dtype
    if tuple(tensor.stride()) != slot.stride or tensor.dtype != dtype:
        arranged = torch.empty_strided(slot.shape, slot.stride, dtype=dtype, device=tensor.device)
        tensor = arranged.copy_(tensor)
    return tensor if len(slot.shape) == 1 else tensor.as_strided((slot.numel,), (1,))


def _slot(info: ParameterInfo, dtype: torch.dtype, offset: int) -> Slot:
    stride = dense_stride(info.shape, info.stride)
    return Slot(info.number, info.names, info.shape, stride, dtype, info.trainable, offset)
