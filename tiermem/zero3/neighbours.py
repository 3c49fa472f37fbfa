"""What the scheduler asks of its neighbours: where gradients go, and who has to know.

Owns their types. Does not know who listens: that is the runtime's. Guarantees nothing by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tiermem.zero3.exchange import RankGradients
from tiermem.zero3.reduce import GradientStore

Gradients = GradientStore | RankGradients
"""Where gradients go, of one rank or of several."""


class Listener(Protocol):
    """Who is told when a unit is needed, and when its gradients are complete."""

    def unit_needed(self, unit: int) -> None:
        """Wait until no update of this unit is pending: its parameters or gradient pages are used next."""

    def may_update(self, unit: int) -> bool:
        """Whether this rank would take an update of the unit up, once all ranks have said so; nothing is begun."""

    def gradients_complete(self, unit: int) -> bool:
        """All gradients that this step will bring for the unit are in its pages; no lease on it is held here.

        Returns whether an update takes them now, after which no more may come.
        """

    def known_since(self) -> Sequence[int]:
        """Units whose gradients no update took because a device was not through with them, and now it is."""
