"""What to fetch ahead, what to evict, what to write back early: decisions only.

Owns the two queues that order candidates by next use and the pure choice of what to fetch ahead. Does not move or free
anything. Guarantees that the candidate evicted first is the one used last (Belady, "A study of replacement algorithms
for virtual-storage computers", 1966), and that nothing is fetched ahead at the price of a page needed sooner or of the
room that the largest demand may claim.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tiermem.pager.page import PageKey


@dataclass(frozen=True, slots=True)
class Candidate:
    """A coming access as the read-ahead sees it.

    Attributes:
        key: the page.
        nbytes: bytes it takes on the tier.
        present: whether the tier holds it already, or a move to it is under way.
        readable: whether there is something below that could be fetched.
        leased: whether its bytes are counted as held already.
    """

    key: PageKey
    nbytes: int
    present: bool
    readable: bool
    leased: bool


def choose_read_ahead(
    coming: Iterable[Candidate], *, capacity: int, held: int, reserve: int, look_ahead: int
) -> list[PageKey]:
    """The pages to start fetching now, nearest use first.

    Walks the coming accesses in order and adds up what has to stay: the leased bytes (`held`), every page met on the
    way, and `reserve` for the largest single demand. Stops at the first page that does not fit into `capacity` (bytes)
    or lies further ahead than `look_ahead` bytes. What lies behind that point may be evicted for it.
    """
    chosen: list[PageKey] = []
    seen: set[PageKey] = set()
    kept = held + reserve
    ahead = 0
    for candidate in coming:
        if candidate.key in seen:
            continue
        seen.add(candidate.key)
        if candidate.leased:
            continue
        kept += candidate.nbytes
        ahead += candidate.nbytes
        if kept > capacity or ahead > look_ahead:
            break
        if candidate.readable and not candidate.present:
            chosen.append(candidate.key)
    return chosen


class FarthestFirst:
    """Pages ordered by next use, the farthest first; an entry whose stamp has passed is forgotten when met.

    A page is pushed when it becomes a candidate and simply outdated (by raising its stamp) when it stops being one, so
    that each step costs a logarithm however many pages there are.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, PageKey, int]] = []
        self._pushes = 0

    def push(self, key: PageKey, *, next_use: int, stamp: int) -> None:
        """Add a candidate."""
        self._pushes += 1
        heapq.heappush(self._heap, (-next_use, self._pushes, key, stamp))

    def pop(self) -> tuple[int, PageKey, int] | None:
        """The farthest entry as (next use, key, stamp), outdated or not; None when empty."""
        if not self._heap:
            return None
        use, _, key, stamp = heapq.heappop(self._heap)
        return -use, key, stamp

    def forget(self, outdated: Callable[[PageKey, int], bool]) -> None:
        """Remove the entries for which `outdated(key, stamp)` holds."""
        self._heap = [entry for entry in self._heap if not outdated(entry[2], entry[3])]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)
