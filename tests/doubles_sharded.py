"""A model under the stage-3 scheduler with a pager in memory, and its comparison with the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from doubles_pager import MemoryPager
from torch import nn

from tiermem.pager.page import Kind
from tiermem.stats import Counters
from tiermem.zero3.gather import Gatherer
from tiermem.zero3.layout import Slot, slot_view
from tiermem.zero3.lend import lend
from tiermem.zero3.materialize import Materializer, plan_layouts
from tiermem.zero3.placeholder import Placeholders
from tiermem.zero3.reduce import GradientStore
from tiermem.zero3.scheduler import GatherScheduler
from tiermem.zero3.shards import shards_of
from tiermem.zero3.sources import LocalUnits
from tiermem.zero3.units import find_units

Step = Callable[[nn.Module], torch.Tensor | None]


class Sharded:
    def __init__(
        self, model, *, units=None, dtype=torch.float32, tile=2048, hold=True, early=False, init=None, weights=None
    ):
        self.model = model
        self.divided = find_units(model, units)
        self.layouts = plan_layouts(self.divided, dtype=dtype, tile_numel=tile)
        self.pager = MemoryPager()
        self.masters: dict[int, torch.Tensor] = {}
        self.needed: list[int] = []
        self.completed: list[int] = []
        self.deviations = 0  # steps whose order was another than that of the step before
        self.changing: set[int] = set()
        placeholders = Placeholders()
        self.parameters = Materializer(self.pager, placeholders, self.store_master, init=init, weights=weights).run(
            self.divided, shards_of(self.layouts, 0, whole=False, copies=1)
        )
        source = LocalUnits(self.pager, self.layouts)
        self.counters = Counters()
        self.gatherer = Gatherer(source, self.layouts, self.parameters, placeholders, self.counters)
        store = GradientStore(self.pager, self.layouts, self.parameters, hold_tiles=hold)
        self.scheduler = GatherScheduler(self.divided, self.parameters, self.gatherer, store, self, early=early)
        self.slots: dict[str, tuple[int, Slot]] = {
            name: (layout.unit, slot) for layout in self.layouts for slot in layout.slots for name in slot.names
        }

    def store_master(self, unit: int, parameter: int, values: torch.Tensor) -> None:
        self.masters[parameter] = values.clone()

    def unit_needed(self, unit: int) -> None:
        # A unit that is complete may be changing: nobody may want its values before the step is over.
        assert unit not in self.changing, f"unit {unit} is used after it was complete"
        self.needed.append(unit)

    def may_update(self, unit: int) -> bool:
        return True

    def gradients_complete(self, unit: int) -> bool:
        assert not any(key.unit == unit for key in self.leased())
        self.completed.append(unit)
        self.changing.add(unit)
        return True

    def known_since(self) -> list[int]:
        return []

    def finish_step(self) -> None:
        before = self.scheduler.order.expected
        self.scheduler.finish_step()
        self.deviations += before is not None and before != self.scheduler.order.expected
        self.changing.clear()

    def leased(self):
        return [*self.pager.leased(Kind.PARAM), *self.pager.leased(Kind.GRAD)]

    def gradient(self, name: str) -> torch.Tensor | None:
        unit, slot = self.slots[name]
        if slot.parameter not in self.scheduler.gradients.numbers(unit):
            return None
        layout = self.layouts[unit]
        tiles = []
        for tile in range(layout.tiles):
            numel = min(layout.tile_numel, layout.trainable_numel - tile * layout.tile_numel)
            nothing = torch.zeros(numel * layout.dtype.itemsize, dtype=torch.uint8)
            tiles.append(self.pager.home.get(layout.gradient_key(tile), nothing))
        return slot_view(torch.cat(tiles), slot)

    def value(self, name: str) -> torch.Tensor:
        unit, slot = self.slots[name]
        with self.lend([unit]):
            return self.parameters[slot.parameter].detach().clone()

    def lend(self, units, written=None):
        return lend(self.gatherer, self.layouts, units, needed=self.unit_needed, written=written)


def same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.shape == right.shape and left.dtype == right.dtype and bool((left == right).all())


def run(model: nn.Module, step: Step, seed: int) -> torch.Tensor | None:
    torch.manual_seed(seed)
    result = step(model)
    return None if result is None else result.detach()


def compare(model: nn.Module, step: Step, *, steps: int = 2, reference: nn.Module | None = None, **settings) -> Sharded:
    """Run `step` (which calls backward) on the plain and the sharded model: same result and gradients, bit for bit."""
    plain = reference if reference is not None else copy.deepcopy(model)
    sharded = Sharded(model, **settings)
    for number in range(steps):
        plain.zero_grad(set_to_none=True)
        expected = run(plain, step, number)
        assert same(run(model, step, number), expected), "another result"
        check_gradients(sharded, plain)
        sharded.finish_step()
        assert sharded.leased() == []
    return sharded


def check_gradients(sharded: Sharded, plain: nn.Module) -> None:
    for name, parameter in plain.named_parameters():
        assert same(sharded.gradient(name), parameter.grad), f"another gradient: {name}"
        if parameter.grad is not None:
            _, slot = sharded.slots[name]
            norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            torch.testing.assert_close(sharded.scheduler.gradients.norm(slot.parameter), norm)
    assert all(parameter.grad is None for parameter in sharded.parameters)
