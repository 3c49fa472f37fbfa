"""Making room on a tier: whom to evict, and what must be written down before.

Owns no state; drives `Residency` with the orders of its census. Does not know requests or schedules. Guarantees that a
leased copy is never touched, that a page is never evicted for the sake of its own way up, and that what is fetched
ahead of time drives out only copies used later, and only those that cost no write.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from contextlib import closing

from swap.requests import Priority
from tiermem.memory.tiers import Tier
from tiermem.pager.homes import Homes
from tiermem.pager.page import Page
from tiermem.pager.residency import Residency


class Room:
    """Makes room. Used on the pager's loop only.

    Attributes:
        homes: which pages are at home on the DEVICE; one that has to leave it is not until the next step.
    """

    def __init__(self, residency: Residency) -> None:
        self.homes = Homes(residency)
        self._residency = residency

    def unheld(self, tier: Tier) -> int:
        """Bytes that evicting everything evictable would leave free: all but leased, failed and kept pages."""
        return self._residency.chain.capacity(tier) - self._residency.census.fixed(tier)

    def is_scattered(self, page: Page, tier: Tier) -> bool:
        """Whether evicting everything evictable would leave room enough for `page`, but not in one piece."""
        return self.unheld(tier) >= page.room and not self._choose(page, tier, ())[1]

    def make(self, page: Page, tier: Tier, *, spare: Page | None = None) -> bool:
        """Reserve a frame for a demanded `page`, evicting what is used last; False: not yet, or not at all.

        What must be written first is sent off, as much as is needed and not already leaving. `spare` is the page for
        whose sake room is made; it is on its way up and must not be evicted for that unless there is no other way.
        """
        residency = self._residency
        if residency.allocate(page, tier):
            return True
        unheld = self.unheld(tier)
        if unheld < page.room:
            return False
        if spare is not None and tier in spare.frames and unheld - spare.room < page.room:
            spare = None  # it stands in its own way: it has to make room and come again
        if self._clear(page, tier, spare):
            return residency.allocate(page, tier)
        # Room enough, but not in one piece: only where nothing else moves may it be the page itself that lies between.
        alone = spare is not None and not residency.moves
        return alone and self._clear(page, tier, spare=None) and residency.allocate(page, tier)

    def prepare(self, page: Page, tier: Tier) -> bool:
        """Have what must be written down before `page` can come to `tier` written, but reserve nothing yet.

        Asked before a page is brought to a tier on its way: what has to leave goes through that tier too, and two that
        wait for each other's place there would change places for ever.
        """
        return self._clear(page, tier, spare=None, drop=False)

    def _clear(self, page: Page, tier: Tier, spare: Page | None, *, drop: bool = True) -> bool:
        """Drop what is used last until `page` fits, all or nothing; send off what must be written down for that.

        The place is chosen first, and nothing beside it is written: what stays after all would be written in vain.
        """
        barred = {spare}
        while True:
            chosen, fits = self._choose(page, tier, barred)
            dirty = [victim for victim in chosen if victim.is_dirty_on(tier)]
            refused = [victim for victim in dirty if not self._send_away(victim, tier, page)]
            if not refused:
                break
            barred.update(refused)  # without room below they stay: perhaps there is another place
        if not fits or dirty:
            return False  # what was sent down has yet to arrive, and may have changed what is below the others
        for victim in chosen if drop else ():
            self._residency.drop(victim, tier)
        return True

    def _choose(self, page: Page, tier: Tier, barred: Collection[Page | None]) -> tuple[list[Page], bool]:
        """Which copies have to go, used last as far as can be, and whether `page` fits then (see `_first_ones`)."""
        census = self._residency.census
        with closing(census.victims(tier)) as victims:
            candidates = (victim for _, victim in victims if victim not in barred)
            return self._first_ones(page, tier, candidates, leaving=census.leaving(tier))

    def _first_ones(
        self, page: Page, tier: Tier, candidates: Iterable[Page], *, leaving: int = 0
    ) -> tuple[list[Page], bool]:
        """Which copies have to go, the first candidates as far as can be, and whether `page` fits then.

        None where those and the bytes that are `leaving` may do together. Where they do not make room enough, all of
        them: once what is on its way up can go, too, they will have to.
        """
        chain = self._residency.chain
        room = chain.capacity(tier) - chain.arenas[tier].reserved
        going: list[Page] = []
        look_at = 0  # where room is not in one piece, the question is asked again when there are twice as many to go
        for victim in candidates:
            if room + leaving >= page.room:
                if leaving:
                    break
                if len(going) >= look_at:
                    look_at = 2 * len(going) + 1
                    chosen = self._clearing(page, tier, going)
                    if chosen is not None:
                        return chosen, True
            going.append(victim)
            room += victim.frames[tier].nbytes
        if room + leaving < page.room:
            return going, False
        chosen = self._clearing(page, tier, going) if room >= page.room else None
        return chosen or [], chosen is not None

    def _send_away(self, victim: Page, tier: Tier, page: Page) -> bool:
        """Have a victim written down so that it can go; False: there is no room for it below."""
        self.homes.displace(victim)
        return self.send_off(victim, tier, spare=page)

    def _clearing(self, page: Page, tier: Tier, going: list[Page]) -> list[Page] | None:
        """Which of the copies that may go have to, for `page` to fit in one piece; None: even all of them do not do."""
        owners = {id(victim.frames[tier]): victim for victim in going}
        frames = [victim.frames[tier] for victim in going]
        chosen = self._residency.chain.arenas[tier].clearing(page.nbytes, frames)
        return None if chosen is None else [owners[id(frame)] for frame in chosen]

    def make_ahead(self, page: Page, tier: Tier, use: int) -> bool:
        """Reserve a frame for a page needed at position `use`, dropping only copies that are needed later."""
        residency = self._residency
        if residency.allocate(page, tier):
            return True
        with closing(residency.census.droppable(tier)) as droppable:
            farther = itertools.takewhile(lambda candidate: candidate[0] > use, droppable)
            # What is dirty and droppable all the same is at home there.
            clean = (victim for _, victim in farther if not victim.is_dirty_on(tier))
            chosen, fits = self._first_ones(page, tier, clean)
        if not fits:
            return False
        for victim in chosen:
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
