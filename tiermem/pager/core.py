"""What the pager does on its loop: takes requests, pumps after every event, notices when everything stands still.

Owns the residency, the service and the knowledge of what else is going on (kernels, threads that wait). Does not know
threads' doors: every method is called on the loop. Guarantees that after an error which should not exist everybody
gets that error, now and later, and only closing works.
"""

from __future__ import annotations

import asyncio
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tiermem.errors import TiermemError
from tiermem.future import Future
from tiermem.memory.arena import Fence, Frame
from tiermem.memory.tiers import Tier
from tiermem.pager.ahead import Appetite
from tiermem.pager.edges import Chain
from tiermem.pager.forecast import Forecast
from tiermem.pager.lease import Lease, LeasesOut, Parting, PendingLease
from tiermem.pager.loop import LoopThread
from tiermem.pager.page import Intent, Lane, Move, Page, PageKey
from tiermem.pager.residency import Residency
from tiermem.pager.service import LeaseRequest, Service
from tiermem.stats import Counters
from tiermem.timeline import Timeline

Answered = Callable[[Lease | None, BaseException | None], None]

# How often to look for a standstill or a silent device. Standing still is only believed when nothing has happened for
# this long: a coroutine that was just granted a lease needs a moment to act on it.
_LOOK_SECONDS = 0.25
# How long tasks may take to act on the error that closing gives them before they are cancelled.
_GRACE_SECONDS = 1.0

_LEVELS = {tier: f"reserved {tier.name}" for tier in Tier}


class Core:
    """The loop's side of the pager."""

    def __init__(self, chain: Chain, appetite: dict[Tier, Appetite], *, counters: Counters, timeline: Timeline) -> None:
        self.residency = Residency(chain, Forecast(), counters, ended=self._move_ended)
        self.loop = LoopThread("tiermem-pager", after=self._pump, failed=self.refuse)
        self.service = Service(self.residency, appetite)
        self._timeline = timeline
        self._out: LeasesOut[tuple[Sequence[Page], Tier, Intent]] = LeasesOut()
        self._kernels = 0
        self._awaited: dict[object, weakref.ref[Future[Any]]] = {}  # by who waits for it: threads
        self._events = 0
        self._watched = False
        self._watchers: list[asyncio.Future[None]] = []
        self._refusal: Exception | None = None

    def submit(
        self,
        keys: Sequence[PageKey],
        intent: Intent,
        lane: Lane,
        answered: Answered,
        waiter: PendingLease | None,
        *,
        tier: Tier,
    ) -> None:
        """Take a request; `answered(lease, error)` is called once, on the loop. `waiter` None: a coroutine asks."""
        try:
            if self._refusal is not None:
                raise self._refusal
            find = self.residency.page
            pages = [find(keys[0])] if len(keys) == 1 else [find(key) for key in dict.fromkeys(keys)]
        except Exception as error:  # noqa: BLE001 - handed to whoever asked
            answered(None, error)
            return

        def finished(error: BaseException | None) -> None:
            if error is not None:
                answered(None, error)
                return
            frames: dict[PageKey, Frame] = {}
            fences: list[Fence] = []
            for page in pages:
                frame = frames[page.key] = page.frames[tier]
                fences += frame.fences
            release = functools.partial(self._post_release, tier)
            lease = Lease(pages, frames, release, fences, self.residency.chain.arenas[tier].fence)
            self._out.add(lease, (pages, tier, intent))
            answered(lease, None)

        self.service.submit(LeaseRequest(pages, intent, lane, tier, finished, waiter))

    def serve_at_once(self) -> None:
        """Serve a request just submitted, if nobody else waits and it takes nothing but what is there; look later."""
        if self._refusal is None:
            self.service.serve_at_once()
        self.loop.wake()

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Forget the contents of pages."""
        for key in keys:
            self.residency.discard(self.residency.page(key))

    def is_written(self, key: PageKey) -> bool:
        """Whether the page has contents that are not about to be forgotten."""
        page = self.residency.page(key)
        return page.is_written and not page.doomed

    def announce(self, change: Callable[[Forecast], set[PageKey]]) -> None:
        """The update has said what it does next: `change` tells the forecast and returns the pages concerned."""
        pages = self.residency.pages
        for key in change(self.residency.forecast):
            if key in pages and pages[key].frames:
                self.residency.census.note(pages[key])
        self.loop.wake()

    def kernel_runs(self, difference: int) -> None:
        """One kernel more (1) or less (-1) runs on the worker: not standing still."""
        self._kernels += difference
        if difference < 0:  # somebody may wait for its end, see `close`
            self.loop.wake()

    def thread_waits(self, who: object, future: weakref.ref[Future[Any]] | None) -> None:
        """A thread waits for a task's future; None: no more. A future that is done counts as awaited by nobody."""
        if future is None:
            self._awaited.pop(who, None)
        else:
            self._awaited[who] = future

    async def close(self) -> None:
        """Fail what waits, then until no task, no kernel and no move is left, but for those a silent device has."""
        self.refuse(TiermemError("the pager was closed while a lease was waited for"))
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_GRACE_SECONDS)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=_GRACE_SECONDS)
        while self._kernels or not all(move.stalled() for move in _flying(self.residency)):
            await self._turn(timeout=_LOOK_SECONDS)

    def refuse(self, error: Exception) -> None:
        """Everybody who waits, and whoever asks from now on, gets `error`; the first one stays."""
        if self._refusal is None:
            self._refusal = error
        self.service.fail_all(self._refusal)
        self._notify()

    def _post_release(self, tier: Tier, lease: Lease, parting: Parting, failure: BaseException | None) -> None:
        fence = self.residency.chain.arenas[tier].fence()  # here: it is the releasing thread that has asked for work

        def release() -> None:
            known = self._out.remove(lease)
            if known is None:
                return
            if failure is not None:
                for page in lease.pages:
                    self.residency.fail(page, failure)
            pages, tier, intent = known
            unwritten = parting is Parting.UNUSED and intent is Intent.FRESH
            self.service.release(pages, tier, *lease.handed_over, fence, unwritten=unwritten)

        self.loop.leave(release)

    def _move_ended(self, page: Page, move: Move, error: BaseException | None) -> None:
        """Called on an I/O thread (or, by an inline backend, on the loop)."""
        ended = time.perf_counter()
        self.loop.report(lambda: self._finish_move(page, move, error, ended))

    def _finish_move(self, page: Page, move: Move, error: BaseException | None, ended: float) -> None:
        self.residency.finish_move(page, move, error)
        self._timeline.record(str(page.key), move.edge, move.started, ended, {"bytes": page.nbytes})
        for tier, arena in self.residency.chain.arenas.items():
            self._timeline.level(_LEVELS[tier], ended, arena.reserved)

    def _pump(self) -> None:
        """Once after all messages of a turn."""
        self._events += 1
        if self._refusal is None:
            self.service.pump()
        if self._watchers:
            self._notify()
        # Otherwise nothing would come of a lease given back: every page is there, and nobody waits.
        waiting = self.service.waiting
        self.loop.set_hungry(bool(self._refusal or waiting) or not self.service.ahead.has_everything)
        self._watch_later()

    def _watch_later(self) -> None:
        """Look again soon, as long as somebody waits for something."""
        if not self._watched and (self.service.waiting or self._awaited or self._watchers):
            self._watched = True
            self.loop.asyncio.call_later(_LOOK_SECONDS, self._watch, self._events)

    def _watch(self, events: int) -> None:
        """Look whether a device has stalled, and whether everything stands still.

        Whoever lacks room will not get it by waiting for leases (I9), nor bytes by waiting for a device that is silent.
        """
        self._watched = False
        stalled = next(filter(None, (move.stalled() for move in _flying(self.residency))), None)
        if stalled is not None:
            self.refuse(stalled)
        for pages, tier, intent in self._out.take_lost():
            fence = self.residency.chain.arenas[tier].fence()
            self.service.release(pages, tier, fence, unwritten=intent is Intent.FRESH)
            self.loop.wake()
        waiting = self.service.waiting
        self._awaited = {
            who: found for who, found in self._awaited.items() if (future := found()) and not future.done()
        }
        blocked = bool(self._awaited) or any(
            request.waiter is not None and request.waiter.awaited for request in waiting
        )
        if not self.residency.moves and not self._kernels and self._events == events and blocked:
            try:
                self.service.resolve_standstill()
            except Exception as error:  # noqa: BLE001 - an error that should not exist goes to everybody
                self.refuse(error)
        self._watch_later()

    async def next_event(self) -> None:
        """Until something has happened and all that could be done about it has been started."""
        if self._refusal is not None:
            raise self._refusal
        await self._turn()
        if self._refusal is not None:
            raise self._refusal

    async def _turn(self, timeout: float | None = None) -> None:
        pumped = self.loop.asyncio.create_future()
        self._watchers.append(pumped)
        self.loop.set_hungry(True)
        self._watch_later()
        await asyncio.wait([pumped], timeout=timeout)

    def _notify(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)


def _flying(residency: Residency) -> list[Move]:
    return [page.move for page in residency.pages.values() if page.move is not None] if residency.moves else []
