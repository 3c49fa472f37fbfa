"""Moments as tensors: into the pages, for a run that was begun in plain PyTorch, and out of them, for one that leaves.

Owns the check of what is given, its way into the pages and the way back. Does not know optimizers, nor where the
tensors come from. Guarantees that nothing is changed where something given does not fit, or in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from tiermem.errors import ConfigError, TiermemError
from tiermem.optim.service import Moments
from tiermem.zero3.layout import Slot, memory_order

if TYPE_CHECKING:
    from tiermem.runtime.house import House


class PagedMoments:
    """The moments of one run, from outside: what `UpdateService.prepare_moments` and `read_moments` come to."""

    def __init__(self, house: House) -> None:
        self._house = house

    def prepare(self, given: Mapping[int, Moments]) -> Callable[[], None]:
        """Check the moments of these parameters; the function that stores them. Every rank is given the same."""
        for number, moments in given.items():
            _require_fitting(self._place(number)[1], moments)
        self._require_between_steps(given.keys(), "given", "load")
        units: dict[int, dict[int, Moments]] = {}
        for number, moments in given.items():
            units.setdefault(self._place(number)[0], {})[number] = moments

        def store() -> None:
            house = self._house
            for unit in units:
                house.coordinator.unit_needed(unit)
            house.coordinator.settle_early()
            house.snapshots.wait_open()
            for unit, moments in units.items():
                self._store(unit, moments)

        return store

    def read(self, parameters: Sequence[int]) -> list[Moments]:
        """A copy of the moments of these parameters, float32, each of its shape. Every rank asks for the same."""
        self._require_between_steps(parameters, "asked for", "read")
        return [self._whole(number) for number in parameters]

    def _whole(self, number: int) -> Moments:
        house, (unit, slot) = self._house, self._place(number)
        house.coordinator.unit_needed(unit)
        first, second = (torch.zeros(slot.numel, dtype=torch.float32, device="cpu") for _ in range(2))

        def read() -> None:
            for piece in house.owned(unit, slot):
                own = slice(piece.begin, piece.begin + piece.length)
                house.states.read_moments(unit, number, (first[own], second[own]))

        house.look(unit, slot, read, first)
        house.look(unit, slot, lambda: None, second)  # filled by the look before
        return first.as_strided(slot.shape, slot.stride), second.as_strided(slot.shape, slot.stride)

    def _place(self, number: int) -> tuple[int, Slot]:
        return self._house.gatherer.slots[id(self._house.parameters[number])]

    def _require_between_steps(self, parameters: Collection[int], asked: str, verb: str) -> None:
        ledger = self._house.ledger
        if ledger.is_mid_step or not ledger.unclaimed().isdisjoint(parameters):
            raise TiermemError(
                f"moments were {asked} between backward and step; {verb} them after optimizer.step(), or forget the "
                "gradients with optimizer.zero_grad()"
            )

    def _store(self, unit: int, given: Mapping[int, Moments]) -> None:
        house, layout = self._house, self._house.layouts[unit]
        states, pieces = house.states, [piece for piece in house.blueprint.shards[unit].owned() if piece.slot.trainable]
        found = {}
        for piece in pieces:
            number = piece.slot.parameter
            if number in given:
                own = slice(piece.begin, piece.begin + piece.length)
                # No copy where they lie like that: they may be of a file that is mapped, and be larger than memory.
                flat = (memory_order(values.detach().cpu(), piece.slot, torch.float32) for values in given[number])
                first, second = (values[own] for values in flat)
                found[number] = first, second
            elif layout.dtype == torch.float16:
                found[number] = states.read_moments(unit, number)
        masters = None
        if layout.dtype == torch.float16:  # masters are stored for all of a unit, or for none
            masters = {number: states.read_master(unit, number) for number in found}
        states.store_moments(unit, found, masters)


def _require_fitting(slot: Slot, moments: Moments) -> None:
    name = slot.names[0]
    if not slot.trainable:
        raise ConfigError(f"moments were given for {name}, which is not trained")
    for values in moments:
        if tuple(values.shape) != tuple(slot.shape):
            raise ConfigError(
                f"expected moments of shape {tuple(slot.shape)} for {name}, found {tuple(values.shape)}: they are of "
                "another model, or its parameters are in another order in this optimizer"
            )
        if values.is_meta or values.layout is not torch.strided or hasattr(values, "full_tensor"):
            raise ConfigError(
                f"expected moments with all their values for {name}, found a {type(values).__name__} of "
                f"{values.layout} on {values.device}: load files without map_location='meta', make what is sparse "
                "dense, and what is divided over ranks whole (full_tensor())"
            )
