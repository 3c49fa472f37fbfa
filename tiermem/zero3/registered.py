"""Whether modules still have the parameters that were offloaded.

Owns, for each module, which of its attributes were offloaded parameters. Does not know their values. Guarantees that a
call of a module in which something without values has taken their place (`model.to("meta")`, `to_empty`, a parameter
made from a placeholder) is an error, and that theirs are registered again then. Others with values, which users put
there on purpose (`torch.func.functional_call`, another head), are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tiermem.errors import TiermemError
from tiermem.zero3.placeholder import is_placeholder
from tiermem.zero3.units import ModelUnits, Place


class RegisteredParameters:
    """The places of a divided model, by module. `parameters`: by global number."""

    def __init__(self, divided: ModelUnits, parameters: Sequence[nn.Parameter]) -> None:
        self._own: dict[int, list[tuple[Place, nn.Parameter]]] = {}
        for _, member in divided.members():
            for place in member.places:
                self._own.setdefault(id(place.module), []).append((place, parameters[member.number]))

    def check(self, module: nn.Module) -> None:
        """Raise TiermemError if a parameter of the module's own was replaced by one that has no values."""
        for place, parameter in self._own.get(id(module), ()):
            if _is_lost(place, parameter):
                self._put_back()
                raise TiermemError(
                    f"parameter {place.name} was replaced after offload by one without values "
                    '(model.to("meta"), to_empty, or one made from a placeholder); its own are kept. That is undone '
                    "for the parameters, not for buffers: leave the model where it is after tiermem.offload"
                )

    def _put_back(self) -> None:
        """Register everywhere what was offloaded, so that it is said once."""
        for places in self._own.values():
            for place, parameter in places:
                if _is_lost(place, parameter):
                    setattr(place.module, place.attribute, parameter)


def _is_lost(place: Place, parameter: nn.Parameter) -> bool:
    found = place.module._parameters.get(place.attribute)  # noqa: SLF001 - getattr would compute what is parametrized
    return found is not None and found is not parameter and (found.is_meta or is_placeholder(found))
