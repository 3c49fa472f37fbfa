"""Names of pages and of what is wanted of them.

Owns the immutable words used to speak with the pager: kinds, keys, intents, lanes. Does not know where a page is.
Guarantees that keys are hashable, ordered only by identity, and mean the same on every rank.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What the bytes of a page are."""

    PARAM = "param"
    GRAD = "grad"
    STATE = "state"
    ACTIVATION = "activation"


class Intent(enum.Enum):
    """What a lease is taken for.

    READ shares the page with other readers. WRITE needs the present contents and the only lease. FRESH needs the only
    lease too but not the contents: they are undefined when the lease is granted, and nothing is read from below.
    """

    READ = "read"
    WRITE = "write"
    FRESH = "fresh"


class Lane(enum.Enum):
    """Who walks through the schedule: the computation, or the update streaming beside it."""

    COMPUTE = "compute"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class PageKey:
    """The name of a page: unit number, kind, and tile number within (unit, kind)."""

    unit: int
    kind: Kind
    tile: int = 0

    def __str__(self) -> str:
        return f"unit {self.unit} {self.kind.value} tile {self.tile}"
