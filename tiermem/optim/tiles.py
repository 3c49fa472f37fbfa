"""The layout of a unit's optimizer state in tiles.

Owns where the segments of a unit lie, and how many elements and blocks of each kind a STATE tile holds. Does not know
what is in a tile (planes.py does), nor pages, leases or threads: everything here is arithmetic. Guarantees that every
plane starts at a multiple of 64 bytes, that every cut inside a parameter falls on a multiple of 64 elements, which the
update kernel needs (see "Slicing and bits" in kernels.py), and that a block of 8-bit moments belongs to one parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from tiermem.errors import ConfigError, InvariantError
from tiermem.memory.rounding import round_up
from tiermem.optim.blocks import block_count
from tiermem.pager.tiling import ALIGN_NUMEL, SMALLEST_TILE, TileRange, tile_count, tile_ranges

PLANE_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register

PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Segment:
    """Where one parameter lies in its unit's flat buffer, in elements; `parameter` is its global index.

    `quantized`: whether its moments are kept in blocks of 8 bits, or in float32.
    """

    parameter: int
    start: int
    numel: int
    quantized: bool = False

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of one parameter within a tile that has 8-bit moments somewhere; all but `quantized` in elements.

    `begin` counts from the tile's start, `place` among the tile's elements of its kind (each piece rounded up to 64),
    `block` among the tile's blocks (0 where moments are float32).
    """

    begin: int
    length: int
    quantized: bool
    place: int
    block: int


@dataclass(frozen=True, slots=True)
class Mixture:
    """What a tile with 8-bit moments holds: elements with float32 moments, elements in blocks, and blocks."""

    stretches: tuple[Stretch, ...]
    exact: int
    coded: int
    blocks: int


@dataclass(frozen=True)
class UnitState:
    """The trainable part of a unit, as the optimizer sees it.

    `dtype` is that of the PARAM and GRAD pages, `segments` are sorted by start and do not overlap, `numel` counts the
    trainable elements including the gaps between segments, and tile k covers elements
    [k * tile_numel, min((k + 1) * tile_numel, numel)). `param_start` is where the first of these elements lies in the
    PARAM page, which may hold more than this rank updates. Raises `ConfigError` when the layout breaks a rule.
    """

    unit: int
    dtype: torch.dtype
    segments: tuple[Segment, ...]
    numel: int
    tile_numel: int
    param_start: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in PARAMETER_DTYPES:
            raise ConfigError(
                f"unit {self.unit}: parameters of {self.dtype} cannot be updated, only {PARAMETER_DTYPES}"
            )
        if self.tile_numel <= 0 or self.tile_numel % SMALLEST_TILE:
            raise ConfigError(
                f"unit {self.unit}: tile of {self.tile_numel} elements, expected a multiple of {SMALLEST_TILE}"
            )
        end = 0
        for segment in self.segments:
            if segment.start < end or segment.start % ALIGN_NUMEL or segment.stop > self.numel:
                raise ConfigError(
                    f"unit {self.unit}: {segment} overlaps the one before, ends beyond {self.numel} elements, or does "
                    f"not start at a multiple of {ALIGN_NUMEL}"
                )
            end = segment.stop

    @property
    def tiles(self) -> int:
        """Number of tiles, of which the last may be short."""
        return tile_count(self.numel, self.tile_numel)

    def tile_length(self, tile: int) -> int:
        """Elements in a tile."""
        if not 0 <= tile < self.tiles:
            raise InvariantError(f"unit {self.unit} has tiles 0 to {self.tiles - 1}, asked for {tile}")
        return min(self.tile_numel, self.numel - tile * self.tile_numel)

    def state_nbytes(self, tile: int) -> int:
        """Size of STATE page `tile` in bytes."""
        return sum(map(aligned, self.plane_sizes(tile)))

    def plane_sizes(self, tile: int) -> list[int]:
        """Bytes of each plane of STATE page `tile`, in order; each begins at a multiple of 64 (see planes.py)."""
        length, mixture = self.tile_length(tile), self.mixture(tile)
        whole = [length * dtype.itemsize for dtype in master_dtypes(self.dtype)]
        if mixture is None:
            return [*whole, length * 4, length * 4]
        marks = [mixture.coded // 8] if self.dtype == torch.bfloat16 else []
        moments = [mixture.exact * 4] * 2 + [mixture.coded] * 2 + [mixture.blocks * 4] * 2
        return [*whole, *moments, *marks]

    def mixture(self, tile: int) -> Mixture | None:
        """How float32 and 8-bit moments share a tile; None where all are float32."""
        return self._mixtures.get(tile)

    @cached_property
    def _by_parameter(self) -> dict[int, Segment]:
        return {segment.parameter: segment for segment in reversed(self.segments)}

    @cached_property
    def _mixtures(self) -> dict[int, Mixture]:
        found: dict[int, list[tuple[TileRange, bool]]] = {}
        for segment in self.segments:
            for cut in self.cuts(segment):
                found.setdefault(cut.tile, []).append((cut, segment.quantized))
        return {tile: _mix(cuts) for tile, cuts in found.items() if any(quantized for _, quantized in cuts)}

    def cuts(self, segment: Segment) -> Sequence[TileRange]:
        """How a segment falls into tiles; `begin` counts from the segment's start."""
        return tile_ranges(segment.start, segment.numel, self.tile_numel)

    def has(self, parameter: int) -> bool:
        """Whether any of the parameter is updated here; another rank may have all of it."""
        return parameter in self._by_parameter

    def segment_of(self, parameter: int) -> Segment:
        """The segment of a parameter. Raises `ConfigError` if the unit does not train it."""
        segment = self._by_parameter.get(parameter)
        if segment is not None:
            return segment
        raise ConfigError(f"parameter {parameter} is not among the trainable parameters of unit {self.unit}")


def master_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """What a tile holds of the masters of parameters of `dtype`, beside the parameters."""
    if dtype == torch.bfloat16:
        return (torch.int16,)
    return (torch.float32,) if dtype == torch.float16 else ()


def state_itemsize(dtype: torch.dtype, *, quantized: bool) -> int:
    """Bytes of state of one element in a long run, rounded up: enough for any run that is 64 elements longer."""
    masters = sum(kept.itemsize for kept in master_dtypes(dtype))
    return masters + (3 if quantized else 8)  # two codes, an eighth for a mark, two 64ths for scales


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to where the next plane begins."""
    return round_up(nbytes, PLANE_ALIGNMENT)


def _mix(cuts: list[tuple[TileRange, bool]]) -> Mixture:
    stretches = []
    taken, blocks = {False: 0, True: 0}, 0
    for cut, quantized in cuts:
        place = taken[quantized]
        stretches.append(Stretch(cut.begin_in_tile, cut.length, quantized, place, blocks if quantized else 0))
        taken[quantized] = place + round_up(cut.length, ALIGN_NUMEL)
        blocks += block_count(cut.length) if quantized else 0
    return Mixture(tuple(stretches), taken[False], taken[True], blocks)
