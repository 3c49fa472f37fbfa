"""The two who use pages: the computation and the update, as simulated processes.

Owns the course of a training step as `zero3.scheduler`, `optim.stream`, `optim.updater` and `runtime.queues` carry it
out: who leases what, in which order, and who waits for whom. Does not decide what is fetched or evicted. Guarantees
that every lease is given back and that each unit is updated once a step, in every update schedule.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator

from tiermem.optim.updater import ANNOUNCED
from tiermem.pager.page import Intent, Kind, Lane, PageKey
from tiermem.pager.protection import Protection
from tiermem.planner.clock import Gate, Signal
from tiermem.planner.undoing import SimulatedUndo, protect
from tiermem.planner.world import Asked, World
from tiermem.zero3.order import Access, Phase

Steps = Generator[Signal, None, None]

# The first gradient of a unit arrives after about a third of its backward; its pages are held from then on.
_BEFORE_GRADIENT = 1 / 3
# The last one arrives a little before its end (0.04 to 0.06 were seen). In that time an update that begins then gets
# hold of what is in memory; taken to begin at the end, it came after the next unit, which drove that out.
_AFTER_GRADIENT = 0.04


class UpdateActor:
    """Updates units, one after the other, tile by tile."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._queue: deque[int] = deque()
        self._pending: dict[int, Signal] = {}
        self._kept: dict[int, None] = {}
        self._running = False
        self._undo = SimulatedUndo(world)
        self._protections: dict[int, Protection] = {}
        # Made once: the agenda knows a unit that it has by its very list, as it does that of a real update.
        self._keys: dict[int, list[PageKey]] = {}

    def request(self, unit: int, *, undone: bool = False) -> None:
        """A unit is to be updated; where nothing fits beside the computation, once somebody waits for it.

        `undone`: perhaps for nothing, as long as `confirm` does not say otherwise.
        """
        self._pending[unit] = Signal()
        if undone:
            self._protections[unit] = self._undo.begin()
        if self._world.design.footprint.serial:
            self._kept[unit] = None
        else:
            self._start(unit)

    def confirm(self) -> None:
        """What was updated counts."""
        self._undo.confirm()

    def pending(self, unit: int) -> bool:
        """Whether its update is still to end."""
        return unit in self._pending

    def hurry(self, unit: int) -> None:
        """Let it be the next."""
        if unit in self._queue:
            self._queue.remove(unit)
            self._queue.appendleft(unit)

    def wait(self, unit: int) -> Steps:
        """Until the unit's update has ended."""
        if unit not in self._pending:
            return
        self.hurry(unit)
        if unit in self._kept:
            del self._kept[unit]
            self._start(unit)
        yield from self._world.wait_for(self._pending[unit], "update")

    def running(self, unit: int) -> Iterator[Signal]:
        """What somebody waits for who does not compute: the end of the unit's update, where it does not wait itself."""
        if unit in self._pending and unit not in self._kept:
            self.hurry(unit)
            yield self._pending[unit]

    def wait_all(self) -> Steps:
        """Until no update is left."""
        for unit in list(self._pending):
            yield from self.wait(unit)

    def keys(self, unit: int) -> list[PageKey]:
        """The pages an update touches, in order."""
        if unit not in self._keys:
            tiles = range(self._world.design.tiles(unit))
            both = [PageKey(unit, kind, tile) for tile in tiles for kind in (Kind.GRAD, Kind.STATE)]
            self._keys[unit] = [PageKey(unit, Kind.PARAM), *both]
        return self._keys[unit]

    def _start(self, unit: int) -> None:
        self._queue.append(unit)
        if self._running:
            self._world.announce(lambda forecast: forecast.extend_agenda(self.keys(unit)))
        else:
            self._running = True
            self._world.clock.start(self._run())

    def _run(self) -> Steps:
        while self._queue:
            unit = self._queue.popleft()
            coming = [unit, *itertools.islice(self._queue, ANNOUNCED)]
            groups = [self.keys(announced) for announced in coming]
            self._world.announce(lambda forecast, groups=groups: forecast.set_agenda(groups))  # type: ignore[misc]
            yield from self._update(unit)
            self._world.clock.fire(self._pending.pop(unit))
        self._running = False

    def _update(self, unit: int) -> Steps:
        world, design = self._world, self._world.design
        param = [PageKey(unit, Kind.PARAM)]
        protection = self._protections.pop(unit, None)
        if protection is not None:
            protection.prepare([key for key in self.keys(unit) if key.kind is not Kind.GRAD])
            yield from protect(protection, param)
        yield from world.lease(param, Intent.WRITE, Lane.UPDATE)
        if unit in design.settled:
            yield from self._update_above(unit, protection)
            world.release(param, Lane.UPDATE)
            return
        gate = Gate(world.clock, design.footprint.depth)
        loaded = [Signal() for _ in range(design.tiles(unit))]
        world.clock.start(self._load(unit, gate, loaded, protection))
        for tile, signal in enumerate(loaded):
            yield signal
            seconds = design.tile_numel(unit, tile) * design.update_seconds + design.tile_seconds
            yield from world.update(PageKey(unit, Kind.STATE, tile), seconds)
            self._give_back(unit, tile, protection)
            gate.leave()
        world.release(param, Lane.UPDATE)

    def _update_above(self, unit: int, protection: Protection | None) -> Steps:
        """On the device one tile is in hand, because its kernel is asked for and not waited for."""
        world, design = self._world, self._world.design
        for tile in range(design.tiles(unit)):
            yield from self._lease(unit, tile, protection)
            seconds = design.tile_numel(unit, tile) * design.update_above_seconds
            yield from world.update(PageKey(unit, Kind.STATE, tile), seconds)
            self._give_back(unit, tile, protection)

    def _lease(self, unit: int, tile: int, protection: Protection | None) -> Steps:
        state = [PageKey(unit, Kind.STATE, tile)]
        yield from self._world.lease([PageKey(unit, Kind.GRAD, tile)], Intent.READ, Lane.UPDATE)
        if protection is not None:
            yield from protect(protection, state)
        yield from self._world.lease(state, Intent.WRITE, Lane.UPDATE)

    def _give_back(self, unit: int, tile: int, protection: Protection | None) -> None:
        grad, state = PageKey(unit, Kind.GRAD, tile), PageKey(unit, Kind.STATE, tile)
        self._world.release([grad], Lane.UPDATE)
        self._world.release([state], Lane.UPDATE)
        if protection is not None:
            self._world.post(lambda: protection.discard([grad]))
        else:
            self._world.discard(grad)

    def _load(self, unit: int, gate: Gate, loaded: list[Signal], protection: Protection | None) -> Steps:
        world = self._world
        for tile, signal in enumerate(loaded):
            yield gate.enter()
            yield from self._lease(unit, tile, protection)
            world.clock.fire(signal)


class ComputeActor:
    """Forward, backward and step, over and over; of several ranks see `exchanges.RankComputeActor`."""

    def __init__(self, world: World, update: UpdateActor) -> None:
        self._world = world
        self._update = update
        self._backward: int | None = None  # the unit that backward holds
        self._asked: Asked | None = None  # room for the gradients that come next
        self._received: set[int] = set()
        self._written: set[PageKey] = set()  # gradient tiles
        self._started: set[int] = set()
        self._lagging: dict[int, None] = {}
        self._limit = world.design.lag()
        self.phases: dict[str, float] = {}
        self.batch_ended: Callable[[], None] = lambda: None

    def step(self) -> Steps:
        """One whole step."""
        design, world = self._world.design, self._world
        self._received.clear()
        self._written.clear()
        self._started.clear()
        for batch in range(design.workload.batches):
            last = batch == design.workload.batches - 1
            for position, access in enumerate(design.workload.order):
                began = world.clock.now
                yield from self._access(position, access, last=last)
                self._note("forward" if access.phase is Phase.FORWARD else "backward", began)
            yield from self._batch_ended()
            self.batch_ended()
        began = world.clock.now
        yield from self._end()
        self._note("step", began)

    def _next(self, position: int) -> Access | None:
        """What comes after an access of the batch."""
        order = self._world.design.workload.order
        return order[position + 1] if position + 1 < len(order) else None

    def _access(self, position: int, access: Access, *, last: bool) -> Steps:
        world, unit = self._world, access.unit
        if access.phase is Phase.GRADIENT:
            yield from self._gradient(position, unit, last=last)
            return
        if access.phase is Phase.BACKWARD:
            self._release_backward()
        yield from self._need(unit)
        yield from self._take(unit)
        yield from self._compute(world.design.lease_seconds)
        yield from self._prepare(position, last=last)
        if access.phase is Phase.FORWARD:
            yield from self._compute(world.design.times[unit].forward)
            self._let_go(unit)
            return
        self._backward = unit
        gradient = self._next(position) == Access(unit, Phase.GRADIENT)
        yield from self._compute(self._share(unit, _BEFORE_GRADIENT if gradient else 1.0))

    def _need(self, unit: int) -> Steps:
        """Wait until the unit has the values it is used with."""
        yield from self._update.wait(unit)

    def _take(self, unit: int) -> Steps:
        """Have the unit's parameters, until `_let_go`."""
        yield from self._world.lease([PageKey(unit, Kind.PARAM)], Intent.READ, Lane.COMPUTE)

    def _let_go(self, unit: int) -> None:
        self._world.release([PageKey(unit, Kind.PARAM)], Lane.COMPUTE)

    def _prepare(self, position: int, *, last: bool) -> Iterator[Signal]:  # noqa: ARG002 - of several ranks
        """Ask for what comes next: as `zero3.reduce.GradientStore.expect`, room for the gradients of this unit."""
        coming, design = self._next(position), self._world.design
        unit = design.workload.order[position].unit
        if coming == Access(unit, Phase.GRADIENT) and design.hold_tiles and design.tiles(unit):
            self._asked = self._ask(self._tiles(unit))
        return iter(())

    def _batch_ended(self) -> Iterator[Signal]:
        """Backward is through."""
        self._release_backward()
        return iter(())

    def _gradient(self, position: int, unit: int, *, last: bool) -> Steps:  # noqa: ARG002 - of several ranks
        world, design = self._world, self._world.design
        self._received.add(unit)
        yield from self._need(unit)
        cost, after = self._gradient_seconds(unit)
        tiles = self._tiles(unit)
        leased = [tiles] if design.hold_tiles else [[tiles[tile]] for tile in design.arriving(unit)]
        for keys in leased if tiles else ():
            asked, self._asked = self._asked or self._ask(keys), None
            yield from world.wait(asked)
            self._written.update(keys)
            yield from self._compute(cost / len(leased) + design.lease_seconds)
            world.release(keys, Lane.COMPUTE)
        if last and design.update == "backward" and tiles and unit not in design.patient:
            if self._backward == unit:
                self._release_backward()
            yield from self._request_early(unit)
        yield from self._compute(after)

    def _gradient_seconds(self, unit: int) -> tuple[float, float]:
        """Of backward while the unit's gradients arrive and are moved, and after that."""
        whole = self._share(unit, 1) if self._backward == unit else 0.0
        moving = self._world.design.times[unit].gradient
        return whole * (1 - _BEFORE_GRADIENT - _AFTER_GRADIENT) + moving, whole * _AFTER_GRADIENT

    def _tiles(self, unit: int) -> list[PageKey]:
        return [PageKey(unit, Kind.GRAD, tile) for tile in range(self._world.design.tiles(unit))]

    def _ask(self, keys: list[PageKey]) -> Asked:
        """For gradient tiles, all of which were written in this step, or none."""
        return self._world.ask(keys, Intent.WRITE if keys[0] in self._written else Intent.FRESH, Lane.COMPUTE)

    def _request_early(self, unit: int) -> Steps:
        """As `runtime.queues.BackwardThrottle`: hold backward up while updates lag by more than memory holds."""
        design = self._world.design
        self._started.add(unit)
        self._update.request(unit, undone=design.undone)
        self._lagging[unit] = None
        self._lagging = {lagging: None for lagging in self._lagging if self._update.pending(lagging)}
        while sum(design.lag_nbytes(lagging) for lagging in self._lagging) > self._limit:
            oldest = next(iter(self._lagging))
            yield from self._update.wait(oldest)
            del self._lagging[oldest]

    def _end(self) -> Steps:
        """`optimizer.step()`: what is left is updated, in the order of forward."""
        world, design = self._world, self._world.design
        yield from self._compute(design.step_seconds)
        self._update.confirm()
        left = [unit for unit in sorted(self._received) if unit not in self._started and design.tiles(unit)]
        for unit in left:
            self._update.request(unit)
        if design.update == "step":
            yield from self._update.wait_all()
        used = [access.unit for access in design.workload.order if access.phase is Phase.FORWARD]
        for unit in reversed(dict.fromkeys(used)):
            if self._update.pending(unit):
                self._update.hurry(unit)
        world.begin_step()

    def _share(self, unit: int, share: float) -> float:
        return share * self._world.design.times[unit].backward

    def _compute(self, seconds: float) -> Steps:
        yield from self._world.compute(seconds)

    def _release_backward(self) -> None:
        if self._backward is not None:
            self._let_go(self._backward)
            self._backward = None

    def _note(self, phase: str, began: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + self._world.clock.now - began
