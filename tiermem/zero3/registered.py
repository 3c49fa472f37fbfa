"""Whether modules still have the parameters that were offloaded.

Owns, for each module, which of its attributes were offloaded parameters. Does not know their values. Guarantees that a
call of a module is an error where

- something without values has taken their place (`model.to("meta")`, `to_empty`, a parameter made from a placeholder);
- another offloaded parameter has (weights tied too late: what has gone would be saved as it was);
- their place is empty, and what was put beside it is NaN, because it was computed while they were paged out
  (`weight_norm`, `spectral_norm`, pruning).

In the first two cases they are registered again. What has values and was put there on purpose
(`torch.func.functional_call`, another head) is left alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
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
        self._offloaded = frozenset(map(id, parameters))
        self._looked_at: set[int] = set()  # modules with an empty place, beside which there are values

    def check(self, module: nn.Module) -> None:
        """Raise TiermemError if a parameter of the module's own was replaced by one without values, or by another."""
        for place, parameter in self._own.get(id(module), ()):
            found = module._parameters.get(place.attribute)  # noqa: SLF001 - getattr would compute what is parametrized
            if found is None:
                self._refuse_beside(place)
            elif self._is_other(found, parameter):
                self._put_back()
                raise TiermemError(
                    f"parameter {place.name} was replaced after offload by another parameter of the model (tied "
                    "weights?), and would be saved as it was; that is undone: tie weights before tiermem.offload"
                )
            elif _is_lost(found, parameter):
                self._put_back()
                raise TiermemError(
                    f"parameter {place.name} was replaced after offload by one without values "
                    '(model.to("meta"), to_empty, or one made from a placeholder); its own are kept. That is undone '
                    "for the parameters, not for buffers: leave the model where it is after tiermem.offload"
                )

    def _refuse_beside(self, place: Place) -> None:
        """A parameter is not where it was: look once at what has come into its module instead."""
        if id(place.module) in self._looked_at:
            return
        for name, tensor in _beside(place):
            if id(tensor) not in self._offloaded and _is_nan(tensor):
                raise TiermemError(
                    f"{name} of {type(place.module).__name__} is NaN: it was computed after offload from parameter "
                    f"{place.name}, whose values were paged out (weight_norm, spectral_norm, pruning?). Do that before "
                    "tiermem.offload, or, where it adds no parameters, inside "
                    "`with runtime.gathered(module, write=True):`"
                )
        self._looked_at.add(id(place.module))

    def _put_back(self) -> None:
        """Register everywhere what was offloaded, so that it is said once."""
        for places in self._own.values():
            for place, parameter in places:
                found = place.module._parameters.get(place.attribute)  # noqa: SLF001 - as above
                if found is not None and (self._is_other(found, parameter) or _is_lost(found, parameter)):
                    setattr(place.module, place.attribute, parameter)

    def _is_other(self, found: nn.Parameter, parameter: nn.Parameter) -> bool:
        return found is not parameter and id(found) in self._offloaded


def _is_lost(found: nn.Parameter, parameter: nn.Parameter) -> bool:
    return found is not parameter and (found.is_meta or is_placeholder(found))


def _beside(place: Place) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a module and of its parametrizations, and one that stands where the parameter was."""
    module = place.module
    parametrizations = module._modules.get("parametrizations")  # noqa: SLF001 - torch's own name for them
    yield from itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    if parametrizations is not None:
        yield from parametrizations.named_parameters(prefix="parametrizations")
        yield from parametrizations.named_buffers(prefix="parametrizations")
    plain = vars(module).get(place.attribute)
    if isinstance(plain, torch.Tensor) and not is_placeholder(plain):  # one is computed anew before it is used
        yield place.attribute, plain


def _is_nan(tensor: torch.Tensor) -> bool:
    """Whether there is nothing else in it."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or tensor.numel() == 0:
        return False
    return bool(tensor.detach().isnan().all())
