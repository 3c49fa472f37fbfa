"""A step of many batches seen through one of fewer: what one batch in its midst takes, over and over.

Owns how many batches the shorter step has, which of them stand for those that it lacks, and the sum. Does not simulate.
Guarantees that what the ends of a step cost is counted once, and that a batch which moves nothing moves nothing however
often it comes.

Why in the midst: after the first batches each does what those before it did, or several of them do so in turns (one,
three, four and nine were seen); towards the end pages of the update are brought, as far ahead as the pager looks. Two
steps of different lengths differ by more than the batches between them: how the last pages happen to fit goes up and
down with their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tiermem.pager.ahead import COMING
from tiermem.planner.design import Design
from tiermem.planner.simulate import Simulation, Spent, combined, mean_since
from tiermem.zero3.order import Phase

# Batches after which memory holds what it goes on to hold; no more than so many are left in all.
_MOST = 64


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Which batches of a shorter step are looked at: after the `first` ones, `looked_at` of them."""

    first: int
    looked_at: int

    def batches(self, design: Design) -> int:
        """How many batches the shorter step has: as many more as the pager may look ahead from the end."""
        workload = design.workload
        gradients = (access.unit for access in workload.order if access.phase is Phase.GRADIENT)
        accesses = len(workload.order) + sum(design.tiles(unit) for unit in gradients)
        return min(_MOST, self.first + self.looked_at + COMING // max(1, accesses) + 2)

    def continued(self, found: Simulation, batches: int) -> Simulation:
        """What the simulation of the same step with so many batches would say; `found` is that of a shorter one."""
        batch = _repeated(found.marks[self.first - 1 : self.first + self.looked_at])
        more = batches - len(found.marks)
        return replace(found, **combined(found, batch, lambda step, each: step + more * each), marks=())


# For bytes and seconds; and for seconds that are only compared.
FINE, COARSE = Excerpt(first=8, looked_at=12), Excerpt(first=4, looked_at=6)


def with_batches(design: Design, batches: int) -> Design:
    """The same step with another number of batches. Only how often they come differs: budgets and shares stay."""
    return replace(design, workload=replace(design.workload, batches=batches))


def _repeated(marks: Sequence[Spent]) -> Spent:
    """The mean of as many batches as take turns; of all, where they do not."""
    each = [mean_since(late, before, 1)["edges"] for before, late in pairwise(marks)]
    count = len(each)
    # Of all of them first, and then of those before the last ones, which may belong to the end already.
    tried = [(count, turn) for turn in range(1, count - 2)]
    tried += [(length, turn) for length in range(count - 1, count // 2 - 1, -1) for turn in range(1, length // 2 + 1)]
    turns = (turn for length, turn in tried if each[turn:length] == each[: length - turn])
    turn = next(turns, count)
    return Spent(**mean_since(marks[turn], marks[0], turn))
