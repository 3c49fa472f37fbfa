"""Building every room for one model.

Owns the order of construction: units, budget, storage, pages, hooks, updates. Does not run anything after that.
Guarantees that nothing on disk is touched before everything that can be refused has been, and that a failure on the way
leaves no file, thread or hook behind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from tiermem.checkpoint.pretrained import other_names
from tiermem.config import Config
from tiermem.errors import TiermemError
from tiermem.memory.devices import Device
from tiermem.memory.sizes import format_bytes
from tiermem.optim.coordinator import UpdateCoordinator
from tiermem.optim.kernels import Workspace, device_slice_numel
from tiermem.optim.masters import StateStore
from tiermem.optim.service import UpdateQueue
from tiermem.optim.shares import Shares, update_threads
from tiermem.optim.stream import DeviceKernels
from tiermem.optim.updater import Updater
from tiermem.planner.footprint import lagging_nbytes
from tiermem.planner.reserved import wanted_copies
from tiermem.planner.settings import acting
from tiermem.registry import registry
from tiermem.runtime.beginning import Beginning
from tiermem.runtime.blueprint import Blueprint
from tiermem.runtime.buffers import BufferWatch, restored
from tiermem.runtime.closing import Ending, close_rooms, refuse_inside
from tiermem.runtime.commits import Commits
from tiermem.runtime.company import Company
from tiermem.runtime.continuing import fill_pages, master_store, take_over
from tiermem.runtime.devices import open_device
from tiermem.runtime.exchanges import open_conductor, open_exchanges
from tiermem.runtime.ledger import GradientLedger, Steps
from tiermem.runtime.look_ahead import choose_look_ahead
from tiermem.runtime.paged_moments import PagedMoments
from tiermem.runtime.plans import StepPlans
from tiermem.runtime.queues import BackwardThrottle, GatedQueue, LazyQueue
from tiermem.runtime.snapshots import Snapshots
from tiermem.runtime.storage import Storage, open_storage
from tiermem.runtime.undo import choose_schedule, make_speculation
from tiermem.runtime.watch import ComputeWatch
from tiermem.zero3.conductor import Act, Conductor, Operation
from tiermem.zero3.cuts import Cutting
from tiermem.zero3.exchange import look
from tiermem.zero3.gather import Gatherer
from tiermem.zero3.initialise import Init
from tiermem.zero3.layout import Slot, UnitLayout
from tiermem.zero3.materialize import Materializer, WeightSource
from tiermem.zero3.norms import squares_loops
from tiermem.zero3.placeholder import Placeholders
from tiermem.zero3.scheduler import GatherScheduler
from tiermem.zero3.shards import Piece, owned_of


@dataclass(frozen=True)
class House:
    """Every room of one run."""

    config: Config
    blueprint: Blueprint
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
    company: Company
    conductor: Conductor

    @property
    def model(self) -> nn.Module:
        """The model, whose parameters are pages."""
        return self.blueprint.divided.model

    @property
    def layouts(self) -> tuple[UnitLayout, ...]:
        """The layouts of all units, by number."""
        return self.blueprint.layouts

    @cached_property
    def layout_record(self) -> dict[str, Any]:
        """What every commit says about the meaning of the pages' bytes."""
        return self.blueprint.record(self.config)

    @cached_property
    def cutting(self) -> Cutting:
        """Whether the graphs of micro-batches can be cut, which the first calls of `forward_backward` find out."""
        return Cutting(self.parameters, self.scheduler.saved.outstanding)

    @cached_property
    def other_names(self) -> dict[str, str | None]:
        """What every commit says about the names that parameters are exported under."""
        return other_names(self.model, [slot for layout in self.layouts for slot in layout.slots])

    @cached_property
    def ending(self) -> Ending:
        """The last part of `close`: files and threads."""
        return Ending()

    @property
    def in_words(self) -> str:
        """The run in a line: what is trained, how far it is, and the bytes that tiers hold."""
        numel = sum(slot.numel for layout in self.layouts for slot in layout.slots)
        ranks = f", rank {self.company.rank} of {self.company.size}" if self.company.size > 1 else ""
        tiers = [(tier.name, format_bytes(tier.reserved), format_bytes(tier.budget)) for tier in self.storage.tiers()]
        held = ", ".join(f"{name} {reserved} of {budget}" for name, reserved, budget in tiers)
        model = type(self.model).__name__
        return f"{model}, parameters {numel:,}, units {len(self.layouts)}, steps {self.steps.number}{ranks}; {held}"

    def require_between_steps(self, verb: Act) -> None:
        """Raise TiermemError unless the run is between two steps, and all ranks have come here for the same `verb`.

        While gradients wait for an optimizer's step only half of it could be kept; inside a forward or backward the
        random numbers belong to no step.
        """
        refuse_inside(verb.name.lower(), self.scheduler)
        self.ledger.line_up()
        if self.company.size > 1:
            self.conductor.run(Operation(verb))
        sources = self.coordinator.optimizers()
        counted = {number for source in sources for number in self.coordinator.parameters_of(source)}
        if self.ledger.is_mid_step or counted & self.ledger.unclaimed():
            raise TiermemError(
                f"{verb.name.lower()} between backward and step: its gradients would be lost; call it after "
                "optimizer.step(), or forget them with optimizer.zero_grad()"
            )

    def owned(self, unit: int, slot: Slot) -> list[Piece]:
        """The pieces of a parameter that this rank answers for: one, or none."""
        return owned_of(self.blueprint.shards[unit], slot)

    def look(self, unit: int, slot: Slot, read: Callable[[], None], whole: torch.Tensor) -> None:
        """Have `read` fill this rank's elements of `whole` in, and complete it from the other ranks."""
        if self.company.size == 1:
            read()
        else:
            look(self.conductor, self.blueprint.shards[unit], slot, read, whole)

    def close(self, *, remove: bool | None) -> None:
        """Tear everything down in reverse; with `remove` commits and swap files go. Raises the first error at the end.

        None: they go unless something is committed, or may be. After an interrupt it may be called again.
        """
        close_rooms(self, remove=remove)


def build(
    blueprint: Blueprint,
    config: Config,
    beginning: Beginning,
    company: Company,
    *,
    init: Init | None = None,
    weights: WeightSource | None = None,
    device: Device | None = None,
) -> House:
    """Open storage, turn the model into pages and hook it. Raises what those raise, and leaves nothing behind then.

    `device`: instead of the one `config` names; the house closes it.
    """
    swap_nbytes = blueprint.swap_nbytes(wanted_copies(_acting_update(config, company), commits=config.commits))
    alone = company.size == 1
    storage = company.together(
        "open its swap files",
        lambda: open_storage(
            config, beginning, blueprint, swap_nbytes, device=device or open_device(config), alone=alone
        ),
        undo=lambda opened: opened.close(remove=False),
    )
    try:
        company.together("begin in its swap files", storage.space.begin)  # an earlier run's commit goes no sooner
        return _furnish(blueprint, config, storage, beginning, company, init, weights)
    except BaseException:
        storage.close(remove=storage.recovered is None)
        raise


def _furnish(
    blueprint: Blueprint,
    config: Config,
    storage: Storage,
    beginning: Beginning,
    company: Company,
    init: Init | None,
    weights: WeightSource | None,
) -> House:
    pager, layouts, model = storage.pager, blueprint.layouts, blueprint.divided.model
    states, placeholders = StateStore(pager, blueprint.states), Placeholders()
    parameters = _materialize(blueprint, storage, states, placeholders, company, init, weights, beginning.past)
    buffers, past = _watch_buffers(model, weights), beginning.past
    counts = take_over(past, buffers, model) if past is not None else {}
    # What can be refused has been: from here on parameters have another class, and modules hooks.
    updater = _updater(blueprint, storage)
    names = [layout.name for layout in layouts]
    conductor = open_conductor(storage, company, names)
    source, gradients = open_exchanges(blueprint, parameters, storage, company, conductor, updater)
    gatherer = Gatherer(source, layouts, parameters, placeholders, storage.counters)
    schedule = choose_schedule(_acting_update(config, company), blueprint)
    ledger = GradientLedger(tuple(blueprint.states), gatherer)
    commits = Commits(storage, updater, company, origin=past)
    snapshots = Snapshots(storage, updater, commits, blueprint, company, second_copy=config.commits)
    queue = _queue(blueprint, updater, gatherer, snapshots.wait_open, source.changed)
    speculation = make_speculation(storage, snapshots.wait_open, queue, ledger, room_for=blueprint.swap_nbytes)
    states_in_order, divided, early = list(blueprint.states.values()), blueprint.divided, schedule.early
    coordinator = UpdateCoordinator(states_in_order, queue, ledger, schedule, speculation, patient=blueprint.patient)
    watch = ComputeWatch(_throttle(coordinator, queue, blueprint), storage.timeline, names)
    scheduler = GatherScheduler(divided, parameters, gatherer, gradients, watch, early=early, follow=storage.follow)
    ledger.connect(scheduler)
    _tell_of_gradients(gatherer, ledger, coordinator)
    look_ahead = choose_look_ahead(config, blueprint, storage.timeline, ranks=company.size)
    plans = StepPlans(pager, storage.counters, blueprint, schedule, look_ahead)
    scheduler.order.evaluates = plans.evaluate
    steps = Steps(coordinator, ledger, queue, plans)
    if past is not None:
        steps.resume(past["step"], counts, past["optimizers"])
    for number, parameter in enumerate(parameters):
        registry.attach(parameter, steps, number)
    house = House(
        config=config,
        blueprint=blueprint,
        storage=storage,
        parameters=parameters,
        gatherer=gatherer,
        ledger=ledger,
        scheduler=scheduler,
        updater=updater,
        coordinator=coordinator,
        states=states,
        steps=steps,
        commits=commits,
        buffers=buffers,
        snapshots=snapshots,
        company=company,
        conductor=conductor,
    )
    steps.connect(PagedMoments(house))
    return house


def _materialize(
    blueprint: Blueprint,
    storage: Storage,
    states: StateStore,
    placeholders: Placeholders,
    company: Company,
    init: Init | None,
    weights: WeightSource | None,
    past: Mapping[str, Any] | None,
) -> list[nn.Parameter]:
    materializer = Materializer(
        storage.pager,
        placeholders,
        master_store(states, weights, blueprint.shards),
        init,
        weights,
        device=storage.torch_device,
        broadcast=company.computing.broadcast,
        restored=restored(past["buffers"], blueprint.divided.model) if past is not None else (),
    )
    return fill_pages(blueprint, storage, materializer)


def _tell_of_gradients(gatherer: Gatherer, ledger: GradientLedger, coordinator: UpdateCoordinator) -> None:
    """Let absent parameters know what is not in their `.grad`."""

    def has_gradient(parameter: nn.Parameter) -> bool:
        place = gatherer.slots.get(id(parameter))  # None: a copy of an absent one
        return place is not None and place[1].parameter in ledger.scheduler.gradients.numbers(place[0])

    def had_gradient(parameter: nn.Parameter) -> bool:
        place = gatherer.slots.get(id(parameter))
        return place is not None and place[1].parameter in ledger.used

    def is_cleared(parameter: nn.Parameter) -> None:
        if (place := gatherer.slots.get(id(parameter))) is not None:
            ledger.used.discard(place[1].parameter)

    gatherer.absence.has_gradient, gatherer.absence.had_gradient = has_gradient, had_gradient
    gatherer.absence.is_cleared = is_cleared
    gatherer.absence.is_clipped = lambda: any(each.max_grad_norm is not None for each in coordinator.optimizers())


def _watch_buffers(model: nn.Module, weights: WeightSource | None) -> BufferWatch:
    buffers = BufferWatch(model)
    if weights is not None:
        weights.fill_others(model)  # watched: what a resumed run does not read again is committed
    return buffers


def _queue(
    blueprint: Blueprint,
    updater: Updater,
    gatherer: Gatherer,
    wait_open: Callable[[], None],
    changed: Callable[[int], None],
) -> GatedQueue:
    """What updates are queued in; `wait_open` and `changed` as for `GatedQueue`."""
    queue = LazyQueue(updater, gatherer.recheck) if blueprint.footprint.serial else updater
    narrow = any(state.dtype == torch.bfloat16 for state in blueprint.states.values())
    # In the first backward a compiler would come on top of the activations.
    prepare = squares_loops if narrow and blueprint.device is None else None
    return GatedQueue(queue, wait_open, changed, prepare=prepare)


def _updater(blueprint: Blueprint, storage: Storage) -> Updater:
    """Who updates, with as many threads as nobody else wants."""
    workspace = Workspace(shares=Shares(update_threads(beside_device=storage.torch_device.type != "cpu")))
    on_device, depth = _device_kernels(blueprint, storage), blueprint.footprint.depth
    return Updater(storage.pager, blueprint.states, depth=depth, workspace=workspace, on_device=on_device)


def _device_kernels(blueprint: Blueprint, storage: Storage) -> DeviceKernels | None:
    """Which units are updated on the device; None: none."""
    if storage.device is None or blueprint.device is None or not blueprint.device.settled:
        return None
    units, numel = frozenset(blueprint.device.settled), device_slice_numel(blueprint.device.nbytes)
    return DeviceKernels(units, storage.torch_device, storage.device.work_beside, numel)


def _acting_update(config: Config, company: Company) -> str:
    """The `update` that `config` comes to with these ranks."""
    return acting(config.update, late=company.size > 1 and config.stage == 1)


def _throttle(coordinator: UpdateCoordinator, queue: UpdateQueue, blueprint: Blueprint) -> BackwardThrottle:
    """What holds backward up while updates lag too far behind it."""
    nbytes = {shard.unit: lagging_nbytes(shard) for shard in blueprint.shards}
    # Ranks that have all parameters complete a unit from each other after its update: all of them, or none.
    agreed = any(shard.whole for shard in blueprint.shards)
    limit = sys.maxsize if blueprint.fits else blueprint.footprint.lag  # gradients that wait keep nobody out then
    return BackwardThrottle(coordinator, queue, nbytes, limit=limit, agreed=agreed)
