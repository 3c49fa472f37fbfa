"""The residency of every page: the facts, and the only functions that change them.

Invariants (`check_invariants` checks I1 to I5, and tests call it after every event):

    I1  A page that was written has a valid copy somewhere until it is discarded, or reverted to before it was written.
    I2  One move at a time, over one edge: its source is valid, its target is not.
    I3  A leased copy, the source of a move and the last valid copy are never dropped.
    I4  An exclusive lease is the only lease and there is no move; once granted, its copy is the only valid one.
    I5  A frame is reserved before its move starts; the reserved bytes of a tier never exceed its capacity.
    I8  A frame whose lease is given back carries the fence given with it; its arena hands that on (`unhold`).

Transitions: `add`, `allocate`, `hold`, `grant`, `unhold`, `start_move`, `finish_move`, `drop`, `discard`,
`revert`, `fail`, `remove`.
Owns the pages and their frames. Does not know who waits, threads, or when to do what. Guarantees that each transition
either keeps the invariants or raises before it changes anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from swap.requests import Priority
from tiermem.errors import CapacityError, InvariantError
from tiermem.memory.arena import Fence
from tiermem.memory.tiers import Tier
from tiermem.pager.census import Census
from tiermem.pager.edges import Chain
from tiermem.pager.forecast import LATER, SETTLED, Forecast
from tiermem.pager.invariants import check_invariants
from tiermem.pager.page import Intent, Lane, Move, Page, PageKey
from tiermem.stats import Counters

Ended = Callable[[Page, Move, BaseException | None], None]

_ALL, _COMPUTE, _UPDATE = tuple(Lane), (Lane.COMPUTE,), (Lane.UPDATE,)


class Residency:
    """All pages and where their bytes are. Used on the pager's loop only (I6).

    Attributes:
        census: what is derived from the facts of all pages.
        total: bytes that all pages would take on the lowest tier that has frames.
        moves: how many moves are in flight.
        uses: how many leases were granted so far.
    """

    def __init__(self, chain: Chain, forecast: Forecast, counters: Counters, *, ended: Ended) -> None:
        """`ended(page, move, error)` is called, on any thread, when a move has ended; hand it to `finish_move`."""
        self.chain = chain
        self.forecast = forecast
        self.counters = counters
        self.pages: dict[PageKey, Page] = {}
        self.census = Census(chain.memory_tiers, self._next_use)
        self.total = 0
        self.moves = 0
        self.uses = 0
        self._report = ended
        self._last_use: dict[PageKey, int] = {}
        self.used_last: PageKey | None = None
        self._spoiled: set[Page] = set()  # whose error is of their contents only, and goes with them

    def page(self, key: PageKey) -> Page:
        """The page of that name. Raises InvariantError if there is none."""
        page = self.pages.get(key)
        if page is None:
            raise InvariantError(f"{key}: no such page; this is a bug in tiermem")
        return page

    def add(self, key: PageKey, nbytes: int, *, saved: bool = False) -> Page:
        """A new page of `nbytes` bytes, without contents, or with those that SWAP has if it is `saved`.

        Raises InvariantError, or CapacityError if it never fits.
        """
        if key in self.pages or nbytes < 1:
            raise InvariantError(
                f"{key}: expected a new page of a byte or more, found {nbytes} bytes, or the name taken"
            )
        room = self.chain.room(nbytes)
        for tier in self.chain.tiers_of(key):
            if room > self.chain.capacity(tier):
                raise CapacityError(
                    f"{key} needs {room} bytes on {tier.name} at once, but the budget of that tier is "
                    f"{self.chain.capacity(tier)} bytes; raise the budget or make the units smaller"
                )
        page = self.pages[key] = Page(key, nbytes, room, Tier.HOST if self.chain.keeps(key) else None)
        if saved:
            page.valid.add(Tier.SWAP)
            self.census.note(page)
        self.total += room if self.chain.memory_tiers[0] in self.chain.tiers_of(key) else 0
        return page

    def allocate(self, page: Page, tier: Tier) -> bool:
        """Reserve a frame for the page on `tier` if there is room right now; a move or a hold must follow."""
        frame = self.chain.arenas[tier].allocate(page.nbytes)
        if frame is not None:
            page.frames[tier] = frame
        return frame is not None

    def hold(self, page: Page, tier: Tier, intent: Intent) -> None:
        """Lease the page on `tier` for a request that may still lack other pages; WRITE makes it dirty at once."""
        if tier not in page.frames or (tier not in page.valid and intent is not Intent.FRESH):
            raise InvariantError(f"{page.key}: expected its bytes on {tier.name}; this is a bug in tiermem")
        if page.exclusive or (intent is not Intent.READ and (page.is_leased or page.move is not None)):
            raise InvariantError(f"{page.key}: an exclusive lease while it is leased or moving; a bug in tiermem")
        page.exclusive = intent is not Intent.READ
        page.leases[tier] = page.leases.get(tier, 0) + 1
        if intent is Intent.WRITE:
            self._take_over(page, tier)
        else:
            self.census.note(page)

    def grant(self, page: Page, tier: Tier, intent: Intent, lane: Lane) -> None:
        """The request for which the page was held has all it asked for: this is the access that the schedule knows.

        Only now FRESH makes the page dirty: a request that is refused must not cost contents.
        """
        if not page.leases.get(tier):
            raise InvariantError(f"{page.key}: granted on {tier.name} without being held; this is a bug in tiermem")
        self.uses += 1
        self._last_use[page.key] = self.uses
        self.used_last = page.key
        self.forecast.note(lane, page.key)
        if intent is Intent.FRESH:
            self._take_over(page, tier)

    def unhold(self, page: Page, tier: Tier, *fences: Fence | None) -> None:
        """Give one lease back; whatever its holder has asked a device to do with the frame has passed with `fences`."""
        if not page.leases.get(tier):
            raise InvariantError(f"{page.key}: released on {tier.name} without a lease; this is a bug in tiermem")
        for fence in fences:
            page.frames[tier].fence(fence)  # before anybody can want the frame (I8)
        page.leases[tier] -= 1
        if not page.leases[tier]:
            del page.leases[tier]
            if tier not in page.valid:
                self._free(page, tier)  # FRESH, and never granted
        if not page.leases:
            page.exclusive = False
        self._settle(page)

    def start_move(self, page: Page, target: Tier, priority: Priority) -> None:
        """Start moving the page to the neighbouring tier `target`, where a frame is waiting (I5)."""
        if page.move is not None or page.exclusive or target in page.valid or not page.valid:
            raise InvariantError(f"{page.key}: a move to {target.name} that must not start; this is a bug in tiermem")
        source = page.nearest_valid(target)
        edge = self.chain.edges[source, target]
        move = page.move = Move(source, target, time.perf_counter())
        self.moves += 1
        if priority is not Priority.WRITE_BACK:
            self.forecast.fetched(page.key)
        self.counters.move_started(move.edge)
        try:
            move.transfer = edge.start(page, priority, lambda error: self._report(page, move, error))
        except Exception as error:  # noqa: BLE001 - recorded as the page's error (I7) and raised to whoever uses it
            self.finish_move(page, move, error)
            return
        self.census.note(page)

    def finish_move(self, page: Page, move: Move, error: BaseException | None) -> None:
        """Publish the copy a move has brought, or record its error and give its frame back."""
        if page.move is not move:
            raise InvariantError(f"{page.key}: the end of {move} came, found {page.move}; this is a bug in tiermem")
        page.move = None
        move.transfer = None  # it knows whom to tell: a reference cycle, which would keep frames that are long free
        self.moves -= 1
        self.counters.move_finished(move.edge, 0 if error is not None else page.nbytes)
        if error is None:
            page.valid.add(move.target)
        else:
            page.error = page.error or error
            if move.target in page.frames:
                self._free(page, move.target)
        self._settle(page)

    def drop(self, page: Page, tier: Tier) -> None:
        """Evict a copy that is valid elsewhere (I3)."""
        if tier not in page.valid or page.leases.get(tier) or page.move is not None or page.valid == {tier}:
            raise InvariantError(f"{page.key}: evicting a copy that is in use or the last; this is a bug in tiermem")
        page.valid.discard(tier)
        self._free(page, tier)
        self.counters.count(evictions=1)
        self.census.note(page)

    def discard(self, page: Page) -> None:
        """Forget the contents; while the page is leased or moving this is only noted and happens afterwards."""
        page.doomed = True
        self._settle(page)

    def revert(self, page: Page, *, existed: bool) -> None:
        """Go back to the copy that SWAP has kept (`existed`), or to none: every copy in memory is of later bytes."""
        if page.is_leased or page.move is not None:
            raise InvariantError(f"{page.key}: reverted while it is leased or moving; this is a bug in tiermem")
        for tier in list(page.frames):
            self._free(page, tier)
        page.valid = {Tier.SWAP} if existed else set()
        self.census.note(page)

    def fail(self, page: Page, error: BaseException) -> None:
        """The contents are garbage: whoever uses the page until they are discarded gets `error` (I7)."""
        if page.error is None:
            page.error = error
            self._spoiled.add(page)
        self.census.note(page)

    def remove(self, page: Page) -> bool:
        """Make the page unknown, contents and extent gone; False, and nothing is done, while it is held or moves."""
        if page.is_leased or page.move is not None:
            return False
        page.valid.clear()
        self._spoiled.discard(page)
        for tier in list(page.frames):
            self._free(page, tier)
        self.census.note(page)
        del self.pages[page.key]
        self.total -= page.room if self.chain.memory_tiers[0] in self.chain.tiers_of(page.key) else 0
        self.chain.forget(page.key)
        return True

    def reclassify(self) -> None:
        """The forecast has changed: order all candidates anew."""
        self.census.forget_order()
        for page in self.pages.values():
            if page.frames:
                self.census.note(page)

    def check_invariants(self) -> None:
        """Raise InvariantError if any page or tier breaks I1 to I5."""
        check_invariants(self.pages.values(), self.chain, self.census, self.moves)

    def _take_over(self, page: Page, tier: Tier) -> None:
        """The exclusively leased copy on `tier` is the only valid one from now on (I4)."""
        page.valid = {tier}
        for other in [other for other in page.frames if other != tier]:
            self._free(page, other)
        self.census.note(page)

    def _settle(self, page: Page) -> None:
        """After a lease or a move has ended: what was to be discarded is."""
        if page.doomed and not page.is_leased and page.move is None:
            page.doomed = False
            if page in self._spoiled:
                self._spoiled.discard(page)
                page.error = None
            self.counters.count(discards=bool(page.valid))
            page.valid.clear()
            for tier in list(page.frames):
                self._free(page, tier)
        self.census.note(page)

    def _next_use(self, page: Page, tier: Tier) -> int:
        """When the copy on `tier` is used next.

        On the DEVICE by the computation and, with a plan, by an update that would take the page from there. In HOST,
        while the DEVICE has a copy too, by the update alone; with a plan when that says so. Pages of a settled unit are
        used on the DEVICE by both, and `SETTLED` there: whatever else may go goes before them.
        """
        forecast, key, last, top = self.forecast, page.key, self._last_use.get(page.key, 0), self.chain.top
        above = tier is not top and top in page.valid
        if self.chain.settled and self.chain.settles(key) and (above or tier is top):
            return forecast.next_use(key, last, ()) if above else SETTLED
        if tier is Tier.DEVICE:
            source = forecast.is_planned and Tier.HOST not in page.valid
            return forecast.next_use(key, last, _ALL if source else _COMPUTE, planned=False)
        if above and page.home is Tier.DEVICE:
            return LATER + forecast.next_use(key, last, _UPDATE, planned=False)
        if top is Tier.DEVICE and forecast.is_planned:
            return forecast.next_use_below(key, last, above=above)
        return forecast.next_use(key, last, _UPDATE if above else _ALL)

    def _free(self, page: Page, tier: Tier) -> None:
        self.chain.arenas[tier].free(page.frames.pop(tier))
