"""The layout of a unit's optimizer state in tiles.

Owns where each plane (remainder or master, first moment, second moment) lies inside a STATE tile, and where the
segments of a unit lie. Does not know pages, leases or threads: everything here is arithmetic
and views. Guarantees that every plane starts at a multiple of 64 bytes, and that every cut inside a parameter falls on
a multiple of 64 elements, which the update kernel needs (see "Slicing and bits" in kernels.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tiermem.errors import ConfigError, InvariantError
from tiermem.pager.tiling import TileRange, tile_count, tile_ranges

PLANE_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
SEGMENT_ALIGNMENT = 64  # elements
TILE_MULTIPLE = 2048  # elements

PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Segment:
    """Where one parameter lies in its unit's flat buffer, in elements; `parameter` is its global index."""

    parameter: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.numel


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
        if self.tile_numel <= 0 or self.tile_numel % TILE_MULTIPLE:
            raise ConfigError(
                f"unit {self.unit}: tile of {self.tile_numel} elements, expected a multiple of {TILE_MULTIPLE}"
            )
        end = 0
        for segment in self.segments:
            if segment.start < end or segment.start % SEGMENT_ALIGNMENT or segment.stop > self.numel:
                raise ConfigError(
                    f"unit {self.unit}: {segment} overlaps the one before, ends beyond {self.numel} elements, or does "
                    f"not start at a multiple of {SEGMENT_ALIGNMENT}"
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
        return state_nbytes(self.dtype, self.tile_length(tile))

    def grad_nbytes(self, tile: int) -> int:
        """Size of GRAD page `tile` in bytes."""
        return self.tile_length(tile) * self.dtype.itemsize

    def cuts(self, segment: Segment) -> list[TileRange]:
        """How a segment falls into tiles; `begin` counts from the segment's start."""
        return tile_ranges(segment.start, segment.numel, self.tile_numel)

    def has(self, parameter: int) -> bool:
        """Whether any of the parameter is updated here; another rank may have all of it."""
        return any(segment.parameter == parameter for segment in self.segments)

    def segment_of(self, parameter: int) -> Segment:
        """The segment of a parameter. Raises `ConfigError` if the unit does not train it."""
        for segment in self.segments:
            if segment.parameter == parameter:
                return segment
        raise ConfigError(f"parameter {parameter} is not among the trainable parameters of unit {self.unit}")


@dataclass(frozen=True, slots=True)
class StatePlanes:
    """Typed views of a STATE tile, each 1-D of the tile's length.

    `remainder` (int16) exists for bfloat16 parameters, `master` (float32) for float16 ones. The sign bit of
    `exp_avg_sq` belongs to the split of bfloat16 masters (see "Ties" in split.py).
    """

    remainder: torch.Tensor | None
    master: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


def _plane_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    moments = (torch.float32, torch.float32)
    if dtype == torch.bfloat16:
        return (torch.int16, *moments)
    if dtype == torch.float16:
        return (torch.float32, *moments)
    return moments


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PLANE_ALIGNMENT) * PLANE_ALIGNMENT


def state_nbytes(dtype: torch.dtype, numel: int) -> int:
    """Bytes of a STATE tile of `numel` elements whose parameters are of `dtype`."""
    return sum(_aligned(numel * plane.itemsize) for plane in _plane_dtypes(dtype))


def state_planes(buffer: torch.Tensor, dtype: torch.dtype, numel: int) -> StatePlanes:
    """View a STATE tile. `buffer`: 1-D uint8, at least `state_nbytes(dtype, numel)` long."""
    if buffer.numel() < state_nbytes(dtype, numel):
        raise InvariantError(
            f"a STATE tile of {numel} elements takes {state_nbytes(dtype, numel)} bytes, its page has {buffer.numel()}"
        )
    views: list[torch.Tensor] = []
    offset = 0
    for plane in _plane_dtypes(dtype):
        nbytes = numel * plane.itemsize
        views.append(buffer[offset : offset + nbytes].view(plane))
        offset += _aligned(nbytes)
    first = views[0] if len(views) == 3 else None
    return StatePlanes(
        remainder=first if dtype == torch.bfloat16 else None,
        master=first if dtype == torch.float16 else None,
        exp_avg=views[-2],
        exp_avg_sq=views[-1],
    )
