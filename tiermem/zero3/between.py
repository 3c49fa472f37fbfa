"""What stays gathered though no call uses it: for backward, and a coalesced unit, whose uses no single call surrounds.

Owns which units these are. Does not know the order of units. Guarantees that between calls there is one at most, that
it is let go of before another unit is gathered, when the model's call ends and whenever the model is at rest, and that
units of one root are never kept there.
"""

from __future__ import annotations

from collections.abc import Container

from torch import nn

from tiermem.zero3.gather import Gatherer
from tiermem.zero3.units import ModelUnits


class Between:
    """The unit that the last call has used and the next one may use again. `elsewhere`: units that others hold."""

    def __init__(self, divided: ModelUnits, gatherer: Gatherer, elsewhere: Container[int]) -> None:
        self._model = divided.model
        self._coalesced = frozenset(unit.number for unit in divided.units if unit.is_coalesced)
        self._gatherer = gatherer
        self._elsewhere = elsewhere
        self._unit: int | None = None

    def take(self, unit: int) -> bool:
        """The last call that used the unit has ended; whether it stays gathered."""
        if unit not in self._coalesced:
            return False
        self.end(keep=unit)
        self._unit = unit
        return True

    def end(self, keep: int | None = None) -> None:
        """Let go of what was kept, unless it is `keep`."""
        unit = self._unit
        if unit is None or unit == keep:
            return
        self._unit = None
        if unit not in self._elsewhere and not self._gatherer.holds(unit) and not self._gatherer.reshard(unit):
            self._gatherer.count_leaks()

    def after(self, module: nn.Module | None) -> None:
        """A module's call has ended: after that of the whole model nothing is kept."""
        if module is self._model:
            self.end()


class Held(dict[int, None]):
    """The units gathered for backward, in order of arrival; and `between`, what is so from one call to the next."""

    def __init__(self, divided: ModelUnits, gatherer: Gatherer) -> None:
        super().__init__()
        self.between = Between(divided, gatherer, self)
        self._roots = [id(unit.root) for unit in divided.units]

    def without(self, keep: int | None) -> list[int]:
        """All but `keep` and what has the same root: its frozen part, or what is trained of it."""
        return [unit for unit in self if keep is None or self._roots[unit] != self._roots[keep]]
