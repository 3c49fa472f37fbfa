"""Serving requests for leases: what to fetch, evict and write back now so that everybody gets on.

Owns the requests that wait, and calls the transitions of `Residency` for them. `pump` runs after every event: demands
first, in order of arrival, then the bytes that have to leave, then read-ahead. Does not know threads or asyncio.
Guarantees that room is never taken from an earlier demand by a later one unless nothing else moves, and that when
everything stands still the request that cannot be met fails with a CapacityError (I9) instead of waiting for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from swap.requests import Priority
from tiermem.errors import CapacityError, InvariantError
from tiermem.memory.tiers import Tier
from tiermem.pager.page import Intent, Lane, Page, PageKey
from tiermem.pager.policy import Candidate, choose_read_ahead
from tiermem.pager.residency import Residency

# How many coming accesses the read-ahead looks at; its real bound is in bytes, this one bounds the work per event.
_COMING = 256


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """Somebody waits for leases on pages.

    Attributes:
        finished: called once: with None when all leases are held, or with the error (then none is held).
        held: the pages leased so far.
        short: the tier and bytes for which room is lacking, while that is what it waits for.
        missed: whether a page had to be moved for it.
    """

    pages: Sequence[Page]
    intent: Intent
    lane: Lane
    tier: Tier
    finished: Callable[[BaseException | None], None]
    held: list[Page] = field(default_factory=list)
    short: tuple[Tier, int] | None = None
    missed: bool = False


@dataclass(frozen=True, slots=True)
class Appetite:
    """How far the service looks ahead on a tier.

    Attributes:
        look_ahead: bytes fetched ahead of the cursors at most.
        reserve: bytes always left for the largest single demand.
    """

    look_ahead: int
    reserve: int


class Service:
    """Grants leases. Used on the pager's loop only."""

    def __init__(self, residency: Residency, appetite: dict[Tier, Appetite]) -> None:
        self.waiting: list[LeaseRequest] = []
        self._residency = residency
        self._appetite = appetite
        self._flushing = 0

    def submit(self, request: LeaseRequest) -> None:
        """Take a request; `pump` serves it."""
        self.waiting.append(request)

    def release(self, pages: Sequence[Page], tier: Tier) -> None:
        """Leases given back."""
        for page in pages:
            self._residency.unhold(page, tier)

    def pump(self) -> None:
        """Do everything that can be done now."""
        self._serve(bypass=False)
        self._write_back_early()
        self._read_ahead()

    def pump_out_of_order(self) -> None:
        """Nothing moves: let a later demand have room that an earlier one cannot use yet."""
        self._serve(bypass=True)

    def fail_all(self, error: BaseException) -> None:
        """Give every waiting request up."""
        for request in list(self.waiting):
            self._finish(request, error)

    def fail_standstill(self) -> bool:
        """Everything stands still: fail the oldest request that lacks room, if there is one."""
        short = next((request for request in self.waiting if request.short is not None), None)
        if short is not None:
            self._finish(short, self._capacity_error(short))
        return short is not None

    def start_flush(self) -> None:
        """Write back everything dirty, whatever its next use, until `end_flush`."""
        self._flushing += 1

    def unwritten(self) -> int:
        """Bytes of pages that nobody holds and that only memory has."""
        tiers = self._residency.chain.memory_tiers
        return sum(self._residency.dirty[tier] + self._residency.leaving[tier] for tier in tiers)

    def end_flush(self) -> None:
        """Go back to writing back what has to leave."""
        self._flushing -= 1

    # Demands

    def _serve(self, *, bypass: bool) -> None:
        claimed: set[Tier] = set()
        for request in list(self.waiting):
            try:
                self._advance(request, claimed if not bypass else set())
            except Exception as error:  # noqa: BLE001 - handed to whoever waits for the request
                self._finish(request, error)
                continue
            if len(request.held) == len(request.pages):
                self._finish(request, None)
            elif request.short is not None:
                claimed.add(request.short[0])

    def _finish(self, request: LeaseRequest, error: BaseException | None) -> None:
        self.waiting.remove(request)
        if error is not None:
            self.release(request.held, request.tier)
        else:
            self._residency.counters.count(cache_hits=not request.missed, cache_misses=request.missed)
        request.finished(error)

    def _advance(self, request: LeaseRequest, claimed: set[Tier]) -> None:
        request.short = None
        for page in request.pages:
            if page not in request.held and self._step(request, page, claimed):
                self._residency.hold(page, request.tier, request.intent, request.lane)
                request.held.append(page)

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
            return self._room(request, page, tier, claimed)
        if not page.is_written:
            raise InvariantError(f"{page.key}: expected contents, found a page never written; this is a bug in tiermem")
        target = self._residency.chain.towards(page.nearest_valid(tier), tier)
        request.missed = True
        if self._room(request, page, target, claimed):
            self._residency.start_move(page, target, Priority.DEMAND)
            if page.error is not None:
                raise page.error
        return False

    def _could_fit(self, page: Page, tier: Tier) -> bool:
        """Whether eviction alone could make room; if leases stand in the way, evicting now would be for nothing."""
        residency = self._residency
        return residency.chain.arenas[tier].capacity - residency.held[tier] - residency.stuck[tier] >= page.nbytes

    def _room(self, request: LeaseRequest, page: Page, tier: Tier, claimed: set[Tier]) -> bool:
        if (
            self._could_fit(page, request.tier)
            and tier not in claimed
            and self._make_room(page, tier, nearer_than=None)
        ):
            return True
        if request.short is None:
            request.short = (tier if self._could_fit(page, request.tier) else request.tier, page.nbytes)
        return False

    def _make_room(self, page: Page, tier: Tier, *, nearer_than: int | None, spare: Page | None = None) -> bool:
        """Reserve a frame for `page`, evicting what is used last; a copy that must be written first is sent off.

        `nearer_than`: only evict pages whose next use is farther than this position, and send nothing off.
        `spare`: the page for whose sake room is made; it is on its way up and must not be evicted for that.
        """
        residency = self._residency
        if residency.allocate(page, tier):
            return True
        arena = residency.chain.arenas[tier]
        if not self._could_fit(page, tier):
            return False
        with closing(residency.candidates(tier)) as candidates:
            for use, victim in candidates:
                on_its_way = arena.capacity - arena.reserved + residency.leaving[tier]
                if on_its_way >= page.nbytes or (nearer_than is not None and use <= nearer_than):
                    break
                if victim is spare:
                    continue
                if not victim.is_dirty_on(tier):
                    residency.drop(victim, tier)
                    if residency.allocate(page, tier):
                        return True
                elif nearer_than is None:
                    self._send_off(victim, tier, spare=page)
        return False

    def _send_off(self, page: Page, tier: Tier, *, spare: Page | None = None) -> bool:
        """Start writing a page's only copy back to the tier below, if that has room for it."""
        residency = self._residency
        target = residency.chain.towards(tier, Tier.SWAP)
        if target is not Tier.SWAP and not self._make_room(page, target, nearer_than=None, spare=spare):
            return False
        residency.start_move(page, target, Priority.WRITE_BACK)
        return True

    # Ahead of time

    def _write_back_early(self) -> None:
        """Send dirty pages off before their room is asked for, the one used last first.

        What may stay dirty is what fits beside the leased pages, the look-ahead and the reserve: those bytes are not
        going to be evicted before their next use, so writing them would be for nothing.
        """
        for tier in self._residency.chain.memory_tiers:
            residency, appetite = self._residency, self._appetite[tier]
            room = residency.chain.arenas[tier].capacity - residency.held[tier]
            keep = 0 if self._flushing else max(0, room - appetite.look_ahead - appetite.reserve)
            if residency.dirty[tier] <= keep:
                continue
            with closing(residency.dirty_candidates(tier)) as candidates:
                for _, page in candidates:
                    if residency.dirty[tier] <= keep or not self._send_off(page, tier):
                        break

    def _read_ahead(self) -> None:
        if not self._residency.forecast.has_schedule or any(request.short for request in self.waiting):
            return  # room that a demand lacks, here or on the way there, is not taken for a guess
        for tier in self._residency.chain.memory_tiers:
            appetite = self._appetite[tier]
            uses: dict[PageKey, int] = {}
            chosen = choose_read_ahead(
                self._coming(tier, uses),
                capacity=self._residency.chain.arenas[tier].capacity,
                held=self._residency.held[tier],
                reserve=appetite.reserve,
                look_ahead=appetite.look_ahead,
            )
            for key in chosen:
                page = self._residency.pages[key]
                if not self._make_room(page, tier, nearer_than=uses[key]):
                    break
                self._residency.start_move(page, tier, Priority.READ_AHEAD)

    def _coming(self, tier: Tier, uses: dict[PageKey, int]) -> Iterator[Candidate]:
        chain = self._residency.chain
        below = chain.towards(tier, Tier.SWAP)
        for use, lane, key in self._residency.forecast.upcoming(_COMING):
            page = self._residency.pages.get(key)
            wanted = chain.top if lane is Lane.COMPUTE else Tier.HOST
            if page is None or wanted < tier or not page.is_written or page.error is not None:
                continue
            uses.setdefault(key, use)
            yield Candidate(
                key,
                page.nbytes,
                present=tier in page.frames or any(other > tier for other in page.valid),
                readable=below in page.valid and page.move is None and not page.exclusive and not page.doomed,
                leased=bool(page.leases.get(tier)),
            )

    def _capacity_error(self, request: LeaseRequest) -> CapacityError:
        tier, needed = request.short or (request.tier, 0)
        arena = self._residency.chain.arenas[tier]
        held: dict[str, int] = {}
        for page in self._residency.pages.values():
            if page.leases.get(tier):
                held[str(page.key)] = page.frames[tier].nbytes
        holders = ", ".join(f"{name}: {nbytes}" for name, nbytes in sorted(held.items(), key=lambda item: -item[1])[:8])
        return CapacityError(
            f"{tier.name} has no room for {needed} bytes ({request.pages[0].key}): budget {arena.capacity}, reserved "
            f"{arena.reserved}, high-water mark {arena.high_water} bytes; leased: {holders or 'nothing'}. "
            f"Raise the budget of {tier.name}, or make the units smaller"
        )
