"""Building every room for one model.

Owns the order of construction: units, budget, storage, pages, hooks, updates. Does not run anything after that.
Guarantees that nothing on disk is touched before everything that can be refused has been, and that a failure on the way
leaves no file, thread or hook behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tiermem.config import Config, resolve_host_memory
from tiermem.errors import ConfigError, TiermemError
from tiermem.memory.arena import FRAME_ALIGNMENT
from tiermem.memory.devices import Device
from tiermem.memory.machine import available_host_memory
from tiermem.optim.coordinator import UpdateCoordinator
from tiermem.optim.masters import StateStore
from tiermem.optim.schedules import make_schedule
from tiermem.optim.service import UpdateQueue
from tiermem.optim.tiles import Segment, UnitState
from tiermem.optim.updater import Updater
from tiermem.pager.extents import DURABLE
from tiermem.pager.page import Kind, PageKey
from tiermem.planner.device import DeviceFootprint
from tiermem.planner.footprint import SMALLEST_TILE, Footprint, rounded
from tiermem.registry import registry
from tiermem.runtime.beginning import Beginning
from tiermem.runtime.buffers import BufferWatch
from tiermem.runtime.commits import Commits
from tiermem.runtime.continuing import fill_pages, take_over
from tiermem.runtime.devices import move_buffers, open_device
from tiermem.runtime.ledger import GradientLedger, Steps
from tiermem.runtime.queues import BackwardThrottle, GatedQueue, LazyQueue
from tiermem.runtime.record import check_layout, layout_record
from tiermem.runtime.shares import share_out, unit_sizes
from tiermem.runtime.snapshots import Snapshots
from tiermem.runtime.storage import Budgets, Storage, close_all, open_storage
from tiermem.zero3.collectives import SingleProcess
from tiermem.zero3.gather import Gatherer
from tiermem.zero3.initialise import Initializer
from tiermem.zero3.layout import Slot, UnitLayout
from tiermem.zero3.materialize import Materializer, WeightSource, plan_layouts
from tiermem.zero3.placeholder import Placeholders
from tiermem.zero3.reduce import GradientStore
from tiermem.zero3.scheduler import GatherScheduler
from tiermem.zero3.units import ModelUnits, Wanted, find_units


@dataclass(frozen=True)
class House:
    """Every room of one run."""

    config: Config
    divided: ModelUnits
    layouts: tuple[UnitLayout, ...]
    footprint: Footprint
    storage: Storage
    parameters: Sequence[nn.Parameter]
    gatherer: Gatherer
    ledger: GradientLedger
    scheduler: GatherScheduler
    updater: Updater
    coordinator: UpdateCoordinator
    states: StateStore
    steps: Steps
    commits: Commits
    buffers: BufferWatch
    snapshots: Snapshots

    def require_between_steps(self, verb: str) -> None:
        """Raise TiermemError while some gradients wait for an optimizer's step: half a step is nothing to keep."""
        self.scheduler.settle()
        sources = self.coordinator.optimizers()
        counted = {number for source in sources for number in self.coordinator.parameters_of(source)}
        if self.ledger.is_mid_step or counted & self.ledger.unclaimed():
            raise TiermemError(
                f"{verb} between backward and step: its gradients would be lost; call it after optimizer.step(), or "
                "forget them with optimizer.zero_grad()"
            )

    def close(self, *, remove: bool | None) -> None:
        """Tear everything down in reverse; with `remove` commits and swap files go. Raises the first error at the end.

        None: they go unless something is committed.
        """

        def close_storage() -> None:
            self.storage.close(remove=self.commits.mark is None if remove is None else remove)

        self.steps.close()
        actions = [self.coordinator.wait_updates, self.snapshots.close, self.commits.close, self.scheduler.close]
        close_all([*actions, self.updater.close, close_storage])
        for parameter in self.parameters:
            registry.detach(parameter)


@dataclass(frozen=True)
class Blueprint:
    """What can be known before anything is opened."""

    divided: ModelUnits
    layouts: tuple[UnitLayout, ...]
    states: dict[int, UnitState]
    footprint: Footprint
    host_nbytes: int
    device: DeviceFootprint | None = None

    def swap_nbytes(self, *, commits: bool) -> int:
        """Bytes that all pages take on disk: with `commits` twice those that training changes.

        What is never trained has one copy, and the largest of it room for another, should somebody write into it.
        """
        frozen = [rounded(layout.nbytes) for layout in self.layouts if not layout.trainable]
        total = sum(rounded(nbytes) for _, nbytes in self.pages())
        if not commits:
            return total
        changing = sum(rounded(nbytes) for key, nbytes in self.pages() if key.kind in DURABLE)
        return total + changing - sum(frozen) + max(frozen, default=0)

    def pages(self) -> list[tuple[PageKey, int]]:
        """Every page with its size in bytes."""
        pages = []
        for layout in self.layouts:
            pages.append((layout.key, layout.nbytes))
            pages.extend((layout.gradient_key(tile), layout.tile_nbytes(tile)) for tile in range(layout.tiles))
        pages.extend(self.state_pages())
        return pages

    def state_pages(self) -> list[tuple[PageKey, int]]:
        """The pages of optimizer state with their sizes in bytes."""
        return [
            (PageKey(unit, Kind.STATE, tile), state.state_nbytes(tile))
            for unit, state in self.states.items()
            for tile in range(state.tiles)
        ]


def draw(model: nn.Module, config: Config, units: Wanted, beginning: Beginning | None = None) -> Blueprint:
    """Divide the model and share the budget out; opens nothing.

    Raises:
        ResumeError: the model is not the one that was committed, or its tiles do not fit into the budget.
        ConfigError: the model or a setting cannot be served.
        BudgetError: the host budget is too small; names the largest unit and the least that works.
    """
    _check(config)
    divided = find_units(model, units)
    sketch = plan_layouts(divided, dtype=config.dtype, tile_numel=SMALLEST_TILE)
    host_nbytes = resolve_host_memory(config, available_host_memory()) // FRAME_ALIGNMENT * FRAME_ALIGNMENT
    sizes = unit_sizes(divided, sketch, config.dtype)
    footprint, device = share_out(config, sizes, host_nbytes, tile=(beginning or Beginning()).tile_numel)
    layouts = plan_layouts(divided, dtype=config.dtype, tile_numel=footprint.tile_numel)
    if beginning is not None and beginning.record is not None:
        check_layout(beginning.record["layout"], layout_record(layouts, config, footprint.tile_numel))
    states = {layout.unit: _unit_state(layout) for layout in layouts if layout.trainable}
    return Blueprint(divided, layouts, states, footprint, host_nbytes, device)


def build(
    blueprint: Blueprint,
    config: Config,
    beginning: Beginning,
    *,
    init: Initializer | None = None,
    weights: WeightSource | None = None,
    device: Device | None = None,
) -> House:
    """Open storage, turn the model into pages and hook it. Raises what those raise, and leaves nothing behind then.

    `device`: instead of the one `config` names; the house closes it.
    """
    swap_nbytes = blueprint.swap_nbytes(commits=config.commits)
    budgets = Budgets(swap_nbytes, blueprint.host_nbytes, blueprint.footprint, blueprint.device)
    device = device or open_device(config)
    try:
        storage = open_storage(config, beginning, budgets, device=device)
    except BaseException:
        if device is not None:
            device.close()
        raise
    try:
        return _furnish(blueprint, config, storage, beginning, init, weights)
    except BaseException:
        storage.close(remove=storage.recovered is None)
        raise


def _furnish(
    blueprint: Blueprint,
    config: Config,
    storage: Storage,
    beginning: Beginning,
    init: Initializer | None,
    weights: WeightSource | None,
) -> House:
    pager, footprint, layouts = storage.pager, blueprint.footprint, blueprint.layouts
    states = StateStore(pager, blueprint.states)
    placeholders, collectives = Placeholders(), SingleProcess()

    def store_master(unit: int, slot: Slot, values: torch.Tensor) -> None:
        states.store_master(unit, slot.parameter, values)

    materializer = Materializer(pager, placeholders, store_master, init, weights, storage.torch_device)
    parameters = fill_pages(blueprint, storage, states, materializer)
    move_buffers(blueprint.divided.model, storage.torch_device)
    gatherer = Gatherer(pager, layouts, parameters, placeholders, collectives)
    hold_tiles = (blueprint.device or footprint).hold_tiles
    gradients = GradientStore(pager, layouts, parameters, collectives, hold_tiles=hold_tiles)
    schedule = make_schedule(config.update)
    ledger = GradientLedger(tuple(blueprint.states), gatherer)
    updater = Updater(pager, blueprint.states, depth=footprint.depth)
    early = schedule.name == "backward"
    commits = Commits(storage, updater, origin=beginning.past)
    snapshots = Snapshots(storage, updater, commits, layouts, blueprint.states, second_copy=config.commits)
    queue = GatedQueue(LazyQueue(updater) if footprint.serial else updater, snapshots.wait_open)
    coordinator = UpdateCoordinator(list(blueprint.states.values()), queue, ledger, schedule)
    scheduler = GatherScheduler(
        blueprint.divided, parameters, gatherer, gradients, _listener(coordinator, queue, blueprint), early=early
    )
    ledger.connect(scheduler)
    tiles = {unit: state.tiles for unit, state in blueprint.states.items()}
    steps = Steps(coordinator, ledger, queue, pager, storage.counters, tiles=tiles, update=schedule.name)
    buffers = BufferWatch(blueprint.divided.model)
    if weights is not None:
        weights.fill_buffers(blueprint.divided.model)  # watched: what a resumed run does not read again is committed
    if beginning.past is not None:
        take_over(beginning.past, steps, buffers)
    for number, parameter in enumerate(parameters):
        registry.attach(parameter, steps, number)
    return House(
        config,
        blueprint.divided,
        layouts,
        footprint,
        storage,
        parameters,
        gatherer,
        ledger,
        scheduler,
        updater,
        coordinator,
        states,
        steps,
        commits,
        buffers,
        snapshots,
    )


def _listener(coordinator: UpdateCoordinator, queue: UpdateQueue, blueprint: Blueprint) -> BackwardThrottle:
    sizes = {
        layout.unit: rounded(layout.nbytes) + layout.trainable_numel * layout.dtype.itemsize
        for layout in blueprint.layouts
    }
    return BackwardThrottle(coordinator, queue, sizes, limit=blueprint.footprint.lag)


def _check(config: Config) -> None:
    if config.moments != "float32":
        raise ConfigError(f"moments={config.moments!r}: this version keeps moments in float32; use moments='float32'")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        if size > 1:
            raise ConfigError(f"torch.distributed has {size} ranks; this version trains in one process")


def _unit_state(layout: UnitLayout) -> UnitState:
    segments = tuple(Segment(slot.parameter, slot.start, slot.numel) for slot in layout.trainable)
    return UnitState(layout.unit, layout.dtype, segments, layout.trainable_numel, layout.tile_numel)
