"""What can be known of a run before anything is opened.

Owns the division of a model into units, the sharing out of budgets, the layouts, and what this rank keeps of them. Does
not open, write or hook anything. Guarantees that what cannot be served is refused here, with neither model nor disk
touched, and that all ranks draw the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import nn

from tiermem.config import Config, resolve_host_memory
from tiermem.errors import BudgetError, ConfigError, ResumeError
from tiermem.memory.arena import FRAME_ALIGNMENT, rounded
from tiermem.memory.machine import available_host_memory
from tiermem.memory.rounding import round_down
from tiermem.optim.compiled import are_wanted
from tiermem.optim.tiles import UnitState
from tiermem.pager.below import LARGEST_DIVISOR
from tiermem.pager.extents import DURABLE
from tiermem.pager.page import Kind, PageKey
from tiermem.pager.schedule import Schedule
from tiermem.pager.tiling import SMALLEST_TILE, tiles_in_turn
from tiermem.planner.device import DeviceFootprint
from tiermem.planner.footprint import Footprint, UnitSize, kept_nbytes
from tiermem.planner.overhead import beside_pages
from tiermem.planner.parts import size_of
from tiermem.planner.reserved import copied_nbytes
from tiermem.planner.resting import resting_units
from tiermem.planner.steps import Arrivals, plan_step
from tiermem.runtime.beginning import Beginning
from tiermem.runtime.company import Company, alone
from tiermem.runtime.moments import quantized_parameters, state_size, unit_state
from tiermem.runtime.record import layout_record, require_same_layout
from tiermem.runtime.shares import share_out
from tiermem.zero3.coalesce import small_nbytes
from tiermem.zero3.keep import Keeping
from tiermem.zero3.layout import UnitLayout
from tiermem.zero3.materialize import plan_layouts
from tiermem.zero3.order import StepOrder
from tiermem.zero3.shards import Shard, shards_of
from tiermem.zero3.units import ModelUnits, Wanted, find_units


@dataclass(frozen=True)
class Blueprint:
    """What can be known before anything is opened.

    Attributes:
        layouts, shards, sizes: of each unit, by number: its flat buffer, this rank's part of it, what planning asks.
        states: of each trainable unit, by number: the optimizer state that this rank keeps.
        footprint, device: how host memory, and that of a device, are shared out.
        host_nbytes, beside_nbytes: bytes of the host budget that are for pages, and for other things.
        resting: units whose update waits for the step, so that their pages stay in memory.
    """

    divided: ModelUnits
    layouts: tuple[UnitLayout, ...]
    states: dict[int, UnitState]
    footprint: Footprint
    host_nbytes: int
    shards: tuple[Shard, ...]
    sizes: tuple[UnitSize, ...]
    stage: int = 3
    device: DeviceFootprint | None = None
    resting: tuple[int, ...] = ()
    beside_nbytes: int = 0

    @property
    def kept(self) -> frozenset[int]:
        """The units whose parameters stay in host memory by choice."""
        return frozenset(layout.unit for layout in self.layouts if layout.kept)

    @property
    def passing_nbytes(self) -> int:
        """Bytes of the largest parameters that pass through host memory beside a device, if it holds many times them.

        As many times as for parameters to be at home on the device. Zero otherwise: then no part of host memory can be
        spared for them alone (`SlabArena`).
        """
        largest = max((rounded(size.param_nbytes) for size in self.sizes if not size.kept), default=0)
        roomy = self.host_nbytes - kept_nbytes(self.sizes) >= LARGEST_DIVISOR * largest
        return largest if roomy and self.device is not None else 0

    @property
    def patient(self) -> frozenset[int]:
        """The units whose update waits for the step wherever it might have to be undone: see `resting.py`."""
        return self.kept.union(self.resting, self.device.settled if self.device is not None else ())

    @property
    def apart(self) -> frozenset[int]:
        """Of the kept units those whose gradients are taken beside those of the rest of their root, tile by tile.

        On a device frames have fixed places, among which one more tile is not reckoned with; with ranks each bucket is
        exchanged by itself.
        """
        if self.device is not None or self.shards[0].layout.ranks > 1:
            return frozenset()
        roots = Counter(id(unit.root) for unit in self.divided.units)
        return frozenset(unit for unit in self.kept if roots[id(self.divided.units[unit].root)] > 1)

    @property
    def beside(self) -> bool:
        """Whether ranks gather the next unit, and add gradients up, beside the computation."""
        return (self.device or self.footprint).beside

    @property
    def fits(self) -> bool:
        """Whether host memory has room for all pages at once."""
        return self.swap_nbytes(1) <= self.host_nbytes

    def record(self, config: Config) -> dict[str, Any]:
        """Everything on which the meaning of the pages' bytes depends, as a commit holds it."""
        copies, small = self.shards[0].copies, self.divided.small
        return layout_record(self.layouts, config, self.footprint.tile_numel, copies=copies, small=small)

    def swap_nbytes(self, copies: int) -> int:
        """Bytes that all pages take on disk, those that training changes in `copies` copies: see `copied_nbytes`."""
        total, changing, frozen = self._on_disk
        return copied_nbytes(copies, total=total, changing=changing, frozen=frozen)

    @cached_property
    def _on_disk(self) -> tuple[int, int, list[int]]:
        frozen = [rounded(shard.nbytes) for shard in self.shards if not shard.layout.trainable]
        sizes = [(key.kind, rounded(nbytes)) for key, nbytes in self.pages]
        total = sum(nbytes for _, nbytes in sizes)
        if self.stage < 3 and self.shards[0].layout.ranks > 1:
            # Beside a commit or a snapshot of a unit lies what it becomes when it is completed from the other ranks.
            total += sum(rounded(shard.nbytes) for shard in self.shards if shard.layout.trainable)
            if self.stage == 1:  # gradients wait whole on every rank for the step
                total += sum(rounded(shard.bucket_nbytes) for shard in self.shards)
        changing = sum(nbytes for kind, nbytes in sizes if kind in DURABLE) - sum(frozen)
        return total, changing, frozen

    @cached_property
    def pages(self) -> tuple[tuple[PageKey, int], ...]:
        """Every page that has a home on disk, with its size in bytes."""
        parameters = (page for shard in self.shards for page in shard.pages())
        return (*parameters, *self.state_pages)

    @property
    def hold_tiles(self) -> bool:
        """Whether a unit's gradient tiles are all leased at once."""
        return (self.device or self.footprint).hold_tiles

    def runs(self, parameters: Iterable[int]) -> dict[int, list[tuple[int, int]]]:
        """By unit, where the gradients of these parameters lie (first element, elements), in this order."""
        found: dict[int, list[tuple[int, int]]] = {}
        for parameter in parameters:
            unit, start, numel = self._places[parameter]
            found.setdefault(unit, []).append((start, numel))
        return found

    @cached_property
    def _places(self) -> dict[int, tuple[int, int, int]]:
        return {
            slot.parameter: (layout.unit, slot.start, slot.numel)
            for layout in self.layouts
            for slot in layout.trainable
        }

    def arrivals(self, order: StepOrder) -> Arrivals:
        """The gradient tiles in the order in which they are leased, of units of which they are not leased at once."""
        tile, apart = self.footprint.tile_numel, self.apart
        if self.shards[0].layout.ranks > 1 or (self.hold_tiles and not apart):
            return {}
        runs = self.runs(order.contributions)
        return {unit: tiles_in_turn(runs[unit], tile) for unit in runs if not self.hold_tiles or unit in apart}

    def plan(self, order: StepOrder, arrivals: Arrivals, update: str) -> Schedule:
        """The pager's schedule of a step like this one, whose units are updated as `update` says."""
        tiles = {unit: state.tiles for unit, state in self.states.items()}
        return plan_step(
            order.accesses,
            tiles,
            update,
            self.shards,
            beside=self.beside,
            two=self.device is None,
            touches=order.touches,
            arrivals=arrivals,
            resting=self.resting,
            together=order.together,
            late=self.stage == 1 and self.shards[0].layout.ranks > 1,
        )

    @cached_property
    def state_pages(self) -> tuple[tuple[PageKey, int], ...]:
        """The pages of optimizer state with their sizes in bytes."""
        return tuple(
            (PageKey(unit, Kind.STATE, tile), state.state_nbytes(tile))
            for unit, state in self.states.items()
            for tile in range(state.tiles)
        )


def draw(
    model: nn.Module,
    config: Config,
    units: Wanted,
    beginning: Beginning | None = None,
    company: Company | None = None,
    keeping: Keeping | None = None,
    coalesce: int | str = 0,
) -> Blueprint:
    """Divide the model and share the budget out; opens nothing. With a `company` of several all ranks draw the same.

    `company`: default: this process alone, whatever torch.distributed says. `keeping`: what stays in host memory by
    choice. `coalesce`: as `tiermem.offload` takes it.

    Raises:
        ResumeError: the model is not the one that was committed, or its tiles do not fit into the budget.
        ConfigError: the model or a setting cannot be served.
        BudgetError: a budget is too small; names the largest unit and the least that works.
    """
    keeping = keeping or Keeping()
    beginning = beginning or Beginning()
    company = company or alone()
    available = available_host_memory() // company.neighbours
    host_nbytes = round_down(company.least(resolve_host_memory(config, available)), FRAME_ALIGNMENT)
    small = small_nbytes(coalesce, min(host_nbytes, config.device_nbytes or host_nbytes), beginning.small_nbytes)
    kept = keeping.find(model, config.dtype)
    divided = find_units(model, units, kept, small=small, dtype=config.dtype)
    grid = company.grid
    ranks, copies, whole = grid.shards.size, grid.copies.size, config.stage < 3 and company.size > 1
    lay_out = partial(plan_layouts, divided, dtype=config.dtype, ranks=ranks, kept_dtype=keeping.dtype)
    if beginning.record is not None and (tile := beginning.tile_numel):  # first: of another model no tile says much
        here = layout_record(lay_out(tile_numel=tile), config, tile, copies=copies, small=small)
        require_same_layout(beginning.record["layout"], here)
    sketch = lay_out(tile_numel=SMALLEST_TILE)
    quantized = quantized_parameters(divided, config.moments)
    sizes = _sizes(divided, shards_of(sketch, 0, whole=whole, copies=copies), quantized)
    loops = are_wanted(config.dtype, config.moments)
    beside = beside_pages(host_nbytes, compiled=loops)
    share = partial(share_out, config, sizes, tile=beginning.tile_numel, least=company.least)
    try:
        footprint, device = share(host_nbytes - beside, beside=beside)
    except (BudgetError, ResumeError):  # of a budget that is just enough all is for pages
        beside = 0
        footprint, device = share(host_nbytes)
    host_nbytes -= beside
    if whole and device is not None and any(size.kept for size in sizes):
        raise ConfigError(
            f"keep= with {ranks} ranks that compute on devices needs stage=3, found stage={config.stage}: there what "
            "other ranks have updated is brought together on the device, and the page would not stay in host memory"
        )
    layouts = lay_out(tile_numel=footprint.tile_numel)
    shards = shards_of(layouts, grid.shards.rank, whole=whole, copies=copies)
    states = {shard.unit: unit_state(shard, quantized) for shard in shards if shard.layout.trainable}
    # In "backward" an update is for good where nobody clips: then a page that stays in memory is not written at all.
    settled = device.settled if device is not None else ()
    resting = resting_units(sizes, footprint, host_nbytes, settled) if config.update == "auto" else ()
    return Blueprint(
        divided, layouts, states, footprint, host_nbytes, shards, tuple(sizes), config.stage, device, resting, beside
    )


def _sizes(divided: ModelUnits, shards: Sequence[Shard], quantized: Container[int]) -> list[UnitSize]:
    nested = _nested(divided, shards)
    states = [state_size(shard.layout, quantized) for shard in shards]
    return [
        size_of(
            shard,
            state_itemsize=state.itemsize,
            nested_nbytes=nested[shard.unit].nbytes,
            nested_count=nested[shard.unit].units,
            nested_kept=nested[shard.unit].nbytes - nested[shard.unit].moving,
            wide_numel=state.wide_numel,
            wide_itemsize=state.wide_itemsize,
        )
        for shard, state in zip(shards, states, strict=True)
    ]


class _Nested(NamedTuple):
    """The most bytes leased beside a unit, of those the most in pages not kept by choice, and the most units."""

    nbytes: int = 0
    moving: int = 0
    units: int = 0


def _nested(divided: ModelUnits, shards: Sequence[Shard]) -> dict[int, _Nested]:
    """For each unit the most bytes, and the largest number, of others that a module call needing it holds meanwhile."""
    named = {id(module): name for name, module in divided.model.named_modules()}
    points = {named[id(point.module)]: point.units for point in divided.points}
    layouts = [shard.layout for shard in shards]
    most = {layout.unit: _Nested() for layout in layouts}
    for name, units in points.items():
        parts = name.split(".") if name else []
        around = ["", *(".".join(parts[:count]) for count in range(1, len(parts)))]
        held = {unit for outer in around for unit in points.get(outer, ())} | set(units)
        for unit in units:
            beside = sum(rounded(layouts[other].nbytes) for other in held if other != unit)
            stays = sum(
                rounded(layouts[other].nbytes)
                for other in held
                if other != unit and layouts[other].kept and not shards[other].gathered_nbytes
            )
            before = most[unit]
            most[unit] = _Nested(
                max(before.nbytes, beside), max(before.moving, beside - stays), max(before.units, len(held) - 1)
            )
    return most
