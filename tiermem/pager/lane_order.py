"""The accesses of one lane in the recorded step.

Owns their order and how far the lane has come. Does not know other lanes, nor pages. Guarantees answers in absolute
positions, which grow for ever: a step later is a period later.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

from tiermem.pager.page import PageKey


@dataclass(slots=True)
class LaneOrder:
    """The accesses of one lane: positions in order, the keys at them, and each key's own positions."""

    positions: list[int] = field(default_factory=list)
    keys: list[PageKey] = field(default_factory=list)
    of_key: dict[PageKey, list[int]] = field(default_factory=dict)
    cursor: int = 0  # absolute position: everything before it has happened
    leap: int | None = None  # where the cursor would be if the last surprising access was the end of a gap
    marked: int = 0  # the cursor when something began that may be no part of the step

    def next_at(self, key: PageKey, period: int, start: int | None = None) -> int | None:
        """The absolute position of the first access to `key` at or after `start` (by default the cursor)."""
        own = self.of_key.get(key)
        if own is None:
            return None
        cycle, inside = divmod(self.cursor if start is None else start, period)
        index = bisect.bisect_left(own, inside)
        return cycle * period + own[index] if index < len(own) else (cycle + 1) * period + own[0]

    def between(self, start: int, end: int, period: int) -> int:
        """How many accesses of the lane lie in the absolute positions from `start` up to, not including, `end`."""
        return self._before(end, period) - self._before(start, period)

    def is_next(self, position: int, period: int) -> bool:
        """Whether the lane's access at this absolute position is the first one that has not happened."""
        cycle, inside = divmod(self.cursor, period)
        index = bisect.bisect_left(self.positions, inside)
        return position == (
            cycle * period + self.positions[index]
            if index < len(self.positions)
            else (cycle + 1) * period + self.positions[0]
        )

    def ahead(self, start: int, period: int) -> Iterator[tuple[int, PageKey]]:
        """One period's worth of accesses from `start` on: the absolute position and the key of each."""
        cycle, inside = divmod(start, period)
        first, count = bisect.bisect_left(self.positions, inside), len(self.positions)
        for step in range(count):
            turn, index = divmod(first + step, count)
            yield (cycle + turn) * period + self.positions[index], self.keys[index]

    def _before(self, position: int, period: int) -> int:
        cycle, inside = divmod(position, period)
        return cycle * len(self.positions) + bisect.bisect_left(self.positions, inside)
