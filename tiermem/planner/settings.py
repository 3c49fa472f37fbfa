"""What a user decides, as numbers a plan can be made of.

Owns the record and what is refused in it. Does not know machines or models, and so not whether they go together.
Guarantees that a record which exists makes sense: whole numbers of bytes, ranks and requests, and words that are known.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any, get_args

from tiermem.config import Update, UpdateOn
from tiermem.errors import ConfigError
from tiermem.planner.parts import Division, division_of

# The least of each number, and which of them may be left to be planned.
_LEAST = {
    "host_memory": 0,
    "device_memory": 0,
    "tile_nbytes": 1,
    "look_ahead": 0,
    "block_size": 1,
    "queue_depth": 1,
    "ranks": 1,
    "beside_pages": 0,
    "copies": 1,
}
_PLANNED = ("device_memory", "tile_nbytes", "look_ahead")
_WORDS = {"update": get_args(Update), "update_on": get_args(UpdateOn), "clips": (False, True), "stage": (1, 2, 3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What a user decides, as far as time and bytes depend on it; sizes in bytes, None: planned.

    `host_memory` and `device_memory` are one rank's, for pages. `update`, `update_on`: as `Config` takes them.
    `copies`: how many copies of the model all `ranks` keep together. `stage`: ZeRO's, over ranks.

    Raises ConfigError for what makes no sense on any machine; for what a model cannot have see `make_design`.
    """

    host_memory: int
    device_memory: int | None = None
    update: str = "forward"
    tile_nbytes: int | None = None
    look_ahead: int | None = None
    block_size: int = 8 << 20
    queue_depth: int = 8
    ranks: int = 1
    update_on: str = "host"
    beside_pages: int = 0  # what else is in the host budget
    copies: int = 1
    stage: int = 3
    clips: bool = False  # whether gradients are clipped: "backward" then updates what may have to be undone

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            planned = name in _PLANNED
            if not (planned and getattr(self, name) is None):
                require_whole(name, getattr(self, name), least, " (None: it is planned)" if planned else "")
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                expected = ", ".join(map(repr, words))
                raise ConfigError(f"{name}: expected one of {expected}, found {getattr(self, name)!r}; choose one")

    @property
    def division(self) -> Division:
        """How the ranks divide the model. Raises ConfigError where they cannot."""
        return division_of(self.ranks, self.copies, self.stage)

    @property
    def acts_as(self) -> str:
        """`update`, or what becomes of it where gradients are added up after backward."""
        return acting(self.update, late=self.division.late)


def acting(update: str, *, late: bool) -> str:
    """`update` as it acts; `late`: gradients are added up over ranks after backward, so nothing is updated in it."""
    return "forward" if late and update in ("backward", "auto") else update


def require_whole(name: str, value: Any, least: int, advice: str = "") -> None:
    """Raise ConfigError unless a value is a whole number that is large enough."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ConfigError(f"{name}: expected a whole number of {least} or more, found {value!r}; correct it{advice}")
