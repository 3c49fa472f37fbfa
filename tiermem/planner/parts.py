"""What one of several ranks keeps of each unit of a step, and how large that is.

Owns the way from a unit as numbers to the `Shard` that a run would make of it, to its pages and what they take on disk,
and to what the budgets have to know of it. Does not know budgets, times or modules. Guarantees that parts, transient
pages and their sizes come from the very functions that divide a real model, and that no rank has more parameters than
the one described.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from tiermem.config import parse_dtype
from tiermem.errors import ConfigError
from tiermem.memory.arena import rounded
from tiermem.memory.rounding import round_up
from tiermem.optim.blocks import block_count
from tiermem.optim.tiles import aligned, master_dtypes
from tiermem.pager.page import Kind, PageKey
from tiermem.pager.tiling import ALIGN_NUMEL
from tiermem.planner.footprint import UnitSize
from tiermem.planner.reserved import copied_nbytes, wanted_copies
from tiermem.planner.workload import UnitWork, Workload, state_itemsize
from tiermem.zero3.layout import ALIGN_NBYTES, UnitLayout, divided_nbytes
from tiermem.zero3.shards import Shard


@dataclass(frozen=True, slots=True)
class Division:
    """How ranks divide a model: `copies` of it, each of them in `parts`. Both 1: one process has all of it.

    `stage`: ZeRO's, which says what of it each rank has whole all the same.

    Raises ConfigError for copies of which each is of one rank, as `zero3.ranks.rows_of` does.
    """

    parts: int = 1
    copies: int = 1
    stage: int = 3

    def __post_init__(self) -> None:
        if self.parts < 1 or self.copies < 1 or (self.copies > 1 and self.parts == 1):
            raise ConfigError(
                f"expected copies of the model that at least two ranks share each, found {self.copies} copies of "
                f"{self.parts} parts"
            )

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.parts * self.copies

    @property
    def whole(self) -> bool:
        """Whether each rank has all parameters, and completes a unit from the others after its update."""
        return self.stage < 3 and self.ranks > 1

    @property
    def late(self) -> bool:
        """Whether gradients wait whole for the step, and are added up then."""
        return self.stage == 1 and self.ranks > 1


ALONE = Division()


def division_of(ranks: int, copies: int, stage: int = 3) -> Division:
    """How so many ranks keep so many copies. Raises ConfigError where they cannot."""
    if ranks % copies:
        raise ConfigError(f"expected ranks that keep {copies} copies of the model each in as many parts, found {ranks}")
    return Division(ranks // copies, copies, stage)


def shard_of(workload: Workload, unit: int, division: Division, tile_numel: int) -> Shard:
    """What the first rank of a copy keeps of a unit; of all ranks it has most."""
    work, dtype = workload.units[unit], parse_dtype("dtype", workload.dtype)
    nbytes = work.numel * dtype.itemsize
    if division.parts > 1:
        trainable = round_up(work.trainable * dtype.itemsize, ALIGN_NBYTES)
        frozen = max(0, nbytes - trainable) if work.numel > work.trainable else 0
        nbytes = divided_nbytes(work.trainable, frozen, dtype.itemsize, division.parts)
    ranks, least = division.parts, max(nbytes, division.parts)
    layout = UnitLayout(unit, work.name, dtype, (), work.trainable, least, tile_numel, ranks, work.kept)
    return Shard(layout, whole=division.whole, copies=division.copies)


def state_nbytes(workload: Workload, unit: UnitWork, begin: int, numel: int) -> int:
    """Bytes of a STATE tile, elements [begin, begin + numel) of a unit; as `optim.tiles.UnitState` has them."""
    planes = [kept.itemsize * numel for kept in master_dtypes(parse_dtype("dtype", workload.dtype))]
    coded, blocks = _coded(unit, begin, numel) if workload.moments == "int8" else (0, 0)
    if coded:
        marks = [coded // 8] if workload.dtype == "bfloat16" else []
        planes += [(numel - coded) * 4] * 2 + [coded] * 2 + [blocks * 4] * 2 + marks
    else:
        planes += [4 * numel, 4 * numel]
    return sum(map(aligned, planes))


def _coded(unit: UnitWork, begin: int, numel: int) -> tuple[int, int]:
    """How many elements of a tile have 8-bit moments, each run rounded up to 64, and in how many blocks."""
    exact = _within(unit.exact, begin, numel)
    runs = [run for run in unit.runs if run not in unit.exact] if unit.runs else []
    lengths = _within(runs, begin, numel) if unit.runs else [max(0, numel - sum(exact))]
    coded = sum(round_up(length, ALIGN_NUMEL) for length in lengths)
    return min(coded, numel), sum(map(block_count, lengths))


def _within(runs: Sequence[tuple[int, int]], begin: int, numel: int) -> list[int]:
    """The lengths of what lies of these runs in [begin, begin + numel)."""
    lengths = (min(start + length, begin + numel) - max(start, begin) for start, length in runs)
    return [length for length in lengths if length > 0]


def unit_pages(workload: Workload, unit: int, shard: Shard) -> list[tuple[PageKey, int]]:
    """The pages of one unit, each with its size in bytes."""
    work, states, sizes = workload.units[unit], [], (0, 0)
    mixed = workload.moments == "int8" and bool(work.runs or work.exact)
    for tile in range(shard.tiles):
        numel = shard.tile_length(tile)
        if mixed or sizes[0] != numel:  # all but the last have the same
            sizes = numel, state_nbytes(workload, work, tile * shard.layout.tile_numel, numel)
        states.append((PageKey(unit, Kind.STATE, tile), sizes[1]))
    return [*shard.pages(), *states, *shard.transit_pages()]


def pages_nbytes(workload: Workload, division: Division, tile_numel: int, kinds: Container[Kind]) -> int:
    """Bytes that all pages of these kinds take, in tiles of so many elements."""
    of_shape: dict[Any, int] = {}  # units of one shape have pages of the same sizes
    total = 0
    for number, unit in enumerate(workload.units):
        shape = unit.numel, unit.trainable, unit.exact, unit.exact and unit.runs
        if shape not in of_shape:
            pages = unit_pages(workload, number, shard_of(workload, number, division, tile_numel))
            of_shape[shape] = sum(rounded(nbytes) for key, nbytes in pages if key.kind in kinds)
        total += of_shape[shape]
    return total


def reserved_nbytes(workload: Workload, division: Division, tile_numel: int, update: str, *, commits: bool) -> int:
    """Bytes that one rank's pages take on disk, with as many copies of parameters and states as a run reserves."""
    durable = pages_nbytes(workload, division, tile_numel, (Kind.PARAM, Kind.STATE))
    gradients = pages_nbytes(workload, division, tile_numel, (Kind.GRAD,))
    fixed = [number for number, unit in enumerate(workload.units) if not unit.trainable]
    frozen = [rounded(shard_of(workload, number, division, tile_numel).nbytes) for number in fixed]
    total = durable + gradients + _besides_nbytes(workload, division, tile_numel)
    copies = wanted_copies(update, commits=commits)
    return copied_nbytes(copies, total=total, changing=durable - sum(frozen), frozen=frozen)


def _besides_nbytes(workload: Workload, division: Division, tile_numel: int) -> int:
    """As `runtime.blueprint.Blueprint`: of units that are completed from other ranks, and of gradients that wait."""
    units = range(len(workload.units)) if division.whole else ()
    shards = [shard_of(workload, unit, division, tile_numel) for unit in units]
    completed = sum(rounded(shard.nbytes) for shard in shards if shard.layout.trainable_numel)
    return completed + sum(rounded(shard.bucket_nbytes) for shard in shards if division.late)


def size_of(
    shard: Shard,
    *,
    state_itemsize: int,
    nested_nbytes: int,
    nested_count: int,
    nested_kept: int = 0,
    wide_numel: int = 0,
    wide_itemsize: int = 0,
) -> UnitSize:
    """A unit as the budget sees it; the other arguments as `UnitSize` has them."""
    layout = shard.layout
    return UnitSize(
        name=layout.name,
        param_nbytes=shard.nbytes,
        trainable_numel=layout.part_numel,
        grad_itemsize=layout.dtype.itemsize,
        state_itemsize=state_itemsize,
        nested_nbytes=nested_nbytes,
        nested_count=nested_count,
        ranks=layout.ranks,
        copies=shard.copies,
        gathered_nbytes=shard.gathered_nbytes,
        wide_numel=wide_numel,
        wide_itemsize=wide_itemsize,
        kept=layout.kept,
        nested_kept=nested_kept,
    )


def unit_sizes(workload: Workload, division: Division = ALONE, *, each: bool = False) -> list[UnitSize]:
    """The units as the budget sees them; of several with the same sizes the first, since only the largest count.

    But every one that is kept in memory by choice: of those the sum counts; and where states are of different sizes,
    since the mean counts. `each`: and all others as well.
    """
    each = each or any(unit.exact for unit in workload.units)
    alike = {
        (unit.numel, unit.trainable, unit.nested_nbytes, unit.nested_count, number if unit.kept or each else -1): number
        for number, unit in reversed(list(enumerate(workload.units)))
    }
    return [_size(workload, number, division) for number in reversed(alike.values())]


def _size(workload: Workload, number: int, division: Division) -> UnitSize:
    """A unit as the budget sees it; of its state as `runtime.moments.state_size` says."""
    unit, shard = workload.units[number], shard_of(workload, number, division, 1)
    itemsize, whole = workload.state_itemsize, state_itemsize(workload.dtype, "float32")
    wide = sum(round_up(length, ALIGN_NUMEL) for _, length in unit.exact)
    if wide >= unit.trainable > 0:
        itemsize, wide = whole, 0
    return size_of(
        shard,
        state_itemsize=itemsize,
        nested_nbytes=unit.nested_nbytes,
        nested_count=unit.nested_count,
        wide_numel=min(wide, shard.layout.part_numel),
        wide_itemsize=whole - itemsize if unit.trainable else 0,
    )
