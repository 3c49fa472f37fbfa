"""The recorded order of a step's page accesses.

Owns the immutable `Schedule` of one training step. Does not know where anybody stands in it (`forecast.py`), sizes or
tiers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tiermem.pager.page import Kind, Lane, PageKey


class Step(enum.Enum):
    """What a step does beside evaluations: begins, or begins again; comes to what may be one; goes on after one.

    RESTS: it has not begun, and others write pages meanwhile, perhaps the same ones again and again.
    """

    BEGINS = "begins"
    PAUSES = "pauses"
    GOES_ON = "goes on"
    RESTS = "rests"


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
            the others come after them and their gradients, wherever the update is recorded. None: all come before.
        rests: whether some units are updated after backward though others are under it (`planner/resting.py`): pages of
            the former are to stay.
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


def due_positions(schedule: Schedule) -> dict[PageKey, tuple[int, int]]:
    """(its position, the position of its unit's last gradient before it) for each page that the update accesses.

    The latter is less than a period before: negative where the gradient comes from the step before.
    """
    gradients: dict[int, int] = {}
    for position, access in enumerate(schedule.accesses):
        if access.lane is Lane.COMPUTE and access.key.kind is Kind.GRAD:
            gradients[access.key.unit] = position - schedule.period
    due: dict[PageKey, tuple[int, int]] = {}
    for position, access in enumerate(schedule.accesses):
        if access.lane is Lane.UPDATE:
            due[access.key] = position, gradients.get(access.key.unit, position - 1)
        elif access.key.kind is Kind.GRAD:
            gradients[access.key.unit] = position
    return due


def is_gradient(access: Access) -> bool:
    """Whether the computation writes a gradient."""
    return access.lane is Lane.COMPUTE and access.key.kind is Kind.GRAD
