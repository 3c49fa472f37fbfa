"""Which parameters are at home on the DEVICE: their copy there is enough, and what lies below it may go unwritten.

Owns the answer, step by step: what the plan says, less the pages that had to leave the DEVICE all the same, and less
all of them while updates are protected, which writes them down in any case. Does not move anything. Guarantees that a
page which had to leave does not come and go within a step: until the next one begins it is a page like any other.
"""

from __future__ import annotations

from tiermem.memory.tiers import Tier
from tiermem.pager.page import Kind, Page
from tiermem.pager.residency import Residency


class Homes:
    """Used on the pager's loop, `protects` excepted.

    Attributes:
        protects: whether pages were written down before their update, so that it can be undone, in this step.
    """

    def __init__(self, residency: Residency) -> None:
        self.protects = False
        self._residency = residency
        self._planned = False  # by the plan that is followed
        self._there = False  # as it is in this step
        self._displaced: set[Page] = set()

    def follow(self, *, at_home: bool) -> None:
        """Go by another plan, which has parameters on the DEVICE all the time (`at_home`) or not."""
        self._planned = at_home
        self._settle(there=at_home and not self.protects)

    def begin_step(self) -> None:
        """Whoever was displaced is at home again; and so are all of them, unless the step before was protected."""
        there, self.protects = self._planned and not self.protects, False
        if there is not self._there:
            self._settle(there=there)
            return
        for page in self._displaced:
            page.home = Tier.DEVICE
            self._residency.census.note(page)
        self._displaced.clear()

    def displace(self, page: Page) -> None:
        """The page has to leave the DEVICE."""
        if page.home is Tier.DEVICE:
            page.home = None
            self._displaced.add(page)
            self._residency.census.note(page)

    def _settle(self, *, there: bool) -> None:
        """All of them are at home on the DEVICE, or none is; but for those that are kept below it, or settled on it."""
        self._there = there
        self._displaced.clear()
        chain = self._residency.chain
        for key, page in self._residency.pages.items():
            if key.kind is Kind.PARAM and not page.kept and not chain.settles(key):
                home = Tier.DEVICE if there else None
                if page.home is not home:
                    page.home = home
                    self._residency.census.note(page)
