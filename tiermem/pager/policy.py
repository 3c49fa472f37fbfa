"""What to fetch ahead, and what to evict first: decisions only.

Owns the queue that orders candidates by next use and the pure choice of what to fetch ahead. Does not move or free
anything. Guarantees that the candidate evicted first is the one used last (Belady, "A study of replacement algorithms
for virtual-storage computers", 1966), and that nothing is fetched ahead at the price of a page needed sooner or of the
room that the largest demand may claim.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from tiermem.pager.page import Page, PageKey

# A queue shorter than this is not worth tidying; a longer one is rid of its outdated entries when it has doubled.
_TIDY_AT = 512


def choose_read_ahead(
    coming: Iterable[tuple[PageKey, int, bool]], *, capacity: int, held: int, reserve: int, look_ahead: int
) -> list[PageKey]:
    """The pages to start fetching now, nearest use first.

    An access is a page, the bytes it takes on the tier, and whether the tier holds it already or a move to it is under
    way. Walks the coming ones in order (each page once, and none that is leased) and adds up what has to stay: the
    leased bytes (`held`), every page met on the way, and `reserve` for the largest single demand. Stops at the first
    page that does not fit into `capacity` (bytes) or lies further ahead than `look_ahead` bytes. What lies beyond that
    point may be evicted for it.
    """
    chosen: list[PageKey] = []
    left = min(look_ahead, capacity - held - reserve)
    for key, nbytes, present in coming:
        left -= nbytes
        if left < 0:
            break
        if not present:
            chosen.append(key)
    return chosen


class FarthestFirst:
    """Pages ordered by next use, the farthest first; an entry whose stamp has passed is forgotten when met.

    A page is pushed when it becomes a candidate and simply outdated (by raising its stamp) when it stops being one, so
    that each step costs a logarithm however many pages there are.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Page, int]] = []
        self._pushes = 0
        self._tidy_at = _TIDY_AT

    def push(self, page: Page, *, next_use: int) -> None:
        """Add a candidate, as it is now."""
        self._pushes += 1
        heapq.heappush(self._heap, (-next_use, self._pushes, page, page.stamp))
        if len(self._heap) >= self._tidy_at:
            self._heap = [entry for entry in self._heap if entry[2].stamp == entry[3]]
            heapq.heapify(self._heap)
            self._tidy_at = max(_TIDY_AT, 2 * len(self._heap))

    def clear(self) -> None:
        """Forget all candidates."""
        self._heap.clear()

    def farthest(self) -> int | None:
        """The next use of the farthest candidate; None when there is none."""
        heap = self._heap
        while heap and heap[0][2].stamp != heap[0][3]:
            heapq.heappop(heap)
        return -heap[0][0] if heap else None

    def pop(self) -> tuple[int, Page]:
        """Take the entry `farthest` spoke of: (next use, page). IndexError when empty."""
        use, _, page, _ = heapq.heappop(self._heap)
        return -use, page
