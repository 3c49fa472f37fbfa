"""Having pages written down because somebody wants them in SWAP, not because room is needed.

Owns the way there for all pages of some kinds, and something to be done at the instant when SWAP holds them. Does not
know who asks. Guarantees that readers go on, and that a failed page is an error. On the pager's loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

from tiermem.errors import again
from tiermem.memory.tiers import Tier
from tiermem.pager.page import Kind, Page
from tiermem.pager.residency import Residency
from tiermem.pager.service import Service

T = TypeVar("T")


async def save(
    residency: Residency,
    service: Service,
    kinds: Collection[Kind],
    then: Callable[[], T],
    next_event: Callable[[], Coroutine[Any, Any, None]],
) -> T:
    """Until SWAP holds every page of these kinds; see `Pager.start_save`.

    `next_event()`: wait until something has happened and all that could be done about it has been started.
    """
    while unsaved := _unsaved(residency, kinds):
        for page in unsaved:  # all at once: the drive's queue is the place to wait in
            service.save(page)
        for page in unsaved:
            # Again before each wait: what kept it (a copy to the device, a writer) may have ended meanwhile.
            while _is_unsaved(page, service):
                await next_event()
    return then()


def _is_unsaved(page: Page, service: Service) -> bool:
    """Start writing the page down if that can be done now; whether that is still to be waited for."""
    service.save(page)
    return bool(page.valid) and Tier.SWAP not in page.valid and page.error is None


def _unsaved(residency: Residency, kinds: Collection[Kind]) -> list[Page]:
    found = [page for page in residency.pages.values() if page.key.kind in kinds and page.valid]
    for page in found:
        if page.error is not None:
            raise again(page.error) from page.error
    return [page for page in found if Tier.SWAP not in page.valid]
