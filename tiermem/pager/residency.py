"""The residency of every page: the facts, and the only functions that change them.

Invariants (checked by `check_invariants`, which tests call after every event):

    I1  A page that was written has a valid copy somewhere until it is discarded.
    I2  One move at a time, over one edge: its source is valid, its target is not.
    I3  A leased copy, the source of a move and the last valid copy are never dropped.
    I4  An exclusive lease is the only lease, there is no move, and its copy is the only valid one.
    I5  A frame is reserved before its move starts; the reserved bytes of a tier never exceed its capacity.

Transitions: `add`, `hold`, `unhold`, `start_move`, `finish_move`, `drop`, `discard`. Owns pages, frames and the queues
of eviction candidates. Does not know who waits, threads, or when to do what. Guarantees that each transition either
keeps the invariants or raises before it changes anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from swap.requests import Priority
from tiermem.errors import CapacityError, InvariantError
from tiermem.memory.tiers import Tier
from tiermem.pager.edges import Chain
from tiermem.pager.page import Intent, Lane, Move, Page, PageKey
from tiermem.pager.policy import FarthestFirst
from tiermem.pager.schedule import Forecast
from tiermem.stats import Counters

Ended = Callable[[Page, Move, BaseException | None], None]


class Tally:
    """The bytes of the pages for which something holds now, per tier."""

    def __init__(self) -> None:
        self._of_page: dict[tuple[Tier, PageKey], int] = {}
        self._total = dict.fromkeys(Tier, 0)

    def note(self, tier: Tier, key: PageKey, nbytes: int) -> None:
        """It holds now for `nbytes` bytes of the page on `tier`; zero: no longer."""
        self._total[tier] += nbytes - self._of_page.pop((tier, key), 0)
        if nbytes:
            self._of_page[tier, key] = nbytes

    def __getitem__(self, tier: Tier) -> int:
        return self._total[tier]


class Residency:
    """All pages and where their bytes are. Used on the pager's loop only (I6)."""

    def __init__(self, chain: Chain, forecast: Forecast, counters: Counters, *, ended: Ended) -> None:
        """`ended(page, move, error)` is called, on any thread, when a move has ended; hand it to `finish_move`."""
        self.chain = chain
        self.forecast = forecast
        self.pages: dict[PageKey, Page] = {}
        self.moves = 0
        self.held = dict.fromkeys(chain.memory_tiers, 0)
        self.leaving = Tally()
        self.dirty = Tally()
        self.stuck = Tally()
        self.counters = counters
        self._ended = ended
        self._evictable = {tier: FarthestFirst() for tier in chain.memory_tiers}
        self._cleanable = {tier: FarthestFirst() for tier in chain.memory_tiers}
        self._uses = 0

    def add(self, key: PageKey, nbytes: int) -> Page:
        """A new page of `nbytes` bytes, without contents."""
        if key in self.pages:
            raise InvariantError(f"{key}: expected a new page, found one of that name; this is a bug in tiermem")
        for tier, arena in self.chain.arenas.items():
            if nbytes > arena.capacity:
                raise CapacityError(
                    f"{key} needs {nbytes} bytes on {tier.name} at once, but the budget of that tier is "
                    f"{arena.capacity} bytes; raise the budget or make the units smaller"
                )
        page = self.pages[key] = Page(key, nbytes)
        return page

    def hold(self, page: Page, tier: Tier, intent: Intent, lane: Lane) -> None:
        """Lease the page on `tier`; for WRITE and FRESH every other copy becomes invalid at once (I4)."""
        if tier not in page.frames:
            raise InvariantError(f"{page.key}: expected a frame on {tier.name}; this is a bug in tiermem")
        if intent is not Intent.READ:
            if page.is_leased or page.move is not None:
                raise InvariantError(f"{page.key}: an exclusive lease while it is leased or moving; a bug in tiermem")
            page.valid = {tier}
            for other in [other for other in page.frames if other != tier]:
                self._free(page, other)
            page.exclusive = True
        if not page.leases.get(tier):
            self.held[tier] += page.frames[tier].nbytes
        page.leases[tier] = page.leases.get(tier, 0) + 1
        self._uses += 1
        page.last_use = self._uses
        self.forecast.note(lane, page.key)
        self._classify(page)

    def unhold(self, page: Page, tier: Tier) -> None:
        """Give one lease back."""
        if not page.leases.get(tier):
            raise InvariantError(f"{page.key}: released on {tier.name} without a lease; this is a bug in tiermem")
        page.leases[tier] -= 1
        if not page.leases[tier]:
            self.held[tier] -= page.frames[tier].nbytes
        if not page.is_leased:
            page.exclusive = False
        if page.doomed:
            self.discard(page)
        else:
            self._classify(page)

    def start_move(self, page: Page, target: Tier, priority: Priority) -> None:
        """Start moving the page to the neighbouring tier `target`, where a frame is waiting (I5)."""
        source = page.nearest_valid(target)
        if page.move is not None or page.exclusive or target in page.valid:
            raise InvariantError(f"{page.key}: a move to {target.name} that must not start; this is a bug in tiermem")
        move = page.move = Move(source, target, time.perf_counter())
        self.moves += 1
        self.counters.move_started(move.edge)
        try:
            edge = self.chain.edges[source, target]
            move.transfer = edge.start(page, priority, lambda error: self._ended(page, move, error))
        except Exception as error:  # noqa: BLE001 - recorded as the page's error (I7) and raised to whoever uses it
            self.finish_move(page, move, error)
            return
        self._classify(page)

    def finish_move(self, page: Page, move: Move, error: BaseException | None) -> None:
        """Publish the copy a move has brought, or record its error and give its frame back."""
        page.move = None
        self.moves -= 1
        self.counters.move_finished(move.edge, 0 if error is not None else page.nbytes)
        if error is not None:
            page.error = page.error or error
            if move.target in page.frames:
                self._free(page, move.target)
        else:
            page.valid.add(move.target)
        if page.doomed and not page.is_leased:
            self.discard(page)
        else:
            self._classify(page)

    def drop(self, page: Page, tier: Tier) -> None:
        """Evict a copy that is valid elsewhere (I3)."""
        if page.leases.get(tier) or page.move is not None or page.valid == {tier}:
            raise InvariantError(f"{page.key}: evicting a copy that is in use or the last; this is a bug in tiermem")
        page.valid.discard(tier)
        self._free(page, tier)
        self.counters.count(evictions=1)
        self._classify(page)

    def discard(self, page: Page) -> None:
        """Forget the contents; while the page is leased or moving this is only noted and happens afterwards."""
        page.doomed = page.is_leased or page.move is not None
        if page.doomed:
            return
        self.counters.count(discards=bool(page.valid))
        page.valid.clear()
        for tier in list(page.frames):
            self._free(page, tier)
        self._classify(page)

    def allocate(self, page: Page, tier: Tier) -> bool:
        """Reserve a frame for the page on `tier` if there is room right now."""
        frame = self.chain.arenas[tier].allocate(page.nbytes)
        if frame is not None:
            page.frames[tier] = frame
        return frame is not None

    def candidates(self, tier: Tier) -> Generator[tuple[int, Page], None, None]:
        """Pages that may leave `tier`, farthest next use first; what the caller leaves as it is stays a candidate."""
        return self._drain(self._evictable[tier], lambda page: self._may_leave(page, tier))

    def dirty_candidates(self, tier: Tier) -> Generator[tuple[int, Page], None, None]:
        """Pages whose only copy is on `tier` and which nobody holds, farthest next use first."""
        return self._drain(self._cleanable[tier], lambda page: self._may_leave(page, tier) and page.is_dirty_on(tier))

    def _drain(self, queue: FarthestFirst, fits: Callable[[Page], bool]) -> Generator[tuple[int, Page], None, None]:
        unused: list[tuple[int, Page]] = []
        try:
            while (entry := queue.pop()) is not None:
                use, key, stamp = entry
                page = self.pages[key]
                if page.stamp == stamp and fits(page):
                    unused.append((use, page))
                    yield use, page
        finally:
            for use, page in unused:
                if fits(page):
                    queue.push(page.key, next_use=use, stamp=page.stamp)

    @staticmethod
    def _may_leave(page: Page, tier: Tier) -> bool:
        return tier in page.valid and page.move is None and not page.is_leased and page.error is None

    def _classify(self, page: Page) -> None:
        """Make or unmake the page a candidate, dirty or leaving after any change of its facts."""
        page.stamp += 1
        for tier in self.chain.memory_tiers:
            nbytes = page.frames[tier].nbytes if tier in page.frames else 0
            leaves = page.move is not None and page.move.is_write_back and page.move.source is tier
            self.leaving.note(tier, page.key, nbytes if leaves and not page.is_leased else 0)
            # A failed page keeps the bytes that could not be saved, so that nothing is lost by making room.
            self.stuck.note(tier, page.key, nbytes if page.error is not None and not page.leases.get(tier) else 0)
            dirty = self._may_leave(page, tier) and page.is_dirty_on(tier)
            self.dirty.note(tier, page.key, nbytes if dirty else 0)
            if self._may_leave(page, tier):
                use = self.forecast.next_use(page.key, page.last_use)
                self._push(self._evictable[tier], page, use)
                if dirty:
                    self._push(self._cleanable[tier], page, use)

    def _push(self, queue: FarthestFirst, page: Page, use: int) -> None:
        queue.push(page.key, next_use=use, stamp=page.stamp)
        if len(queue) > 256 + 4 * len(self.pages):
            queue.forget(lambda key, stamp: self.pages[key].stamp != stamp)

    def _free(self, page: Page, tier: Tier) -> None:
        self.chain.arenas[tier].free(page.frames.pop(tier))

    def reclassify(self) -> None:
        """The forecast has changed: order all candidates anew."""
        for page in self.pages.values():
            if page.frames:
                self._classify(page)

    def check_invariants(self) -> None:
        """Raise InvariantError if any page or tier breaks I1 to I5."""
        for page in self.pages.values():
            self._check_page(page)
        for tier, arena in self.chain.arenas.items():
            framed = sum(page.frames[tier].nbytes for page in self.pages.values() if tier in page.frames)
            held = sum(page.frames[tier].nbytes for page in self.pages.values() if page.leases.get(tier))
            if framed != arena.reserved or arena.reserved > arena.capacity or held != self.held[tier]:
                raise InvariantError(
                    f"I5 {tier.name}: frames {framed}, reserved {arena.reserved}, capacity {arena.capacity}, "
                    f"held {held} against {self.held[tier]} bytes"
                )

    @staticmethod
    def _check_page(page: Page) -> None:
        if any(tier not in page.frames for tier in page.valid if tier is not Tier.SWAP):
            raise InvariantError(f"I1 {page.key}: valid on {page.valid} but frames on {set(page.frames)}")
        if Tier.SWAP in page.valid and page.extent is None:
            raise InvariantError(f"I1 {page.key}: valid on SWAP without an extent")
        if page.move is not None and (page.move.source not in page.valid or page.move.target in page.valid):
            raise InvariantError(f"I2 {page.key}: {page.move} with valid {page.valid}")
        if any(count and tier not in page.valid for tier, count in page.leases.items()):
            raise InvariantError(f"I3 {page.key}: leased {page.leases} with valid {page.valid}")
        if page.exclusive and (sum(page.leases.values()) != 1 or page.move is not None or len(page.valid) != 1):
            raise InvariantError(f"I4 {page.key}: exclusive with {page.leases}, {page.move}, valid {page.valid}")
        targets = {page.move.target} if page.move is not None else set()
        if set(page.frames) - page.valid - targets:
            raise InvariantError(f"I5 {page.key}: frames {set(page.frames)} neither valid {page.valid} nor awaited")
