"""Protection: the bytes that pages had before they are changed, kept in SWAP until it is known whether they count.

Owns which pages were protected since it was opened, and whether it is still open. Does not know what changes the pages,
nor how SWAP keeps two copies of one. Guarantees that a page which was protected can be given back the bytes it had, as
long as it is open, that taking them back leaves no trace of later bytes on any tier, and that confirming costs no I/O.

    closed <-- confirm -- open -- revert --> closed
                          | ^
                          +-+ protect: written down where only memory has the bytes; from then on the copy is kept

Used on the pager's loop, `confirm` excepted. A page is protected while nobody holds it for writing, and reverted when
nobody holds it at all.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from tiermem.errors import InvariantError, again
from tiermem.memory.tiers import Tier
from tiermem.pager.page import PageKey
from tiermem.pager.residency import Residency
from tiermem.pager.service import Service


class Copies(Protocol):
    """Keeps copies in SWAP from being overwritten; `Extents.keep` makes one."""

    def protect(self, key: PageKey) -> None:
        """The copy that SWAP has now stays as it is. Called once for a key, while no write of it is under way."""

    def restore(self, key: PageKey) -> None:
        """The copy that was protected is the current one again; without one, the page was never written."""

    def release(self) -> None:
        """Nothing is kept any more."""


class Protection:
    """Pages whose old bytes are kept; made by `Pager.protection`."""

    def __init__(
        self,
        residency: Residency,
        service: Service,
        copies: Copies,
        post: Callable[[Callable[[], None]], bool],
        next_event: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """`post(function)`: run a function on the loop, and have the service look at everything after it.

        `next_event()`: see `saving.save`.
        """
        self._residency = residency
        self._service = service
        self._copies = copies
        self._post = post
        self._next_event = next_event
        self._open = True
        self._protected: dict[PageKey, bool] = {}  # whether it had contents
        self._discarded: list[PageKey] = []
        service.homes.protects = True

    def prepare(self, keys: Sequence[PageKey]) -> None:
        """Start to write down what only memory has of these pages, since they will be protected."""
        for key in keys if self._open else ():
            if key not in self._protected:
                self._service.save(self._residency.page(key))

    async def protect(self, keys: Sequence[PageKey]) -> None:
        """Until the present bytes of these pages are kept; at once if it is closed. Raises the error of a page."""
        for key in keys:
            page = self._residency.page(key)
            while self._open and key not in self._protected:
                if page.error is not None:
                    raise again(page.error) from page.error
                if page.exclusive:
                    raise InvariantError(f"{key}: to be protected while it is being written; this is a bug in tiermem")
                if not page.is_written or Tier.SWAP in page.valid:
                    if page.is_written:
                        self._copies.protect(key)
                    self._protected[key] = page.is_written
                else:
                    self._service.save(page)
                    await self._next_event()

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Forget these pages as soon as they cannot be needed for a redo, which is when this is confirmed."""
        if self._open:
            self._discarded.extend(keys)
        else:
            for key in keys:
                self._residency.discard(self._residency.page(key))

    def confirm(self) -> None:
        """The new bytes count. Any thread; does not wait."""
        self._post(self._confirm)

    async def revert(self) -> None:
        """Wait until every page has the bytes it had when it was protected; what moves is waited for, leases are not.

        A page that has failed stays failed. Raises InvariantError if a page is leased.
        """
        self._open = False
        for key, existed in self._protected.items():
            page = self._residency.page(key)
            while page.move is not None:
                page.move.promote()
                await self._next_event()
            if page.error is None:
                self._residency.revert(page, existed=existed)
                self._copies.restore(key)
        self._copies.release()
        self._protected.clear()
        self._residency.forecast.set_agenda([])
        self._residency.reclassify()
        self._post(lambda: None)  # there is room now, and whoever asked meanwhile may be waiting for it

    def _confirm(self) -> None:
        if not self._open:
            return  # said twice, the first time before an interrupt
        self._open = False
        self._copies.release()
        self._protected.clear()
        self.discard(self._discarded)
