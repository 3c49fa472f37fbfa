"""Where a unit comes from, of several ranks, seen from one of them.

Owns the course of gathering a unit, or of completing one that is whole, as `zero3.conductor`, `zero3.sources` and
`zero3.whole` carry it out. Does not know gradients. Guarantees that transient pages are given back, and that what is
done together is done one thing after the other.
"""

from __future__ import annotations

from collections import deque

from tiermem.pager.page import Intent, Lane, PageKey
from tiermem.planner.actors import Steps, UpdateActor
from tiermem.planner.clock import Signal
from tiermem.planner.world import NANOSECONDS, World


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

    def changed(self, unit: int) -> None:
        """The ranks update their parts of this unit, which is gathered for each use anyway."""

    @property
    def ahead(self) -> int | None:
        """The unit that is fetched ahead."""
        return None if self._ahead is None else self._ahead[0]

    def take(self, unit: int) -> Steps:
        """Wait for the unit, and hold it."""
        ahead = self._ahead
        if ahead is not None and ahead[0] == unit:
            self._ahead = None
            yield from self._world.wait_for(ahead[1], "ranks")
        else:
            yield from self.give_up()
            if self._is_due(unit):
                yield from self._world.wait_for(self._conductor.start(self._fetch(unit)), "ranks")

    def start(self, unit: int) -> Steps:
        """Begin to fetch the unit that comes next."""
        if self._world.design.beside and self._is_due(unit) and self.ahead != unit:
            yield from self.give_up()
            self._ahead = unit, self._conductor.start(self._fetch(unit))

    def give_up(self) -> Steps:
        """Wait for what is fetched ahead, and let go of it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            yield from self._world.wait_for(ahead[1], "ranks")
            self._let_go(ahead[0])

    def release(self, unit: int) -> None:
        """Give the unit back."""
        gathered = [self._world.design.shard(unit).gathered_key]
        self._world.discard(gathered[0])
        self._world.release(gathered, Lane.COMPUTE)

    def _is_due(self, _: int) -> bool:
        """Whether the other ranks have what is lacking of it."""
        return True

    def _let_go(self, unit: int) -> None:
        """What was fetched is not wanted."""
        self.release(unit)

    def _fetch(self, unit: int) -> Steps:
        world, shard = self._world, self._world.design.shard(unit)
        yield from self._update.running(unit)
        yield from world.lease([shard.layout.key], Intent.READ, Lane.COMPUTE, aside=True)
        yield from world.lease([shard.gathered_key], Intent.FRESH, Lane.COMPUTE, aside=True)
        yield from self._conductor.exchange(world.design.times[unit].gather)
        world.release([shard.layout.key], Lane.COMPUTE)


class SimulatedWholeUnits(SimulatedUnits):
    """As `zero3.whole.WholeUnits`: pages of one's own, completed from the other ranks once after an update."""

    def __init__(self, world: World, conductor: SimulatedConductor, update: UpdateActor) -> None:
        super().__init__(world, conductor, update)
        self._stale: set[int] = set()

    def changed(self, unit: int) -> None:
        """The ranks update their parts of this unit."""
        self._stale.add(unit)

    def take(self, unit: int) -> Steps:
        """Wait for the unit to be complete, and hold it."""
        yield from super().take(unit)
        yield from self._world.lease(self._page(unit), Intent.READ, Lane.COMPUTE)

    def release(self, unit: int) -> None:
        """Give the unit back."""
        self._world.release(self._page(unit), Lane.COMPUTE)

    def _page(self, unit: int) -> list[PageKey]:
        return [self._world.design.shard(unit).layout.key]

    def _is_due(self, unit: int) -> bool:
        return unit in self._stale

    def _let_go(self, unit: int) -> None:
        """Nothing to do: it is complete, and held by nobody."""

    def _fetch(self, unit: int) -> Steps:
        self._stale.discard(unit)  # now, and not when its turn comes
        return self._complete(unit)

    def _complete(self, unit: int) -> Steps:
        yield from self._update.running(unit)
        yield from self._world.lease(self._page(unit), Intent.WRITE, Lane.COMPUTE, aside=True)
        yield from self._conductor.exchange(self._world.design.times[unit].gather)
        self._world.release(self._page(unit), Lane.COMPUTE)
