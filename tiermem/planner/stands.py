"""Stand-ins for what holds and moves bytes: arenas that count, edges whose transfers take the time of their line.

Owns no decision and no bytes. Does not know pages but for their sizes. Guarantees that no more is reserved than there
is, and that every transfer tells its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tiermem.memory.arena import Fence, first_ones, rounded
from tiermem.memory.copies import Done
from tiermem.pager.page import Page
from tiermem.planner.lines import Transfer


class _Frame:
    """Bytes of a simulated arena."""

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def fence(self, fence: Fence | None) -> None:
        """Nothing runs behind the simulation's back: what it computes has ended when the lease is given back."""


class SimulatedArena:
    """Counts bytes; without fragmentation, which host memory alone does not have either, but a device does."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved = 0
        self.high_water = 0

    def allocate(self, nbytes: int) -> Any:
        """A frame, or None if there is no room."""
        room = rounded(nbytes)
        if self.reserved + room > self.capacity:
            return None
        self.reserved += room
        self.high_water = max(self.high_water, self.reserved)
        return _Frame(room)

    def free(self, frame: Any) -> None:
        """Give a frame back."""
        self.reserved -= frame.nbytes

    def clearing(self, nbytes: int, candidates: Sequence[Any]) -> list[Any] | None:
        """See `memory.arena.Arena`: the first ones, as many as there are bytes missing."""
        return first_ones(candidates, rounded(nbytes) - (self.capacity - self.reserved))


class SimulatedEdge:
    """An edge whose transfers take the time of their line."""

    def __init__(self, start: Callable[[int, int, Callable[[], None]], Transfer]) -> None:
        self._start = start

    def start(self, page: Page, priority: int, done: Done) -> Transfer:
        """See `pager.edges.Edge`."""
        return self._start(page.nbytes, int(priority), lambda: done(None))
