"""The check of the invariants I1 to I5 over all pages and tiers.

Owns nothing; reads what the residency owns. Does not repair anything. Guarantees that a broken rule is named with the
page or tier that breaks it. Costs a walk over all pages: for tests, and for whoever suspects a bug.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiermem.errors import InvariantError
from tiermem.memory.tiers import Tier
from tiermem.pager.census import Census
from tiermem.pager.edges import Chain
from tiermem.pager.page import Page


def check_invariants(pages: Iterable[Page], chain: Chain, census: Census, moves: int) -> None:
    """Raise InvariantError if a page or a tier breaks a rule of `tiermem.pager.residency`."""
    pages = list(pages)
    for page in pages:
        check_page(page)
    if moves != sum(page.move is not None for page in pages):
        raise InvariantError(f"I2: {moves} moves counted, {[str(page.key) for page in pages if page.move]} moving")
    for tier, arena in chain.arenas.items():
        framed = sum(page.frames[tier].nbytes for page in pages if tier in page.frames)
        held = sum(page.frames[tier].nbytes for page in pages if page.leases.get(tier))
        away = sum(page.room for page in pages if page.valid and tier not in page.frames and page.error is None)
        if away != census.away_nbytes(tier):
            counted = census.away_nbytes(tier)
            raise InvariantError(f"{tier.name}: {away} bytes of pages are not there, {counted} were counted")
        if framed != arena.reserved or arena.reserved > arena.capacity or held != census.held(tier):
            raise InvariantError(
                f"I5 {tier.name}: frames {framed}, reserved {arena.reserved}, capacity {arena.capacity}, "
                f"held {held} against {census.held(tier)} bytes"
            )


def check_page(page: Page) -> None:
    """Raise InvariantError if the page alone breaks a rule."""
    if any(tier not in page.frames for tier in page.valid if tier is not Tier.SWAP):
        raise InvariantError(f"I1 {page.key}: valid on {page.valid} but frames on {set(page.frames)}")
    if page.move is not None and (page.move.source not in page.valid or page.move.target in page.valid):
        raise InvariantError(f"I2 {page.key}: {page.move} with valid {page.valid}")
    leased = {tier for tier, count in page.leases.items() if count}
    if leased - set(page.frames) or (leased - page.valid and not page.exclusive):
        raise InvariantError(f"I3 {page.key}: leased {page.leases} with valid {page.valid}, frames {set(page.frames)}")
    if page.exclusive and (sum(page.leases.values()) != 1 or page.move is not None):
        raise InvariantError(f"I4 {page.key}: exclusive with {page.leases}, {page.move}, valid {page.valid}")
    awaited = {page.move.target} if page.move is not None else set()
    if set(page.frames) - page.valid - awaited - leased:
        raise InvariantError(f"I5 {page.key}: frames {set(page.frames)} neither valid {page.valid} nor awaited")
