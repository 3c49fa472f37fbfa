"""Updates that may be undone, in simulated time: the pager's own protection of pages, step after step.

Owns which protection counts now, and what waits for its end. Does not know units or schedules. Guarantees that pages
are protected by the very code that does it in training, so that what is written before an update is written here, too.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from tiermem.pager.page import PageKey
from tiermem.pager.protection import Protection
from tiermem.planner.clock import Signal
from tiermem.planner.world import World


class SimulatedUndo:
    """The protection of the step under way."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._protection: Protection | None = None

    def begin(self) -> Protection:
        """The protection of updates that begin now."""
        if self._protection is None:
            world = self._world
            self._protection = Protection(world.residency, world.service, _Unkept(), world.post, self._next_event)
        return self._protection

    def confirm(self) -> None:
        """Nothing of the step will be undone."""
        if self._protection is not None:
            self._protection.confirm()
            self._protection = None

    async def _next_event(self) -> None:
        await _Happening(self._world.pump.next)


def protect(protection: Protection, keys: Sequence[PageKey]) -> Generator[Signal, None, None]:
    """Wait until the present bytes of these pages are kept."""
    yield from protection.protect(keys).__await__()


class _Happening:
    """A coroutine waits for a signal as a simulated process does: what it is driven by gets the signal."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal

    def __await__(self) -> Generator[Signal, None, None]:
        yield self._signal


class _Unkept:
    """`pager.protection.Copies` where there are no bytes: nothing is overwritten, and no step undone."""

    def protect(self, key: PageKey) -> None:
        """See there."""

    def restore(self, key: PageKey) -> None:
        """See there."""

    def release(self) -> None:
        """See there."""
