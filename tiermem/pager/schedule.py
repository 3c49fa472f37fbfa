"""The recorded order of a step's page accesses.

Owns the immutable `Schedule` of one training step. Does not know where anybody stands in it (`forecast.py`), sizes or
tiers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tiermem.pager.page import Lane, PageKey


class Access(NamedTuple):
    """One page access of a step: who makes it and which page it touches."""

    lane: Lane
    key: PageKey


@dataclass(frozen=True, slots=True)
class Schedule:
    """The accesses of one step in order; an access's index is its position, the number of accesses the period.

    Attributes:
        accesses: who accesses what.
        hasty: how many pages of a unit's update are fetched before the parameters that the computation asks for next;
            the others come behind them and their gradients, wherever the update is recorded. None: all come before.
        rests: whether some units are updated behind backward though others are under it: it is theirs that is to stay.
        period: positions from one step to the next.
    """

    accesses: tuple[Access, ...]
    hasty: int | None = None
    rests: bool = False
    period: int = field(init=False, repr=False)  # kept, as it is asked for with every access

    def __post_init__(self) -> None:
        object.__setattr__(self, "period", len(self.accesses) or 1)


def schedule_of(accesses: Iterable[tuple[Lane, PageKey]], *, hasty: int | None = None, rests: bool = False) -> Schedule:
    """The schedule with these (lane, key) accesses in this order; `hasty` and `rests` as in `Schedule`."""
    return Schedule(tuple(Access(lane, key) for lane, key in accesses), hasty, rests)
