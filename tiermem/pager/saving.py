"""Having pages written down because somebody wants them in SWAP, not because room is needed.

Owns the orders: some kinds of pages and something to be done at the instant when SWAP holds them all (`save`), or pages
one by one whose bytes may be wanted back (`protection`). Does not know who asks.
Guarantees that readers go on, and that a failed page is an error. On the pager's loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tiermem.errors import again
from tiermem.memory.tiers import Tier
from tiermem.pager.page import Kind, Page
from tiermem.pager.protection import Copies, Protection
from tiermem.pager.residency import Residency
from tiermem.pager.service import Service

T = TypeVar("T")


class Saving:
    """Writes pages down and waits for it."""

    def __init__(
        self,
        residency: Residency,
        service: Service,
        post: Callable[[Callable[[], None]], bool],
        next_event: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """`post(function)`: run a function on the loop, and have the service look at everything after it.

        `next_event()`: wait until something has happened and all that could be done about it has been started.
        """
        self._post = post
        self._residency = residency
        self._service = service
        self._next_event = next_event

    async def save(self, kinds: frozenset[Kind], then: Callable[[], T]) -> T:
        """Until SWAP holds every page of these kinds; see `Pager.start_save`."""
        while unsaved := self._unsaved(kinds):
            for page in unsaved:  # all at once: the drive's queue is the place to wait in
                self._service.save(page)
            for page in unsaved:
                # Again before each wait: what kept it (a copy to the device, a writer) may have ended meanwhile.
                while self._is_unsaved(page):
                    await self._next_event()
        return then()

    def protection(self, copies: Copies) -> Protection:
        """An open protection of no page yet; see there. Any thread."""
        return Protection(self._residency, self._service, copies, self._post, self._next_event)

    def _is_unsaved(self, page: Page) -> bool:
        """Start writing the page down if that can be done now; whether that is still to be waited for."""
        self._service.save(page)
        return bool(page.valid) and Tier.SWAP not in page.valid and page.error is None

    def _unsaved(self, kinds: frozenset[Kind]) -> list[Page]:
        found = [page for page in self._residency.pages.values() if page.key.kind in kinds and page.valid]
        for page in found:
            if page.error is not None:
                raise again(page.error) from page.error
        return [page for page in found if Tier.SWAP not in page.valid]
