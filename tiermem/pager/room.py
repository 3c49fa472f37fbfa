"""Making room on a tier: whom to evict, and what must be written down before.

Owns no state; drives `Residency` with the orders of its census. Does not know requests or schedules. Guarantees that a
leased copy is never touched, that a page is never evicted for the sake of its own way up, and that what is fetched
ahead of time drives out only copies used later, and only those that cost no write.
"""

from __future__ import annotations

from contextlib import closing

from swap.requests import Priority
from tiermem.memory.tiers import Tier
from tiermem.pager.page import Page
from tiermem.pager.residency import Residency


class Room:
    """Makes room. Used on the pager's loop only."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency

    def unheld(self, tier: Tier) -> int:
        """Bytes that evicting everything evictable would leave free: all but leased and failed pages."""
        census = self._residency.census
        return self._residency.chain.capacity(tier) - census.held[tier] - census.stuck[tier]

    def make(self, page: Page, tier: Tier, *, spare: Page | None = None) -> bool:
        """Reserve a frame for a demanded `page`, evicting what is used last; False: not yet, or not at all.

        What must be written first is sent off, as much as is needed and not already leaving. `spare` is the page for
        whose sake room is made; it is on its way up and must not be evicted for that
        unless there is no other way.
        """
        residency = self._residency
        if residency.allocate(page, tier):
            return True
        unheld = self.unheld(tier)
        if unheld < page.room:
            return False
        if spare is not None and tier in spare.frames and unheld - spare.room < page.room:
            spare = None  # it stands in its own way: it has to make room and come again
        return self._clear(page, tier, spare) and residency.allocate(page, tier)

    def prepare(self, page: Page, tier: Tier) -> bool:
        """Have what must be written down before `page` can come to `tier` written, but reserve nothing yet.

        Asked before a page is brought to a tier on its way: what has to leave goes through that tier too, and two that
        wait for each other's place there would change places for ever.
        """
        return self._clear(page, tier, spare=None, drop=False)

    def _clear(self, page: Page, tier: Tier, spare: Page | None, *, drop: bool = True) -> bool:
        """Drop what is used last until `page` fits, all or nothing; send off what must be written down for that."""
        residency, census = self._residency, self._residency.census
        room = residency.chain.capacity(tier) - residency.chain.arenas[tier].reserved
        going: list[Page] = []
        with closing(census.victims(tier)) as victims:
            for _, victim in victims:
                if room + census.leaving[tier] >= page.room:
                    break
                if victim is spare or victim.leases.get(tier):
                    continue
                if victim.is_dirty_on(tier):
                    self.send_off(victim, tier, spare=page)
                else:
                    going.append(victim)
                    room += victim.frames[tier].nbytes
        if room < page.room or any(victim.is_dirty_on(tier) or victim.move is not None for victim in going):
            return False  # or: what was sent down has driven out the copy below one of these, or sends it down itself
        for victim in going if drop else ():
            residency.drop(victim, tier)
        return True

    def make_ahead(self, page: Page, tier: Tier, use: int) -> bool:
        """Reserve a frame for a page needed at position `use`, dropping only copies that are needed later."""
        residency = self._residency
        if residency.allocate(page, tier):
            return True
        missing = page.room - (residency.chain.capacity(tier) - residency.chain.arenas[tier].reserved)
        farther = []
        with closing(residency.census.droppable(tier)) as candidates:
            for next_use, victim in candidates:
                if next_use <= use or missing <= 0:
                    break
                farther.append(victim)
                missing -= victim.frames[tier].nbytes
        if missing > 0:
            return False
        for victim in farther:
            residency.drop(victim, tier)
        return residency.allocate(page, tier)

    def send_off(self, page: Page, tier: Tier, *, spare: Page | None = None) -> bool:
        """Start writing a page's lowest copy to the tier below, if that has room for it."""
        residency = self._residency
        target = residency.chain.towards(tier, Tier.SWAP)
        if target is not Tier.SWAP and not self.make(page, target, spare=spare):
            return False
        residency.start_move(page, target, Priority.WRITE_BACK)
        return True
