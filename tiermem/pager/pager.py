"""The pager: the doors through which the rest of the house leases pages.

Owns the core with its loop, and the worker that runs update kernels. Does not know what the bytes mean. Guarantees that
every wait ends: with the lease, with the error of the page, with a CapacityError when everything stands still, with a
SwapTimeoutError when a device is silent, or with the error of closing; and that after `close` no thread of it is left.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

from tiermem.errors import again
from tiermem.future import Future
from tiermem.memory.tiers import Tier
from tiermem.pager.ahead import Appetite
from tiermem.pager.core import Core
from tiermem.pager.edges import Chain
from tiermem.pager.lease import Lease, PendingLease
from tiermem.pager.loop import closed
from tiermem.pager.page import Intent, Kind, Lane, PageKey
from tiermem.pager.protection import Copies, Protection
from tiermem.pager.saving import save
from tiermem.pager.schedule import Schedule, Step
from tiermem.pager.waits import Waits
from tiermem.pager.worker import Worker
from tiermem.stats import Counters
from tiermem.timeline import UPDATE_LANE, Timeline

P = ParamSpec("P")
T = TypeVar("T")


class Pager:
    """Moves pages among the tiers of a chain and leases them out."""

    def __init__(self, chain: Chain, appetite: dict[Tier, Appetite], *, counters: Counters, timeline: Timeline) -> None:
        self.chain = chain
        self._timeline = timeline
        self.waits = Waits(counters, timeline)
        self._core = Core(chain, appetite, counters=counters, timeline=timeline)
        self._loop = self._core.loop
        self._worker = Worker("tiermem-update", self._loop.report)
        core, post = self._core, self._loop.post
        # An open protection of no page yet. Any thread.
        self.protection: Callable[[Copies], Protection] = lambda copies: Protection(
            core.residency, core.service, copies, post, core.next_event
        )

    # Doors for other threads

    def add_page(self, key: PageKey, nbytes: int, *, saved: bool = False, replace: bool = False) -> bool:
        """Make a new page of `nbytes` bytes known. Waits for the loop.

        `saved`: an earlier run has written it, and its chain knows where it lies in SWAP. `replace`: one of that
        name is removed first, contents, error and extent; False, and nothing is done, while it is leased or moves.

        Raises:
            CapacityError: a tier could not even hold this page alone.
            InvariantError: the name is taken, or there are no bytes.
        """
        residency = self._core.residency

        def add() -> bool:
            before = residency.pages.get(key) if replace else None
            if before is not None and not residency.remove(before):
                return False
            residency.add(key, nbytes, saved=saved)
            return True

        return self._loop.call(add)

    def start_lease(self, keys: Sequence[PageKey], intent: Intent, *, lane: Lane = Lane.COMPUTE) -> PendingLease:
        """Ask for a lease on pages; computation leases on the top tier, everybody else in HOST.

        The answer, errors included, is given by `PendingLease.wait`; whoever will not wait for it says `give_up`.
        """
        pending = PendingLease(keys, self.waits)
        tier = self.chain.top if lane is Lane.COMPUTE else Tier.HOST
        try:
            if not self._loop.post(lambda: self._core.submit(keys, intent, lane, pending.settle, pending, tier=tier)):
                pending.settle(None, closed())
        except BaseException:  # an interrupt: it may have been asked for, and nobody will know of it
            pending.give_up()
            raise
        return pending

    def lease(self, keys: Sequence[PageKey], intent: Intent, *, lane: Lane = Lane.COMPUTE) -> Lease:
        """Wait for a lease on pages; errors as `PendingLease.wait`."""
        pending = self.start_lease(keys, intent, lane=lane)
        try:
            return pending.wait()
        except BaseException:  # also an interrupt before the wait has begun: whoever keeps the error keeps what is here
            pending.give_up()
            raise

    def start_discard(self, keys: Sequence[PageKey]) -> None:
        """Forget the contents of pages, at once or as soon as nobody holds or moves them."""
        self._loop.post(lambda: self._core.discard(keys))

    def is_written(self, key: PageKey) -> bool:
        """Whether the page has contents. Waits for the loop unless called on it."""
        return self._loop.call(lambda: self._core.is_written(key))

    def set_schedule(self, schedule: Schedule | None, *, look_ahead: int | None = None) -> None:
        """Plan by this schedule from now on; None: without one. Waits for the loop, which goes on meanwhile.

        `look_ahead`: bytes fetched ahead into HOST from now on; None: as many as before.
        """
        ahead = self._core.service.ahead
        plan = None if schedule is None else ahead.make_plan(schedule, self._loop.call(ahead.rooms), look_ahead)
        self._loop.call(lambda: ahead.follow(schedule, plan, look_ahead))

    def evaluate(self, schedule: Schedule | Step) -> None:
        """Go by the schedule of an evaluation until the step begins or goes on, by the one that was set.

        Until then, too, nothing is written early where the step rests. Does not wait.
        """
        self._loop.post(lambda: self._core.service.ahead.evaluate(schedule))

    def begin_step(self) -> None:
        """The computation is at the beginning of a step again. Does not wait."""
        self._loop.post(self._core.service.begin_step)

    def start_save(self, kinds: Collection[Kind], then: Callable[[], T]) -> Future[T]:
        """Write back every page of these kinds that SWAP does not hold yet; return what `then()` gives.

        `then` runs on the loop, at an instant when SWAP holds all of them; it must be quick. Readers go on. Waits for
        pages leased for writing until they are released. The future raises the error of a page that has failed.
        """
        core = self._core
        return self.start_task(save(core.residency, core.service, frozenset(kinds), then, core.next_event))

    def start_task(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; the future carries its result or its error."""
        return self._loop.start_task(coroutine)

    def wait_for(self, future: Future[T]) -> T:
        """Wait for a task's future on behalf of the computation; the time counts as a stall."""
        if future.done():
            return future.result()
        who, started, awaited = object(), time.perf_counter(), weakref.ref(future)
        try:
            self._loop.post(lambda: self._core.thread_waits(who, awaited))
            return future.result()
        finally:
            self._loop.post(lambda: self._core.thread_waits(who, None))  # first: an interrupt may come here, too
            self.waits.note(started, time.perf_counter())
            del future  # it keeps the error that it raises, and that this frame: a reference cycle

    def check_invariants(self) -> None:
        """Raise InvariantError if the residency is not consistent. Waits for the loop."""
        self._loop.call(self._core.residency.check_invariants)

    def residency(self) -> dict[PageKey, tuple[frozenset[Tier], bool]]:
        """For each page the tiers with a valid copy, and whether it is leased: a picture of this moment."""
        pages = self._core.residency.pages
        return self._loop.call(lambda: {key: (frozenset(page.valid), page.is_leased) for key, page in pages.items()})

    def close(self) -> None:
        """Fail what waits, wait for moves and kernels to end, stop the loop. May be called twice."""
        if self._loop.is_foreign:
            return
        self._loop.shut()
        try:
            self._loop.finish(self._core.close)
        finally:
            self._worker.close()

    # Doors for coroutines on the loop

    async def acquire(self, keys: Sequence[PageKey], intent: Intent) -> Lease:
        """The update's lease, awaited on the loop; errors as `PendingLease.wait`.

        Cancelling the wait leaves nothing held. The pages are those of one unit, leased where the chain says
        (`Chain.worked_on`).
        """
        answer: list[Lease | BaseException] = []
        waiter: asyncio.Future[None] | None = None
        given_up = False

        def answered(lease: Lease | None, error: BaseException | None) -> None:
            if given_up and lease is not None:
                lease.return_unused()
            else:
                answer.append(lease or error or closed())
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

        tier = self.chain.worked_on(Lane.UPDATE, keys[0].unit)
        self._core.submit(keys, intent, Lane.UPDATE, answered, None, tier=tier)
        self._core.serve_at_once()
        if not answer:
            waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            except asyncio.CancelledError:
                given_up = True
                for lease in answer:
                    if isinstance(lease, Lease):
                        lease.return_unused()
                raise
        found = answer.pop()
        if isinstance(found, Lease):
            return found
        try:
            raise again(found) from found
        finally:
            del found  # it keeps this frame: a reference cycle

    def set_agenda(self, groups: Sequence[Sequence[PageKey]]) -> None:
        """Say what the update does next, unit by unit, so that it is read ahead and kept. On the loop only."""
        self._core.announce(lambda forecast: forecast.set_agenda(groups))

    def extend_agenda(self, group: Sequence[PageKey]) -> None:
        """Say that the update will do one more unit. Any thread; does not wait."""
        self._loop.post(lambda: self._core.announce(lambda forecast: forecast.extend_agenda(group)))

    async def run_worker(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a kernel on the update worker. Cancelling waits for its end: it writes into leased frames."""
        self._core.kernel_runs(1)
        try:
            return await self._worker.run(lambda: _timed(self._timeline, function, *args, **kwargs))
        finally:
            self._core.kernel_runs(-1)


def _timed(timeline: Timeline, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a kernel and note how long it took; on the worker."""
    started = time.perf_counter()
    try:
        return function(*args, **kwargs)
    finally:
        timeline.record(getattr(function, "__name__", "kernel"), UPDATE_LANE, started, time.perf_counter())
