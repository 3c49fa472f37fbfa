"""Who shares a copy of the model with whom, where ranks keep several copies.

Owns the arrangement of the ranks of one run: copies, each cut into parts, and the lines along both. Does not know what
is exchanged. Guarantees that ranks which hold the same part of different copies are found in the same place of each,
and that one copy is the case without any such line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tiermem.zero3.collectives import Collectives, SingleProcess

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of a run.

    Attributes:
        everyone: all of them, who keep one order.
        shards: those who share one copy with this rank, in order of parts; units are gathered among them.
        copies: those who hold the same part as this rank of each copy, in order of copies.
        rows: for each copy its ranks, as `everyone` numbers them, in order of parts.
    """

    everyone: Collectives
    shards: Collectives
    copies: Collectives
    rows: tuple[tuple[int, ...], ...]

    def of_copies(self, each: Sequence[T]) -> list[list[T]]:
        """What every rank has told, by copy, in order of parts."""
        return [[each[rank] for rank in row] for row in self.rows]

    def of_own_copy(self, each: Sequence[T]) -> list[T]:
        """What the ranks of this rank's copy have told, in order of parts."""
        return [each[rank] for rank in self.rows[self.copies.rank]]


def one_copy(everyone: Collectives) -> Grid:
    """All ranks share the only copy there is."""
    return Grid(everyone, everyone, SingleProcess(), (tuple(range(everyone.size)),))
