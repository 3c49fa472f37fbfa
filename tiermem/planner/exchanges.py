"""What several ranks do together in a step, seen from one of them.

Owns the course of adding gradients up as `zero3.exchange` carries it out, and of the computation of one of several
ranks: what is leased for it, in which order, and who waits for whom. Does not decide what is fetched or evicted,
and simulates no other rank: all do the same. Guarantees that transient pages are given back, and that what is done
together is done one thing after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from tiermem.pager.page import Intent, Kind, Lane, PageKey
from tiermem.planner.actors import ComputeActor, Steps, UpdateActor
from tiermem.planner.clock import Signal
from tiermem.planner.gathering import SimulatedConductor, SimulatedUnits, SimulatedWholeUnits
from tiermem.planner.world import Asked, World
from tiermem.zero3.order import Phase


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
        self._kept: set[int] = set()  # of units that wait for the step
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
        if unit is not None and self._world.design.settings.division.late:
            self._kept.add(unit)
            self._world.release(self._bucket(unit), Lane.COMPUTE)
        elif unit is not None:
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

    def line_up(self) -> Steps:
        """Add up what has waited for that."""
        yield from self.wait()
        for unit in sorted(self._kept):
            yield from self._world.wait(self._ask(unit))
            self._kept.remove(unit)
            self._under_way = unit, self._conductor.start(self._add_up(unit)), False
            yield from self.wait()

    def _bucket(self, unit: int) -> list[PageKey]:
        return [self._world.design.shard(unit).bucket_key]

    def _ask(self, unit: int) -> Asked:
        return self._world.ask(self._bucket(unit), Intent.WRITE if unit in self._kept else Intent.FRESH, Lane.COMPUTE)

    def _give_up(self, asked: tuple[int, Asked]) -> Steps:
        yield from self._world.wait(asked[1])
        if asked[0] in self._kept:
            self._world.release(self._bucket(asked[0]), Lane.COMPUTE)
        else:
            self._drop(self._bucket(asked[0]))

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
        self._drop(self._bucket(unit))

    def _drop(self, keys: list[PageKey]) -> None:
        self._world.discard(keys[0])
        self._world.release(keys, Lane.COMPUTE)


class RankComputeActor(ComputeActor):
    """The computation of one of several ranks, from gathered units and into buckets."""

    def __init__(self, world: World, update: UpdateActor) -> None:
        super().__init__(world, update)
        conductor = SimulatedConductor(world)
        whole = world.design.settings.division.whole
        self._units = (SimulatedWholeUnits if whole else SimulatedUnits)(world, conductor, update)
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
            self._units.changed(unit)
            yield from self._request_early(unit)

    def _batch_ended(self) -> Steps:
        self._release_backward()
        yield from self._buckets.batch_ended()

    def _end(self) -> Steps:
        yield from self._buckets.wait()
        yield from self._units.give_up()
        yield from self._buckets.line_up()
        self._buckets.begin_step()
        for unit in self._received.difference(self._started):
            self._units.changed(unit)
        yield from super()._end()


def compute_actor(world: World, update: UpdateActor) -> ComputeActor:
    """The computation of a rank, alone or of several."""
    return (RankComputeActor if world.design.several else ComputeActor)(world, update)
