"""Where each parameter of a model is kept.

Owns the map from parameters, by identity, to units and slots. Does not know values. Guarantees that a parameter of
another model is refused.
"""

from __future__ import annotations

from torch import nn

from tiermem.errors import ConfigError
from tiermem.runtime.house import House
from tiermem.zero3.layout import Slot


class Places:
    """The map of one model."""

    def __init__(self, house: House) -> None:
        self._number_of = {id(parameter): number for number, parameter in enumerate(house.parameters)}
        self._slot_of = {slot.parameter: (layout.unit, slot) for layout in house.layouts for slot in layout.slots}

    def find(self, parameter: nn.Parameter) -> tuple[int, Slot]:
        """The unit and the slot of a parameter. Raises ConfigError for one of another model."""
        if not isinstance(parameter, nn.Parameter):
            raise ConfigError(f"expected a parameter of the model, found {type(parameter).__name__}")
        number = self._number_of.get(id(parameter))
        if number is None:
            raise ConfigError(f"a parameter of shape {tuple(parameter.shape)} does not belong to this runtime's model")
        return self._slot_of[number]
