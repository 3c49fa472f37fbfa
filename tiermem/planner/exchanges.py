"""What several ranks do together in a step, seen from one of them.

Owns the course of gathering units and of adding gradients up as `zero3.conductor`, `zero3.sources` and `zero3.exchange`
carry it out: what is leased for it, in which order, and who waits for whom. Does not decide what is fetched or evicted,
and simulates no other rank: all do the same. Guarantees that transient pages are given back, and that what is done
together is done one thing after the other.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from tiermem.pager.page import Intent, Kind, Lane, PageKey
from tiermem.planner.actors import ComputeActor, Steps, UpdateActor
from tiermem.planner.clock import Signal
from tiermem.planner.world import NANOSECONDS, Asked, World
from tiermem.zero3.order import Phase


class SimulatedConductor:
    """As `zero3.conductor.Conductor`: one operation after the other, beside the computation."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._queue: deque[tuple[Steps, Signal]] = deque()
        self._running = False

    def start(self, operation: Steps) -> Signal:
        """Queue an operation; what fires when it has ended."""
        ended = Signal()
        self._queue.append((operation, ended))
        if not self._running:
            self._running = True
            self._world.clock.start(self._run())
        return ended

    def exchange(self, seconds: float) -> Steps:
        """Have bytes go from rank to rank for so long, in an operation."""
        if seconds > 0:
            arrived, clock = Signal(), self._world.clock
            self._world.link.start(round(seconds * NANOSECONDS), priority=0, done=lambda: clock.fire(arrived))
            yield arrived

    def _run(self) -> Steps:
        while self._queue:
            operation, ended = self._queue.popleft()
            yield from operation
            self._world.clock.fire(ended)
        self._running = False


class SimulatedUnits:
    """As `zero3.sources.RankUnits`: gathered units, one of them ahead where there is room for that."""

    def __init__(self, world: World, conductor: SimulatedConductor, update: UpdateActor) -> None:
        self._world = world
        self._conductor = conductor
        self._update = update
        self._ahead: tuple[int, Signal] | None = None

    @property
    def ahead(self) -> int | None:
        """The unit that is gathered ahead."""
        return None if self._ahead is None else self._ahead[0]

    def take(self, unit: int) -> Steps:
        """Wait for the unit, gathered."""
        ahead = self._ahead
        if ahead is not None and ahead[0] == unit:
            self._ahead = None
            yield from self._world.wait_for(ahead[1], "ranks")
        else:
            yield from self.give_up()
            yield from self._world.wait_for(self._conductor.start(self._gather(unit)), "ranks")

    def start(self, unit: int) -> Steps:
        """Begin to gather the unit that comes next."""
        if self._world.design.beside and self.ahead != unit:
            yield from self.give_up()
            self._ahead = unit, self._conductor.start(self._gather(unit))

    def give_up(self) -> Steps:
        """Wait for what is gathered ahead, and let go of it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            yield from self._world.wait_for(ahead[1], "ranks")
            self.release(ahead[0])

    def release(self, unit: int) -> None:
        """Give a gathered unit back."""
        gathered = [self._world.design.shard(unit).gathered_key]
        self._world.discard(gathered[0])
        self._world.release(gathered, Lane.COMPUTE)

    def _gather(self, unit: int) -> Steps:
        world, shard = self._world, self._world.design.shard(unit)
        yield from self._update.running(unit)
        yield from world.lease([shard.layout.key], Intent.READ, Lane.COMPUTE, aside=True)
        yield from world.lease([shard.gathered_key], Intent.FRESH, Lane.COMPUTE, aside=True)
        yield from self._conductor.exchange(world.design.times[unit].gather)
        world.release([shard.layout.key], Lane.COMPUTE)


class SimulatedBuckets:
    """As `zero3.exchange.RankGradients`: a bucket that is filled, and one that is added up.

    `then(unit)`: told, where the computation waits next, that all ranks have said they have all of a unit's gradients.
    """

    def __init__(self, world: World, conductor: SimulatedConductor, then: Callable[[int], Steps]) -> None:
        self._world = world
        self._conductor = conductor
        self._then = then
        self._open: int | None = None
        self._asked: tuple[int, Asked] | None = None
        self._under_way: tuple[int, Signal, bool] | None = None
        self._written: set[PageKey] = set()

    def begin_step(self) -> None:
        """What is written belongs to another step."""
        self._written.clear()

    def expect(self, unit: int) -> None:
        """Have room made for the bucket of the unit whose gradients come next."""
        if self._open is not None or self._asked is not None or not self._world.design.tiles(unit):
            return
        design, under_way = self._world.design, self._under_way
        two = design.beside and design.device is None
        if under_way is None or under_way[1].fired or (two and under_way[0] != unit):
            self._asked = unit, self._ask(unit)

    def fill(self, unit: int) -> Steps:
        """Have the unit's bucket to write into."""
        if self._open is not None and self._open != unit:
            yield from self.release()
        if self._open is None:
            yield from self.wait()
            asked, self._asked = self._asked, None
            if asked is not None and asked[0] != unit:
                yield from self._give_up(asked)
                asked = None
            yield from self._world.wait(self._ask(unit) if asked is None else asked[1])
            self._open = unit

    def release(self, *, complete: bool = False) -> Steps:
        """Begin to add up what was filled last; `complete`: it has all its gradients."""
        unit, self._open = self._open, None
        if unit is not None:
            self._under_way = unit, self._conductor.start(self._add_up(unit)), complete
            if not self._world.design.beside:
                yield from self.wait()

    def batch_ended(self) -> Steps:
        """No more gradients come for now."""
        yield from self.release()
        asked, self._asked = self._asked, None
        if asked is not None:
            yield from self._give_up(asked)

    def catch_up(self, unit: int) -> Steps:
        """The unit is used next."""
        if self._under_way is not None and self._under_way[0] == unit and self._under_way[2]:
            yield from self.wait()

    def wait(self) -> Steps:
        """Until nothing is being added up."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            unit, ended, complete = under_way
            yield from self._world.wait_for(ended, "ranks")
            if complete:
                yield from self._then(unit)

    def _ask(self, unit: int) -> Asked:
        return self._world.ask([self._world.design.shard(unit).bucket_key], Intent.FRESH, Lane.COMPUTE)

    def _give_up(self, asked: tuple[int, Asked]) -> Steps:
        bucket = [self._world.design.shard(asked[0]).bucket_key]
        yield from self._world.wait(asked[1])
        self._drop(bucket)

    def _add_up(self, unit: int) -> Steps:
        world, shard = self._world, self._world.design.shard(unit)
        received = [shard.received_key]
        yield from world.lease(received, Intent.FRESH, Lane.COMPUTE, aside=True)
        for tile in range(shard.exchanges):
            yield from self._conductor.exchange(world.design.times[unit].exchange / shard.exchanges)
            key = PageKey(unit, Kind.GRAD, tile)
            intent = Intent.WRITE if key in self._written else Intent.FRESH
            yield from world.lease([key], intent, Lane.COMPUTE, aside=True)
            self._written.add(key)
            world.release([key], Lane.COMPUTE)
        self._drop(received)
        self._drop([shard.bucket_key])

    def _drop(self, keys: list[PageKey]) -> None:
        self._world.discard(keys[0])
        self._world.release(keys, Lane.COMPUTE)


class RankComputeActor(ComputeActor):
    """The computation of one of several ranks, from gathered units and into buckets."""

    def __init__(self, world: World, update: UpdateActor) -> None:
        super().__init__(world, update)
        conductor = SimulatedConductor(world)
        self._units = SimulatedUnits(world, conductor, update)
        self._buckets = SimulatedBuckets(world, conductor, self._complete)

    def _need(self, unit: int) -> Steps:
        yield from self._buckets.catch_up(unit)
        yield from super()._need(unit)

    def _take(self, unit: int) -> Steps:
        yield from self._units.take(unit)

    def _let_go(self, unit: int) -> None:
        self._units.release(unit)

    def _prepare(self, position: int, *, last: bool) -> Steps:
        """As `zero3.scheduler.GatherScheduler`: the next bucket has room made for it, the next unit is gathered."""
        self._expect(position)
        order = self._world.design.workload.order
        rest = (order[index] for index in range(position + 1, len(order)))
        coming = itertools.chain(rest, () if last else order)
        following = next((access.unit for access in coming if access.phase is not Phase.GRADIENT), None)
        if following is None:
            return
        yield from self._buckets.catch_up(following)
        if following in self._started:
            yield from self._update.wait(following)
        if following != order[position].unit:
            yield from self._units.start(following)

    def _expect(self, position: int) -> None:
        coming = self._next(position)
        if coming is not None and coming.phase is Phase.GRADIENT:
            self._buckets.expect(coming.unit)

    def _gradient(self, position: int, unit: int, *, last: bool) -> Steps:
        design = self._world.design
        self._received.add(unit)
        yield from self._need(unit)
        cost, after = self._gradient_seconds(unit)
        if design.tiles(unit):
            yield from self._buckets.fill(unit)
            cost += design.lease_seconds
        yield from self._compute(cost)
        if last:
            early = design.update == "backward"
            if early and self._backward == unit:
                self._release_backward()
            yield from self._buckets.release(complete=early)
        self._expect(position)
        yield from self._compute(after)

    def _complete(self, unit: int) -> Steps:
        if unit not in self._world.design.patient and unit not in (self._units.ahead, self._backward):
            yield from self._request_early(unit)

    def _batch_ended(self) -> Steps:
        self._release_backward()
        yield from self._buckets.batch_ended()

    def _end(self) -> Steps:
        yield from self._buckets.wait()
        yield from self._units.give_up()
        self._buckets.begin_step()
        yield from super()._end()


def compute_actor(world: World, update: UpdateActor) -> ComputeActor:
    """The computation of a rank, alone or of several."""
    return (RankComputeActor if world.design.several else ComputeActor)(world, update)
