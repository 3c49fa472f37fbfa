"""What is done by hand to an optimizer's `param_groups` and `state`, past its methods.

Owns which group each parameter is in, and the `state` that has nothing in it. Does not know the optimizer's parameters
but by their numbers. Guarantees that what would have no effect, or another one than in torch, is an error.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from tiermem.errors import ConfigError, TiermemError

Group = dict[str, Any]


class Membership:
    """Which group each parameter is in: groups may be put in the place of others, and parameters go to others."""

    def __init__(self) -> None:
        self._known: list[tuple[Group, list[torch.Tensor]]] = []
        self._group_of: dict[int, Group] = {}

    def add(self, group: Group, indices: Sequence[int]) -> None:
        """One group more, of the parameters of these numbers."""
        self._group_of.update(dict.fromkeys(indices, group))
        self._known.append((group, list(group["params"])))

    def follow(self, groups: Sequence[Group], index_of: Mapping[torch.Tensor, int], *, closely: bool) -> None:
        """Take over what was done to them, by hand or by `load_state_dict`, which puts new ones in their place.

        `closely`: also parameters that have changed places, one for another.
        Raises ConfigError for parameters that were put in or taken out.
        """
        if len(groups) == len(self._known) and all(map(_is_same if closely else _seems_same, groups, self._known)):
            return
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch has no public name for it
            found = [parameter for group in groups for parameter in group["params"]]
            if any(parameter not in index_of for parameter in found):
                raise ConfigError(
                    "param_groups has a parameter that was put there by hand: call optimizer.add_param_group, which "
                    "knows where its moments are"
                )
            if not len(found) == len(set(found)) == len(index_of):
                raise ConfigError(
                    f"param_groups had {len(index_of)} parameters, and now has {len(set(found))} in {len(found)} "
                    "places: it was changed by hand. One that is to sit out is frozen by requires_grad_(False); a new "
                    "tiermem.AdamW without it takes the others over with their moments"
                )
            self._group_of = {index_of[parameter]: group for group in groups for parameter in group["params"]}
            self._known = [(group, list(group["params"])) for group in groups]

    def group_of(self, index: int) -> Group:
        """The group of the parameter of this number."""
        return self._group_of[index]


def _seems_same(group: Group, known: tuple[Group, list[torch.Tensor]]) -> bool:
    return group is known[0] and len(group["params"]) == len(known[1])


def _is_same(group: Group, known: tuple[Group, list[torch.Tensor]]) -> bool:
    return _seems_same(group, known) and all(map(operator.is_, group["params"], known[1]))


class NoState(defaultdict[torch.Tensor, Any]):
    """What torch's optimizers have their moments in: there are none here, so that nobody can forget them here."""

    def __init__(self) -> None:
        super().__init__(dict)

    def _refuse(self, *_: object) -> NoReturn:
        raise moments_elsewhere()

    __delitem__ = clear = pop = popitem = _refuse


def moments_elsewhere() -> TiermemError:
    """The error for a state that was emptied or exchanged by hand."""
    return TiermemError(
        "optimizer.state was emptied or replaced, which would leave the moments as they are: they are pages of the "
        "runtime. To begin anew: state = optimizer.full_state_dict(), zero_() every tensor of every entry of "
        "state['state'], and optimizer.load_state_dict(state)"
    )
