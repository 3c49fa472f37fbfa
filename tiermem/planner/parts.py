"""What one of several ranks keeps of each unit of a step, and how large that is.

Owns the way from a unit as numbers to the `Shard` that a run would make of it, and to what the budgets have to know of
it. Does not know budgets, times or modules. Guarantees that parts, transient pages and their sizes come from the very
functions that divide a real model, and that no rank has more than the one described.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiermem.config import parse_dtype
from tiermem.errors import ConfigError
from tiermem.planner.footprint import UnitSize
from tiermem.planner.workload import Workload
from tiermem.zero3.layout import ALIGN_NBYTES, UnitLayout, divided_nbytes
from tiermem.zero3.shards import Shard

_PLANE_ALIGNMENT = 64
_BLOCK_ELEMENTS = 256


@dataclass(frozen=True, slots=True)
class Division:
    """How ranks divide a model: `copies` of it, each of them in `parts`. Both 1: one process has all of it.

    Raises ConfigError for copies of which each is of one rank, as `zero3.ranks.rows_of` does.
    """

    parts: int = 1
    copies: int = 1

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


ALONE = Division()


def division_of(ranks: int, copies: int) -> Division:
    """How so many ranks keep so many copies. Raises ConfigError where they cannot."""
    if ranks % copies:
        raise ConfigError(f"expected ranks that keep {copies} copies of the model each in as many parts, found {ranks}")
    return Division(ranks // copies, copies)


def shard_of(workload: Workload, unit: int, division: Division, tile_numel: int) -> Shard:
    """What the first rank of a copy keeps of a unit; of all ranks it has most."""
    work, dtype = workload.units[unit], parse_dtype("dtype", workload.dtype)
    nbytes = work.numel * dtype.itemsize
    if division.parts > 1:
        trainable = -(-work.trainable * dtype.itemsize // ALIGN_NBYTES) * ALIGN_NBYTES
        frozen = max(0, nbytes - trainable) if work.numel > work.trainable else 0
        nbytes = divided_nbytes(work.trainable, frozen, dtype.itemsize, division.parts)
    ranks, least = division.parts, max(nbytes, division.parts)
    layout = UnitLayout(unit, work.name, dtype, (), work.trainable, least, tile_numel, ranks, work.kept)
    return Shard(layout, copies=division.copies)


def state_nbytes(workload: Workload, numel: int) -> int:
    """Bytes of a STATE tile of `numel` elements: each plane begins at a multiple of 64 bytes."""
    planes = {"bfloat16": [2 * numel], "float16": [4 * numel], "float32": []}[workload.dtype]
    if workload.moments == "int8":  # as if all were in blocks: what is kept in float32 (embeddings) is not known here
        scales = -(-numel // _BLOCK_ELEMENTS) * 4
        planes += [numel, numel, scales, scales] + ([numel // 8] if workload.dtype == "bfloat16" else [])
    else:
        planes += [4 * numel, 4 * numel]
    return sum(-(-nbytes // _PLANE_ALIGNMENT) * _PLANE_ALIGNMENT for nbytes in planes)


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

    But every one that is kept in memory by choice: of those the sum counts. `each`: and all others as well.
    """
    alike = {
        (unit.numel, unit.trainable, unit.nested_nbytes, unit.nested_count, number if unit.kept or each else -1): number
        for number, unit in reversed(list(enumerate(workload.units)))
    }
    return [
        size_of(
            shard_of(workload, number, division, 1),
            state_itemsize=workload.state_itemsize,
            nested_nbytes=workload.units[number].nested_nbytes,
            nested_count=workload.units[number].nested_count,
        )
        for number in reversed(alike.values())
    ]
