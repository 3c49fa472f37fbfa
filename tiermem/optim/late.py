"""Units whose gradients are there, while a device has yet to say whether they are finite.

Owns which units' early updates were put off for that, in which order. Does not know why else one may be, nor carries
one out. Guarantees that asking does not wait for the device. Used from the compute thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiermem.optim.service import GradientBook


class LateNorms:
    """The units put off in the step under way."""

    def __init__(self, gradients: GradientBook, updated: Callable[[int], Sequence[int]]) -> None:
        """`updated(unit)`: the parameters of a unit that have a gradient and an optimizer."""
        self._gradients = gradients
        self._updated = updated
        self._units: dict[int, None] = {}

    def put_off(self, unit: int) -> bool:
        """Whether the norms of a unit cannot be read yet: then it is remembered."""
        if self._gradients.are_known(self._updated(unit)):
            return False
        self._units[unit] = None
        return True

    def known_since(self) -> list[int]:
        """The units that were put off and need not be any more, which are forgotten. In the order of the device."""
        found = []
        for unit in self._units:
            if not self._gradients.are_known(self._updated(unit)):
                break  # nor are those after it
            found.append(unit)
        for unit in found:
            del self._units[unit]
        return found

    def forget(self) -> None:
        """Forget all units: the step is over."""
        self._units.clear()
