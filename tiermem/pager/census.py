"""Which pages can give up their room, and how many bytes are held, dirty, leaving or stuck on each tier.

Owns what is derived from the facts of all pages: sums of bytes and the two orders of eviction per tier (copies that
may simply be dropped, and copies that must be written down first). Does not change a page and decides nothing.
Guarantees that noting a page takes constant time, that a look takes logarithmic time for each page noted since, however
many pages there are, and that an entry of a page which has changed since is never handed out.

Nothing is reckoned before somebody asks: a page changes several times on its way through a lease, and where everything
fits nobody ever asks whom to evict.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from tiermem.memory.tiers import Tier
from tiermem.pager.page import Page
from tiermem.pager.policy import FarthestFirst

# What a copy adds to.
_OTHER, _HELD, _STUCK, _DIRTY, _LEAVING = range(5)


class _Ledger:
    """What is known of one tier.

    Attributes:
        totals: bytes of all copies by what they add to.
        noted: of each page which of the totals it adds to and how many bytes.
        droppable, writable: the orders of eviction.
        unordered: pages that belong into one of the orders since they changed; whether into `writable`.
        away: pages that have contents but neither a frame on the tier nor an error.
    """

    __slots__ = ("away", "droppable", "noted", "totals", "unordered", "writable")

    def __init__(self) -> None:
        self.totals = [0] * (_LEAVING + 1)
        self.noted: dict[Page, tuple[int, int]] = {}
        self.droppable, self.writable = FarthestFirst(), FarthestFirst()
        self.unordered: dict[Page, bool] = {}
        self.away: set[Page] = set()


class Census:
    """Derived knowledge about all pages, kept up to date by `note`."""

    def __init__(self, tiers: Sequence[Tier], next_use: Callable[[Page, Tier], int]) -> None:
        self._next_use = next_use
        self._tiers = {tier: _Ledger() for tier in tiers}
        self._each = tuple(self._tiers.items())
        self._away = [(tier, ledger.away) for tier, ledger in self._tiers.items()]
        self._changed: dict[Page, None] = {}

    def note(self, page: Page) -> None:
        """The facts of the page have changed."""
        page.stamp += 1
        self._changed[page] = None
        usable = page.valid and page.error is None
        for tier, away in self._away:
            if usable and tier not in page.frames:
                away.add(page)
            else:
                away.discard(page)

    def held(self, tier: Tier) -> int:
        """Bytes of leased copies."""
        return self._reckoned(tier).totals[_HELD]

    def fixed(self, tier: Tier) -> int:
        """Bytes leased, and those that never leave: of failed pages, so that nothing is lost, and of kept ones."""
        totals = self._reckoned(tier).totals
        return totals[_HELD] + totals[_STUCK]

    def dirty(self, tier: Tier) -> int:
        """Bytes of copies that are the lowest of their page and that nobody holds or moves."""
        return self._reckoned(tier).totals[_DIRTY]

    def leaving(self, tier: Tier) -> int:
        """Bytes of copies being written down that nobody holds: room that is about to be free."""
        return self._reckoned(tier).totals[_LEAVING]

    def has_away(self, tier: Tier) -> bool:
        """Whether a page has contents but neither a frame on the tier nor an error."""
        return bool(self._tiers[tier].away)

    def away_nbytes(self, tier: Tier) -> int:
        """Bytes of such pages; walks over them."""
        return sum(page.room for page in self._tiers[tier].away)

    def forget_order(self) -> None:
        """Empty the orders of eviction; every page in memory must be noted again."""
        for ledger in self._tiers.values():
            ledger.droppable.clear()
            ledger.writable.clear()
            ledger.unordered.clear()

    def droppable(self, tier: Tier) -> Generator[tuple[int, Page], None, None]:
        """(next use, page) whose copy on `tier` is held by nobody and need not be written, farthest next use first.

        It is valid elsewhere, or at home on the DEVICE.
        """
        return self._walk(tier, self._tiers[tier].droppable)

    def writable(self, tier: Tier) -> Generator[tuple[int, Page], None, None]:
        """(next use, page) whose lowest copy is on `tier`, held by nobody, and could be written down now."""
        return self._walk(tier, self._tiers[tier].writable)

    def farthest_writable(self, tier: Tier) -> int:
        """The next use of the first that `writable` would hand out; -1 when there is none."""
        farthest = self._ordered(tier).writable.farthest()
        return -1 if farthest is None else farthest

    def victims(self, tier: Tier) -> Generator[tuple[int, Page], None, None]:
        """(next use, page) that could leave `tier`, at once or after a write, farthest next use first."""
        return self._walk(tier, self._tiers[tier].droppable, self._tiers[tier].writable)

    def _walk(self, tier: Tier, *queues: FarthestFirst) -> Generator[tuple[int, Page], None, None]:
        """Whoever stops early closes the generator; what was left as it is stays in its queue."""
        met: list[tuple[FarthestFirst, int, Page, int]] = []
        try:
            while True:
                self._ordered(tier)
                best, farthest = None, 0
                for queue in queues:
                    use = queue.farthest()
                    if use is not None and (best is None or use > farthest):
                        best, farthest = queue, use
                if best is None:
                    return
                use, page = best.pop()
                met.append((best, use, page, page.stamp))
                yield use, page
        finally:
            for queue, use, page, stamp in met:
                if page.stamp == stamp:
                    queue.push(page, next_use=use)

    def _ordered(self, tier: Tier) -> _Ledger:
        """The tier with its orders up to date."""
        ledger = self._reckoned(tier) if self._changed else self._tiers[tier]
        if ledger.unordered:
            next_use, droppable, writable = self._next_use, ledger.droppable, ledger.writable
            for page, lowest in ledger.unordered.items():
                (writable if lowest else droppable).push(page, next_use=next_use(page, tier))
            ledger.unordered.clear()
        return ledger

    def _reckoned(self, tier: Tier) -> _Ledger:
        """The tier with its sums up to date."""
        if self._changed:
            tiers = self._each
            for page in self._changed:
                valid = page.valid
                lowest = Tier.SWAP if Tier.SWAP in valid else min(valid) if valid else None
                for each, ledger in tiers:
                    _reckon(page, each, ledger, lowest)
            self._changed.clear()
        return self._tiers[tier]


def _reckon(page: Page, tier: Tier, ledger: _Ledger, lowest_tier: Tier | None) -> None:
    """Take the facts of a page on a tier over into its sums, and note where it belongs in the orders."""
    if page in ledger.unordered:
        del ledger.unordered[page]
    totals, noted, frames = ledger.totals, ledger.noted, page.frames
    if page in noted:
        before, nbytes = noted[page]
        totals[before] -= nbytes
    if tier not in frames:  # whatever is valid or moves on a tier has its frame there
        if page in noted:
            del noted[page]
        return
    frame = frames[tier]
    move, failed, lowest = page.move, page.error is not None, lowest_tier is tier
    leased = tier in page.leases
    free = move is None and not failed and not page.exclusive and tier in page.valid
    # The lowest copy of a page at home on the DEVICE: there, or below it where it may go as it is.
    rests = page.home is Tier.DEVICE and lowest and (tier is Tier.DEVICE or page.is_spare_on(tier))
    if leased:
        which = _HELD
    elif failed or (page.home is Tier.HOST is tier):
        which = _STUCK
    elif free and lowest and not rests:
        which = _DIRTY
    elif move is not None and move.source is tier and move.target < tier:
        which = _LEAVING
    else:
        which = _OTHER
    nbytes = frame.nbytes
    totals[which] += nbytes
    noted[page] = which, nbytes
    if free and not leased and which is not _STUCK:
        ledger.unordered[page] = lowest and not rests
