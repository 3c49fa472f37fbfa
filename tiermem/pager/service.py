"""Serving requests for leases: what to fetch, evict and write back now so that everybody gets on.

Owns the requests that wait, and calls the transitions of `Residency` for them. `pump` runs after every event: demands
first, in order of arrival, then the bytes that have to leave, then read-ahead. Does not know threads or asyncio.
Guarantees that room is never taken from an earlier demand by a later one unless everything stands still, or what has to
leave the DEVICE for it passes through HOST; and that whoever cannot be served even then gets a CapacityError (I9)
instead of waiting for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swap.requests import Priority
from tiermem.errors import CapacityError, InvariantError
from tiermem.memory.arena import Fence
from tiermem.memory.tiers import Tier
from tiermem.pager.ahead import Ahead, Appetite
from tiermem.pager.page import Intent, Lane, Page
from tiermem.pager.residency import Residency
from tiermem.pager.room import Room


class Waiter(Protocol):
    """Who asked for a lease from another thread."""

    awaited: bool


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """Somebody waits for leases on pages, each named once.

    Attributes:
        finished: called once: with None when all leases are held, or with the error (then none is held).
        waiter: the thread's side of it; None if a coroutine asks. What a thread asked for ahead of time and does not
            wait for yet is no reason to believe that everything stands still.
        lacking: the pages not leased so far, in order.
        held: the pages leased so far.
        short: the tier and bytes for which room is lacking, while that is what it waits for.
        missed: whether a page had to be moved for it.
    """

    pages: Sequence[Page]
    intent: Intent
    lane: Lane
    tier: Tier
    finished: Callable[[BaseException | None], None]
    waiter: Waiter | None = None
    lacking: list[Page] = field(init=False)
    held: list[Page] = field(init=False, default_factory=list)
    short: tuple[Tier, int] | None = field(init=False, default=None)
    missed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.lacking = list(self.pages)

    def is_barred(self) -> bool:
        """Whether a lease on one of its pages stands in the way, whatever room there is."""
        return any(page.exclusive or (self.intent is not Intent.READ and page.is_leased) for page in self.lacking)

    def is_served_by(self, page: Page) -> bool:
        """Whether the page can be leased as it is."""
        if self.tier not in page.valid or page.exclusive or page.doomed or page.error is not None:
            return False
        return self.intent is Intent.READ or (page.move is None and not page.is_leased)


class Service:
    """Grants leases. Used on the pager's loop only."""

    def __init__(self, residency: Residency, appetite: dict[Tier, Appetite]) -> None:
        self.waiting: list[LeaseRequest] = []
        self._residency = residency
        self._room = Room(residency)
        self.homes = self._room.homes
        self.ahead = Ahead(residency, self._room, appetite)
        self._sole: LeaseRequest | None = None
        self._tried: set[LeaseRequest] = set()

    def submit(self, request: LeaseRequest) -> None:
        """Take a request; `pump` serves it."""
        self.waiting.append(request)
        if self._sole is not None or self._tried:
            self._in_order()

    def serve_at_once(self) -> None:
        """Grant a request just submitted if it is the only one and all its pages are there: what `pump` would do first.

        Nothing is fetched, evicted or reserved for it.
        """
        if len(self.waiting) == 1:
            request = self.waiting[0]
            for page in request.lacking:
                if not request.is_served_by(page):
                    return
            self._serve(request, set())

    def release(self, pages: Sequence[Page], tier: Tier, *fences: Fence | None, unwritten: bool = False) -> None:
        """Leases given back; what their holders asked of a device is done with `fences`.

        `unwritten`: they were to be written anew and were not, so that they are without contents again.
        """
        for page in pages:
            if unwritten:
                self._residency.discard(page)
            self._residency.unhold(page, tier, *fences)
        if self._sole is not None or self._tried:
            self._in_order()

    def begin_step(self) -> None:
        """The computation is at the beginning again."""
        self.homes.begin_step()
        if not self._residency.forecast.begin_step():
            self._residency.reclassify()

    def pump(self) -> None:
        """Do everything that can be done now."""
        claimed: set[Tier] = set()
        for request in [self._sole] if self._sole is not None else list(self.waiting):
            self._serve(request, claimed)
        self.ahead.write_back(claimed)
        if not claimed:  # room that a demand lacks, here or on the way there, is not taken for a guess
            self.ahead.read()

    def fail_all(self, error: BaseException) -> None:
        """Give every waiting request up, for good: nothing is served after this."""
        waiting, self.waiting = self.waiting, []
        self._in_order()
        for request in waiting:
            request.finished(error)

    def resolve_standstill(self) -> bool:
        """Everything stands still: let somebody go on, out of order if need be, or fail whoever lacks room.

        One request after the other, in order of arrival, is served alone until it is done or stands still again; the
        others give back what they hold without having all of it. So no two of them wait for each other or take each
        other's room in turns. When all have been tried in vain, one that lacks room fails. A new request and a lease
        given back bring the usual order back. Returns False if nobody who is waited for lacks room: then it is leases
        that everybody waits for.
        """
        if self._sole is not None:
            self._tried.add(self._sole)
            self._sole = None
        for request in self.waiting:
            self._retreat(request)
        for request in list(self.waiting):
            if request in self._tried or request.is_barred() or not self._fits(request):
                continue
            self._sole, moves = request, self._residency.moves
            self._serve(request, set())
            if self._sole is None or self._residency.moves > moves:
                return True
            self._retreat(request)
            self._tried.add(request)
            self._sole = None
        return self._fail_one()

    def _in_order(self) -> None:
        """Things have changed: everybody is served in order again, and may be tried again."""
        self._sole = None
        if self._tried:
            self._tried.clear()

    def _fail_one(self) -> bool:
        awaited = [request for request in self.waiting if request.waiter is None or request.waiter.awaited]
        lacking = [request for request in awaited if request in self._tried or not self._fits(request)]
        failing = min(lacking, key=LeaseRequest.is_barred, default=None)
        if failing is not None:
            self._finish(failing, self._no_room(failing))
        return failing is not None

    def save(self, page: Page) -> None:
        """Start writing a page down one tier towards SWAP if that can be done now; leased for reading or not."""
        if page.error is None and page.move is None and not page.exclusive and page.valid:
            lowest = min(page.valid)
            if lowest is not Tier.SWAP:
                self._room.send_off(page, lowest)

    def _serve(self, request: LeaseRequest, claimed: set[Tier]) -> None:
        """Bring a request as far as it gets now; if it lacks room, its tier is claimed before later requests."""
        for page in request.lacking:
            if page.error is not None:  # not raised: it would keep each request that it has ended
                self._finish(request, page.error)
                return
        try:
            self._advance(request, claimed)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for the request
            self._finish(request, error)
            return
        if not request.lacking:
            self._finish(request, None)
            return
        if request.short is not None:
            claimed.add(request.short[0])

    def _finish(self, request: LeaseRequest, error: BaseException | None) -> None:
        self.waiting.remove(request)
        if self._sole is not None or self._tried:
            self._in_order()
        if error is not None:
            self._retreat(request)
        else:
            for page in request.pages:  # in the order asked for, which the schedule knows, whichever was there first
                self._residency.grant(page, request.tier, request.intent, request.lane)
            self._residency.counters.count(cache_hits=not request.missed, cache_misses=request.missed)
        request.finished(error)

    def _retreat(self, request: LeaseRequest) -> None:
        """Give back what a request holds without having all of it."""
        if request.held:
            for page in request.held:
                self._residency.unhold(page, request.tier)
            request.held.clear()
            request.lacking = list(request.pages)

    def _advance(self, request: LeaseRequest, claimed: set[Tier]) -> None:
        request.short = None
        lacking: list[Page] = []
        for page in request.lacking:
            if self._step(request, page, claimed):
                self._residency.hold(page, request.tier, request.intent)
                request.held.append(page)
            else:
                lacking.append(page)
        request.lacking = lacking

    def _step(self, request: LeaseRequest, page: Page, claimed: set[Tier]) -> bool:
        """Bring the page one step nearer to the request; whether it can be leased now."""
        tier = request.tier
        if page.error is not None:
            raise page.error
        if page.move is not None and (request.intent is not Intent.READ or tier not in page.valid):
            page.move.promote()
            request.missed = True
            return False
        if page.doomed or page.exclusive or (request.intent is not Intent.READ and page.is_leased):
            return False
        if tier in page.valid:
            return True
        if request.intent is Intent.FRESH:
            return self._reserve(request, page, tier, claimed)
        if not page.valid:
            raise InvariantError(f"{page.key}: expected contents, found a page never written; this is a bug in tiermem")
        target = self._residency.chain.towards(page.nearest_valid(tier), tier)
        request.missed = True
        if self._reserve(request, page, target, claimed):
            self._residency.start_move(page, target, Priority.DEMAND)
            if page.error is not None:
                raise page.error
        return False

    def _reserve(self, request: LeaseRequest, page: Page, tier: Tier, claimed: set[Tier]) -> bool:
        """Room for the page on `tier`, on the way to the request's; if leases stand in the way nothing is evicted."""
        short = goal = request.tier
        free = self._room.unheld(goal) >= page.room
        if free and (tier == goal or (goal not in claimed and self._room.prepare(page, goal))):
            short = tier
            if tier not in claimed and self._room.make(page, tier):
                return True
        request.short = request.short or (short, page.room)
        return False

    def _fits(self, request: LeaseRequest) -> bool:
        """Whether evicting could make room for all the request lacks, on its own tier and on the way there."""
        tier = request.tier
        absent = [page for page in request.lacking if _lacks_room(page, tier)]
        if sum(page.room for page in absent) > self._room.unheld(tier):
            return False
        return all(
            max((page.room for page in absent if tier not in page.frames), default=0) <= self._room.unheld(passed)
            for passed in self._residency.chain.memory_tiers
            if passed < tier and request.intent is not Intent.FRESH
        )

    def _no_room(self, request: LeaseRequest) -> BaseException:
        """Why a request gets no room: the failure that keeps bytes from being saved, else who holds the tier."""
        residency = self._residency
        failed = next((page.error for page in residency.pages.values() if page.error and page.frames), None)
        if failed is not None:
            return failed
        tier = request.tier
        needed = sum(page.room for page in request.lacking if _lacks_room(page, tier))
        if needed <= self._room.unheld(tier) and request.short is not None:
            tier, needed = request.short
        arena = residency.chain.arenas[tier]
        held = {page.key: page.frames[tier].nbytes for page in residency.pages.values() if page.leases.get(tier)}
        largest = sorted(held.items(), key=lambda item: -item[1])[:8]
        holders = ", ".join(f"{key}: {nbytes}" for key, nbytes in largest)
        kept = sum(page.room for page in residency.pages.values() if page.kept) if tier is Tier.HOST else 0
        by_choice = f", {kept} bytes kept there by choice (keep fewer)" if kept else ""
        lacking = (page for page in request.lacking if _lacks_room(page, tier))
        scattered = any(self._room.is_scattered(page, tier) for page in lacking)
        advice = f"Raise the budget of {tier.name}, or make the units smaller"
        if scattered:
            advice = f"There is room in bytes, but not in one piece: what is leased lies between. {advice}"
        elif tier is Tier.HOST and needed <= arena.capacity - arena.reserved:
            advice = (
                "There is room in bytes, but the system has denied addresses: raise `ulimit -v`, or lower the budget"
            )
        return CapacityError(
            f"{tier.name} has no room for {needed} bytes ({request.lacking[0].key}): budget {arena.capacity}, reserved "
            f"{arena.reserved}, high-water mark {arena.high_water} bytes; leased: {holders or 'nothing'}{by_choice}. "
            f"{advice}"
        )


def _lacks_room(page: Page, tier: Tier) -> bool:
    """Whether a lease takes room that is counted as free: not where the page is leased, or kept, there already."""
    return tier not in page.leases and not (page.kept and tier is Tier.HOST and tier in page.frames)
