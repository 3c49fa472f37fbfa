"""Which pages can give up their room, and how many bytes are held, dirty, leaving or stuck on each tier.

Owns what is derived from the facts of all pages: sums of bytes and the two orders of eviction per tier (copies that
may simply be dropped, and copies that must be written down first). Does not change a page and decides nothing.
Guarantees that noting a page costs a logarithm however many pages there are, and that an entry of a page which has
changed since is never handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from tiermem.memory.tiers import Tier
from tiermem.pager.page import Page
from tiermem.pager.policy import FarthestFirst

# Of one page on one tier: bytes held, stuck, unsaved, dirty, leaving, away.
_Sums = tuple[int, int, int, int, int, int]
_NOTHING: _Sums = (0, 0, 0, 0, 0, 0)


class Census:
    """Derived knowledge about all pages, kept up to date by `note`.

    Attributes:
        held: bytes leased.
        dirty: bytes of copies that are the lowest of their page and that nobody holds or moves.
        leaving: bytes of copies being written down that nobody holds: room that is about to be free.
        stuck: bytes of failed pages: they stay, so that nothing is lost by making room.
        unsaved: bytes of pages, held or not, that have no valid copy in SWAP yet, on the tier of their lowest copy.
        away: bytes of pages that have contents but neither a frame on the tier nor an error.
        changes: how often the facts of any page have changed.
    """

    def __init__(self, tiers: Sequence[Tier], next_use: Callable[[Page, Tier], int]) -> None:
        self.held = dict.fromkeys(tiers, 0)
        self.stuck = dict.fromkeys(tiers, 0)
        self.unsaved = dict.fromkeys(tiers, 0)
        self.dirty = dict.fromkeys(tiers, 0)
        self.leaving = dict.fromkeys(tiers, 0)
        self.away = dict.fromkeys(tiers, 0)
        self._totals = (self.held, self.stuck, self.unsaved, self.dirty, self.leaving, self.away)
        self._noted: dict[Tier, dict[Page, _Sums]] = {tier: {} for tier in tiers}
        self.changes = 0
        self._next_use = next_use
        self._droppable = {tier: FarthestFirst() for tier in tiers}
        self._writable = {tier: FarthestFirst() for tier in tiers}

    def note(self, page: Page) -> None:
        """The facts of the page have changed."""
        page.stamp += 1
        self.changes += 1
        failed, move, lowest_tier = page.error is not None, page.move, min(page.valid, default=None)
        for tier in self._droppable:
            frame = page.frames.get(tier)
            if frame is None:  # whatever is valid or moves on a tier has its frame there
                self._sum(tier, page, (0, 0, 0, 0, 0, 0 if failed or lowest_tier is None else page.room))
                continue
            nbytes, lowest = frame.nbytes, lowest_tier == tier
            leased = bool(page.leases.get(tier))
            free = tier in page.valid and not failed and move is None and not page.exclusive
            leaves = move is not None and move.is_write_back and move.source is tier
            sums = (
                nbytes if leased else 0,
                nbytes if failed and not leased else 0,
                nbytes if lowest and not failed and not page.doomed else 0,
                nbytes if free and lowest and not leased else 0,
                nbytes if leaves and not leased and not failed else 0,
                0,
            )
            self._sum(tier, page, sums)
            if free and (lowest or not leased):
                queue = self._writable[tier] if lowest else self._droppable[tier]
                queue.push(page, next_use=self._next_use(page, tier), stamp=page.stamp)

    def _sum(self, tier: Tier, page: Page, sums: _Sums) -> None:
        """What holds of the page on the tier now, in place of what was noted before."""
        noted = self._noted[tier]
        before = noted.get(page, _NOTHING)
        if sums == before:
            return
        for total, now, then in zip(self._totals, sums, before, strict=True):
            total[tier] += now - then
        if sums == _NOTHING:
            del noted[page]
        else:
            noted[page] = sums

    def forget_order(self) -> None:
        """Empty the orders of eviction; every page in memory must be noted again."""
        for queues in (self._droppable, self._writable):
            for tier in queues:
                queues[tier] = FarthestFirst()

    def droppable(self, tier: Tier) -> Generator[tuple[int, Page], None, None]:
        """(next use, page) whose copy on `tier` is valid elsewhere and held by nobody, farthest next use first."""
        return self._walk([self._droppable[tier]])

    def writable(self, tier: Tier) -> Generator[tuple[int, Page], None, None]:
        """(next use, page) whose lowest copy is on `tier` and could be written down now, leased or not."""
        return self._walk([self._writable[tier]])

    def victims(self, tier: Tier) -> Generator[tuple[int, Page], None, None]:
        """(next use, page) that could leave `tier`, at once or after a write, farthest next use first."""
        return self._walk([self._droppable[tier], self._writable[tier]])

    @staticmethod
    def _walk(queues: Sequence[FarthestFirst]) -> Generator[tuple[int, Page], None, None]:
        """Whoever stops early closes the generator; what was left as it is stays in its queue."""
        met: list[tuple[FarthestFirst, int, Page, int]] = []
        try:
            while tops := [(use, queue) for queue in queues if (use := queue.farthest()) is not None]:
                queue = max(tops, key=lambda top: top[0])[1]
                use, page = queue.pop()
                met.append((queue, use, page, page.stamp))
                yield use, page
        finally:
            for queue, use, page, stamp in met:
                if page.stamp == stamp:
                    queue.push(page, next_use=use, stamp=stamp)
