"""The pager: one event loop on a thread of its own, and the doors through which other threads speak with it.

Owns the loop, the thread, the worker that runs update kernels, and with them all residency state (I6). Does not know
what the bytes mean. Guarantees that every wait ends: with the lease, with the error of the page, with a CapacityError
when everything stands still, or with the error of closing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from tiermem.errors import InvariantError, TiermemError
from tiermem.memory.tiers import Tier
from tiermem.pager.edges import Chain
from tiermem.pager.lease import Lease, PendingLease
from tiermem.pager.page import Intent, Lane, Move, Page, PageKey
from tiermem.pager.residency import Residency
from tiermem.pager.schedule import Forecast, Schedule
from tiermem.pager.service import Appetite, LeaseRequest, Service
from tiermem.stats import Counters
from tiermem.timeline import Timeline

P = ParamSpec("P")
T = TypeVar("T")

# Standing still is only believed when nothing has happened for this long: a coroutine that was just granted a lease
# needs a moment to act on it.
_STANDSTILL_SECONDS = 0.25


class Pager:
    """Moves pages among the tiers of a chain and leases them out."""

    def __init__(self, chain: Chain, appetite: dict[Tier, Appetite], *, counters: Counters, timeline: Timeline) -> None:
        self.chain = chain
        self._forecast = Forecast()
        self._residency = Residency(chain, self._forecast, counters, ended=self._move_ended)
        self._service = Service(self._residency, appetite)
        self._counters = counters
        self._timeline = timeline
        self._loop = asyncio.new_event_loop()
        self._worker = ThreadPoolExecutor(1, "tiermem-update")
        self._activity = _Activity()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="tiermem-pager", daemon=True)
        self._thread.start()

    # Doors for other threads

    def add_page(self, key: PageKey, nbytes: int) -> None:
        """Make a new page of `nbytes` bytes known. Waits for the loop.

        Raises:
            CapacityError: a tier could not even hold this page alone.
        """
        self._call(lambda: self._residency.add(key, nbytes) and None)

    def start_lease(self, keys: Sequence[PageKey], intent: Intent, *, lane: Lane = Lane.COMPUTE) -> PendingLease:
        """Ask for a lease on pages; computation leases on the top tier, the update in HOST."""
        future: Future[Lease] = Future()
        self._post(lambda: self._submit(keys, intent, lane, future))
        return PendingLease(future, self._note_stall)

    def lease(self, keys: Sequence[PageKey], intent: Intent, *, lane: Lane = Lane.COMPUTE) -> Lease:
        """Wait for a lease on pages; errors as `PendingLease.wait`."""
        return self.start_lease(keys, intent, lane=lane).wait()

    def start_discard(self, keys: Sequence[PageKey]) -> None:
        """Forget the contents of pages, at once or as soon as nobody holds or moves them."""
        self._post(lambda: self._discard(keys))

    def is_written(self, key: PageKey) -> bool:
        """Whether the page has contents. Waits for the loop unless called on it."""
        return self._call(lambda: self._residency.pages[key].is_written and not self._residency.pages[key].doomed)

    def set_schedule(self, schedule: Schedule | None) -> None:
        """Plan by this schedule from now on; None: without one. Waits for the loop."""
        self._call(lambda: self._reschedule(lambda: self._forecast.set_schedule(schedule)))

    def begin_step(self) -> None:
        """The computation is at the beginning of a step again. Does not wait."""
        self._post(self._forecast.begin_step)

    def flush(self) -> None:
        """Wait until every page has a valid copy in SWAP. Raises the error of a page that cannot be written."""
        self.start_task(self._flush()).result()

    def start_task(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; the future carries its result or its error."""
        if self._closed:
            coroutine.close()
            raise TiermemError("the pager is closed; a closed runtime cannot be used again")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait_for(self, future: Future[T]) -> T:
        """Wait for a task's future on behalf of the computation; the time counts as a stall."""
        if not future.done():
            self._post(self._activity.compute_waits)
            started = time.perf_counter()
            try:
                return future.result()
            finally:
                self._note_stall(started, time.perf_counter())
                self._post(self._activity.compute_goes_on)
        return future.result()

    def check_invariants(self) -> None:
        """Raise InvariantError if the residency is not consistent. Waits for the loop."""
        self._call(self._residency.check_invariants)

    def residency(self) -> dict[PageKey, tuple[frozenset[Tier], bool]]:
        """For each page the tiers with a valid copy, and whether it is leased: a picture of this moment."""
        return self._call(
            lambda: {key: (frozenset(page.valid), page.is_leased) for key, page in self._residency.pages.items()}
        )

    def close(self) -> None:
        """Fail what waits, wait for moves and kernels to end, stop the loop. May be called twice."""
        if self._closed:
            return
        self._call(lambda: self._service.fail_all(TiermemError("the pager was closed while a lease was waited for")))
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
        self._worker.shutdown(wait=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # Doors for coroutines on the loop

    async def acquire(self, keys: Sequence[PageKey], intent: Intent, *, lane: Lane = Lane.UPDATE) -> Lease:
        """A lease, awaited on the loop; errors as `PendingLease.wait`."""
        future: Future[Lease] = Future()
        self._submit(keys, intent, lane, future)
        return await asyncio.wrap_future(future)

    async def run_worker(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a kernel on the update worker."""
        self._activity.kernels += 1
        try:
            return await self._loop.run_in_executor(self._worker, lambda: function(*args, **kwargs))
        finally:
            self._activity.kernels -= 1
            self._touch()

    # On the loop

    def _submit(self, keys: Sequence[PageKey], intent: Intent, lane: Lane, future: Future[Lease]) -> None:
        tier = self.chain.top if lane is Lane.COMPUTE else Tier.HOST
        try:
            pages = [self._residency.pages[key] for key in keys]
        except KeyError as error:
            future.set_exception(InvariantError(f"{error.args[0]}: no such page; this is a bug in tiermem"))
            return

        def finished(error: BaseException | None) -> None:
            if error is not None:
                future.set_exception(error)
                return
            tensors = {page.key: page.frames[tier].tensor[: page.nbytes] for page in pages}
            future.set_result(Lease(pages, tensors, lambda lease, failure: self._post_release(lease, tier, failure)))

        self._service.submit(LeaseRequest(pages, intent, lane, tier, finished))
        self._touch()

    def _post_release(self, lease: Lease, tier: Tier, failure: BaseException | None) -> None:
        def release() -> None:
            for page in lease.pages:
                page.error = page.error or failure
            self._service.release(lease.pages, tier)
            self._touch()

        self._post(release)

    def _discard(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self._residency.discard(self._residency.pages[key])
        self._touch()

    def _reschedule(self, change: Callable[[], None]) -> None:
        change()
        self._residency.reclassify()
        self._touch()

    def _move_ended(self, page: Page, move: Move, error: BaseException | None) -> None:
        """Called on an I/O thread (or, by an inline backend, on the loop)."""
        ended = time.perf_counter()
        self._post(lambda: self._finish_move(page, move, error, ended))

    def _finish_move(self, page: Page, move: Move, error: BaseException | None, ended: float) -> None:
        self._residency.finish_move(page, move, error)
        self._timeline.record(str(page.key), move.edge, move.started, ended, {"bytes": page.nbytes})
        self._touch()

    def _touch(self) -> None:
        """Something happened: pump once for all events of this turn of the loop, and watch for standstill."""
        self._activity.events += 1
        if not self._activity.pump_due:
            self._activity.pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._activity.pump_due = False
        self._service.pump()
        watchers, self._activity.watchers = self._activity.watchers, []
        for watcher in watchers:
            watcher.set_result(None)
        if self._service.waiting and not self._activity.watched:
            self._activity.watched = True
            self._loop.call_later(_STANDSTILL_SECONDS, self._watch, self._activity.events)

    def _watch(self, events: int) -> None:
        """Nothing happened since the watch was set: whoever lacks room will not get it by waiting (I9)."""
        activity = self._activity
        activity.watched = False
        waiting = self._service.waiting
        if not waiting:
            return
        blocked = activity.waiting_threads > 0 or any(request.lane is Lane.COMPUTE for request in waiting)
        if activity.events == events and not self._residency.moves and not activity.kernels and blocked:
            before = len(waiting)
            self._service.pump_out_of_order()
            if len(waiting) == before and not self._residency.moves:
                self._service.fail_standstill()
            self._touch()
            return
        activity.watched = True
        self._loop.call_later(_STANDSTILL_SECONDS, self._watch, activity.events)

    async def _flush(self) -> None:
        self._service.start_flush()
        try:
            self._touch()
            await self._next_event()
            while self._residency.moves or self._service.unwritten():
                await self._next_event()
            for page in self._residency.pages.values():
                if page.error is not None:
                    raise page.error
        finally:
            self._service.end_flush()

    async def _drain(self) -> None:
        while self._residency.moves or self._activity.kernels:
            await self._next_event()

    async def _next_event(self) -> None:
        """Until something has happened and all that could be done about it has been started."""
        pumped = self._loop.create_future()
        self._activity.watchers.append(pumped)
        await pumped

    def _note_stall(self, started: float, ended: float) -> None:
        self._counters.count(stall_seconds=ended - started)
        self._timeline.record("stall", "compute", started, ended)

    def _post(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            if not self._closed:
                raise

    def _call(self, function: Callable[[], T]) -> T:
        if threading.current_thread() is self._thread:
            return function()
        if self._closed:
            raise TiermemError("the pager is closed; a closed runtime cannot be used again")
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed to the thread that waits for the result
                future.set_exception(error)

        self._post(run)
        return future.result()


class _Activity:
    """What is going on besides moves; read to tell waiting from standing still."""

    def __init__(self) -> None:
        self.events = 0
        self.kernels = 0
        self.waiting_threads = 0
        self.pump_due = False
        self.watched = False
        self.watchers: list[asyncio.Future[None]] = []

    def compute_waits(self) -> None:
        """The computation waits for a task."""
        self.waiting_threads += 1

    def compute_goes_on(self) -> None:
        """It does not wait any more."""
        self.waiting_threads -= 1
