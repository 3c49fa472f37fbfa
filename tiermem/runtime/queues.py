"""How far the update may lag behind the computation, for budgets that do not hold everything at once.

Owns the answers: hold backward up while updates lag too far, carry updates out only when somebody waits, hold them
back while a commit is made. Does not know pages: it is given bytes per unit. Guarantees that no update is lost or done
twice, and that the errors of the updater reach whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tiermem.future import Future
from tiermem.optim.coordinator import UpdateCoordinator
from tiermem.optim.service import UpdateQueue
from tiermem.optim.updates import UnitUpdate
from tiermem.pager.protection import Protection


class BackwardThrottle:
    """Between the gather scheduler and the coordinator: holds backward up while updates lag by more than `limit` bytes.

    A unit whose update lags keeps its gradient waiting and will want its parameters again. Once that no longer fits,
    running ahead would only have both written to disk and read back: more bytes for the same step.
    """

    def __init__(
        self,
        coordinator: UpdateCoordinator,
        queue: UpdateQueue,
        nbytes: Mapping[int, int],
        *,
        limit: int,
        agreed: bool,
    ) -> None:
        """`nbytes`: what each unit keeps in memory from its gradient to the end of its update.

        `agreed`: whether ranks update the same units early; else each does as it can.
        """
        self.unit_needed = coordinator.unit_needed
        self.known_since = coordinator.late.known_since
        self._agreed = agreed
        self._coordinator = coordinator
        self._queue = queue
        self._nbytes = nbytes
        self._limit = limit
        self._lagging: dict[int, None] = {}
        self._lagging_nbytes = 0

    def may_update(self, unit: int) -> bool:
        """Whether this rank has nothing against an update of the unit; asked only where all have to be of one mind."""
        return not self._agreed or self._coordinator.may_start_early(unit)

    def gradients_complete(self, unit: int) -> bool:
        """Have the unit updated, and wait for earlier updates if they lag too far; whether its update has begun."""
        begun = self._coordinator.gradients_complete(unit)
        if unit not in self._lagging:
            self._lagging[unit] = None
            self._lagging_nbytes += self._nbytes[unit]
        if self._lagging_nbytes > self._limit:
            for lagging in [lagging for lagging in self._lagging if not self._queue.pending(lagging)]:
                self._caught_up(lagging)
        while self._lagging_nbytes > self._limit:
            oldest = next(iter(self._lagging))
            self._queue.wait(oldest)
            self._caught_up(oldest)
        return begun

    def _caught_up(self, unit: int) -> None:
        del self._lagging[unit]
        self._lagging_nbytes -= self._nbytes[unit]


class LazyQueue:
    """Carries an update out only while somebody waits for its unit: nothing runs beside the computation."""

    def __init__(self, queue: UpdateQueue, let_go: Callable[[], None]) -> None:
        """`let_go()` gives back what the computation leases without need: an update finds no room beside it."""
        self._queue = queue
        self._let_go = let_go
        self._kept: dict[int, list[UnitUpdate]] = {}
        self.prepare = queue.prepare

    def start(self, update: UnitUpdate) -> None:
        """Keep the update until somebody waits for its unit. Said again, after an interrupt, it is kept once."""
        kept = self._kept.get(update.unit, [])
        if all(update is not each for each in kept):
            self._kept[update.unit] = [*kept, update]

    def wait(self, unit: int) -> None:
        """Carry out the unit's updates. Raises the error of one that failed, or that could not begin: it is kept."""
        kept = self._kept.get(unit, [])  # not taken out before they are queued: an interrupt may come in between
        while kept:
            try:
                self._let_go()
                self._queue.start(kept[0])
            except BaseException:  # the commit that it waits for has failed, or somebody interrupts the waiting
                self._kept = {unit: kept, **self._kept}
                raise
            del kept[0]
        self._kept.pop(unit, None)
        self._queue.wait(unit)

    def wait_all(self) -> None:
        """Carry out all updates, one unit after the other. Raises the error of one that failed."""
        for unit in list(self._kept):
            self.wait(unit)
        self._queue.wait_all()

    def pending(self, unit: int) -> bool:
        """Whether an update of the unit is kept, or has failed."""
        return unit in self._kept or self._queue.pending(unit)

    def hurry(self, unit: int) -> None:
        """Nothing to do: whoever waits for a unit carries it out."""

    def withdraw(self, protection: Protection) -> list[Future[None]]:
        """Forget the updates under this protection that were kept; futures of those that are under way."""
        for unit, kept in list(self._kept.items()):
            left = [update for update in kept if update.protection is not protection]
            if left:
                self._kept[unit] = left
            else:
                del self._kept[unit]
        return self._queue.withdraw(protection)

    def raise_failed(self) -> None:
        """Raise the error of an update that failed, if one has."""
        self._queue.raise_failed()


class GatedQueue:
    """Lets no update begin while a commit of the step before is being made."""

    def __init__(
        self,
        queue: UpdateQueue,
        wait_open: Callable[[], None],
        changed: Callable[[int], None],
        *,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        """`changed(unit)` is told of every unit whose update is queued. `prepare()`: what else is done only once."""
        self._wait_open = wait_open
        self._changed = changed
        self._also_prepare = prepare
        self._queue = queue
        self.wait = queue.wait
        self.wait_all = queue.wait_all
        self.pending = queue.pending
        self.hurry = queue.hurry
        self.raise_failed = queue.raise_failed
        self.withdraw = queue.withdraw

    def prepare(self) -> None:
        """Do what need only be done once, before there is something to update."""
        self._queue.prepare()
        if self._also_prepare is not None:
            self._also_prepare()

    def start(self, update: UnitUpdate) -> None:
        """Queue the update once no commit is under way; waits for that."""
        self._wait_open()
        self._changed(update.unit)
        self._queue.start(update)
