"""Moments that come from elsewhere: the state of a plain AdamW, for a run that was begun without this library.

Owns the check of what is given, and its way into the pages. Does not know optimizers, nor where the tensors come from.
Guarantees that nothing is changed where something given does not fit, or in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tiermem.errors import ConfigError, TiermemError
from tiermem.optim.service import Moments
from tiermem.runtime.house import House
from tiermem.zero3.layout import Slot


class GivenMoments:
    """What takes the moments of one run (`optim.service.MomentStore`)."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._slots = {slot.parameter: (layout.unit, slot) for layout in house.layouts for slot in layout.slots}

    def prepare(self, given: Mapping[int, Moments]) -> Callable[[], None]:
        """Check the moments of these parameters; the function that stores them. Every rank is given the same."""
        for number, moments in given.items():
            _check(self._slots[number][1], moments)
        if self._house.ledger.is_mid_step or given.keys() & self._house.ledger.unclaimed():
            raise TiermemError(
                "moments were given between backward and step; load them after optimizer.step(), or forget the "
                "gradients with optimizer.zero_grad()"
            )
        units: dict[int, dict[int, Moments]] = {}
        for number, moments in given.items():
            units.setdefault(self._slots[number][0], {})[number] = moments

        def store() -> None:
            house = self._house
            for unit in units:
                house.coordinator.unit_needed(unit)
            house.coordinator.settle_early()
            house.snapshots.wait_open()
            for unit, moments in units.items():
                self._store(unit, moments)

        return store

    def _store(self, unit: int, given: Mapping[int, Moments]) -> None:
        house, layout = self._house, self._house.layouts[unit]
        states, pieces = house.states, [piece for piece in house.shards[unit].owned() if piece.slot.trainable]
        found = {}
        for piece in pieces:
            number = piece.slot.parameter
            if number in given:
                own = slice(piece.begin, piece.begin + piece.length)
                found[number] = tuple(_in_memory_order(values, piece.slot)[own] for values in given[number])
            elif layout.dtype == torch.float16:
                found[number] = states.read_moments(unit, number)
        if layout.dtype == torch.float16:  # masters are stored for all of a unit, or for none
            masters = {number: states.read_master(unit, number) for number in found}
            for number, master in masters.items():
                states.store_master(unit, number, master)
        for number, (first, second) in found.items():
            states.store_moments(unit, number, first, second)


def with_moments(house: House) -> House:
    """The house, of which optimizers can have moments stored."""
    house.steps.connect(GivenMoments(house))
    return house


def _check(slot: Slot, moments: Moments) -> None:
    name = slot.names[0]
    if not slot.trainable:
        raise ConfigError(f"moments were given for {name}, which is not trained")
    for values in moments:
        if tuple(values.shape) != tuple(slot.shape):
            raise ConfigError(
                f"expected moments of shape {tuple(slot.shape)} for {name}, found {tuple(values.shape)}: they are of "
                "another model, or its parameters are in another order in this optimizer"
            )


def _in_memory_order(values: torch.Tensor, slot: Slot) -> torch.Tensor:
    arranged = torch.empty_strided(slot.shape, slot.stride)
    arranged.copy_(values.detach())
    return arranged.as_strided((slot.numel,), (1,))
