"""Which addresses a frame gets, and which pages go back to the system for it.

Owns two sets of address ranges: free ones, and the *warm* part of them, which was used before and therefore still
occupies physical memory. Does not know mmap, tensors or budgets; an address is an integer. Guarantees that ranges
handed out never overlap and that `taken + warm <= limit` at every instant, provided the caller returns the `cooled`
ranges of a placement to the system before it touches the placed one. Pure bookkeeping, so it is tested with numbers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiermem.errors import InvariantError
from tiermem.memory.rounding import round_down, round_up


class Range(NamedTuple):
    """Addresses from `start` up to, not including, `end`."""

    start: int
    end: int

    @property
    def length(self) -> int:
        """Number of addresses."""
        return self.end - self.start


def _by_length(part: Range) -> int:
    return part.end - part.start


class RangeSet:
    """A set of addresses kept as sorted, disjoint ranges that never touch: neighbours are merged."""

    __slots__ = ("_ends", "_starts", "_total")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._total = 0

    def __iter__(self) -> Iterator[Range]:
        return map(Range, self._starts, self._ends)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def total(self) -> int:
        """Number of addresses in the set."""
        return self._total

    def overlapping(self, start: int, end: int) -> Iterator[Range]:
        """The parts of this set inside [start, end), in order of address."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        for index in range(first, last):
            yield Range(max(start, self._starts[index]), min(end, self._ends[index]))

    def count(self, start: int, end: int) -> int:
        """Number of addresses of this set in [start, end)."""
        return self._count(start, end, bisect_right(self._ends, start), bisect_left(self._starts, end))

    def at_least(self, length: int) -> list[Range]:
        """The ranges of `length` addresses or more, in order of address."""
        return [Range(start, end) for start, end in zip(self._starts, self._ends, strict=True) if end - start >= length]

    def add(self, start: int, end: int) -> None:
        """Add [start, end), of which nothing may be in the set; raises InvariantError otherwise."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if end <= start or first < last:
            raise InvariantError(f"address range [{start}, {end}) is empty or partly in the set already")
        self._total += end - start
        if first and self._ends[first - 1] == start:  # neighbours that touch become one
            first -= 1
            start = self._starts[first]
        if last < len(self._starts) and self._starts[last] == end:
            end = self._ends[last]
            last += 1
        self._starts[first:last], self._ends[first:last] = [start], [end]

    def remove(self, start: int, end: int) -> int:
        """Take whatever is in [start, end) out of the set and return how many addresses that was."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if first >= last:
            return 0
        removed = self._count(start, end, first, last)
        self._total -= removed
        starts, ends = [], []
        if self._starts[first] < start:
            starts, ends = [self._starts[first]], [start]
        if self._ends[last - 1] > end:
            starts, ends = [*starts, end], [*ends, self._ends[last - 1]]
        self._starts[first:last], self._ends[first:last] = starts, ends
        return removed

    def _count(self, start: int, end: int, first: int, last: int) -> int:
        """Number of addresses in [start, end), where the ranges from `first` up to, not including, `last` reach in."""
        found = 0
        for index in range(first, last):
            found += min(end, self._ends[index]) - max(start, self._starts[index])
        return found


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a range was placed, and what must go back to the system before it is touched.

    `cold`: the parts of it that are not warm.
    """

    start: int
    cooled: tuple[Range, ...]
    cold: tuple[Range, ...] = ()

    def exchanges(self, block: int) -> tuple[list[tuple[Range, int]], list[Range]]:
        """Whole blocks of what is to be given back, each with the cold place for it to move to; and what is left over.

        Pages that move there need not be cleared by the system, as fresh ones are.
        """
        places = [Range(round_up(part.start, block), round_down(part.end, block)) for part in self.cold]
        places = [place for place in places if place.length > 0][::-1]
        moves, left = [], []
        for part in self.cooled:
            start, end = round_up(part.start, block), round_down(part.end, block)
            at = part.start
            while start < end and places:
                place = places.pop()
                length = min(end - start, place.length)
                if start > at:
                    left.append(Range(at, start))
                moves.append((Range(start, start + length), place.start))
                start = at = start + length
                if length < place.length:
                    places.append(Range(place.start + length, place.end))
            if at < part.end:
                left.append(Range(at, part.end))
        return moves, left


class RangeAllocator:
    """Places ranges in as many address areas as it is given, touching as few cold addresses as possible.

    `limit`: how many addresses may be taken or warm at one time. Lengths and limit are expected in whole pages.
    `block`: what should stay in one piece, such as a huge page. Ranges of at least a block begin at a multiple of it
    where there is room for that, and warm addresses are made cold in whole blocks.
    """

    __slots__ = ("_block", "_free", "_lengths", "_limit", "_taken", "_warm")

    def __init__(self, limit: int, *, block: int = 1) -> None:
        self._limit = limit
        self._block = block
        self._free = RangeSet()
        self._warm = RangeSet()
        self._lengths: dict[int, int] = {}
        self._taken = 0

    @property
    def warm(self) -> int:
        """Free addresses that still occupy physical memory."""
        return self._warm.total

    def warm_ranges(self) -> tuple[Range, ...]:
        """The free ranges that still occupy physical memory."""
        return tuple(self._warm)

    def holes(self) -> tuple[Range, ...]:
        """The free ranges, in order of address."""
        return tuple(self._free)

    def extend(self, start: int, length: int) -> None:
        """Add an area of cold addresses. Areas must not touch one another, or a range could straddle two."""
        self._free.add(start, start + length)

    def allocate(self, length: int) -> Placement | None:
        """Place `length` addresses, or return None, changing nothing, if no hole is long enough.

        Raises InvariantError if the limit would be exceeded: the caller's budget has to be asked first.
        """
        if length < 1 or self._taken + length > self._limit:
            raise InvariantError(f"{length} addresses asked for while {self._taken} of {self._limit} are taken")
        start = self._choose(length, self._block) if length >= self._block > 1 else None
        if start is None:
            start = self._choose(length, 1)
        if start is None:
            return None
        self._free.remove(start, start + length)
        cold = _between(self._warm.overlapping(start, start + length), start, start + length)
        self._warm.remove(start, start + length)
        self._lengths[start] = length
        self._taken += length
        return Placement(start, self._cool(self._taken + self.warm - self._limit), cold)

    def release(self, start: int) -> int:
        """Free the range placed at `start`, now warm, and return its length. Raises InvariantError if there is none."""
        length = self._lengths.pop(start, None)
        if length is None:
            raise InvariantError(f"no range was placed at address {start}, or it was released before")
        self._taken -= length
        self._free.add(start, start + length)
        self._warm.add(start, start + length)
        return length

    def take_back(self, placement: Placement) -> None:
        """Undo the last `allocate`: its `cooled` ranges could not be returned to the system, so they are warm still."""
        length = self._lengths.pop(placement.start)
        end = placement.start + length
        self._taken -= length
        self._free.add(placement.start, end)
        for part in (*_between(placement.cold, placement.start, end), *placement.cooled):
            self._warm.add(part.start, part.end)

    def _choose(self, length: int, multiple: int) -> int | None:
        """Return the start of the best window: most warm addresses, then the tightest fit, then the lowest address.

        Only starts that are a multiple of `multiple` count; None if no hole has room for one.
        """
        for run in sorted(self._warm.at_least(length), key=_by_length):
            start = round_up(run.start, multiple)
            if start + length <= run.end:
                return start
        best: tuple[int, int, int] | None = None
        for hole in self._free.at_least(length):
            earliest, latest = round_up(hole.start, multiple), round_down(hole.end - length, multiple)
            if earliest > latest:
                continue
            runs = self._warm.overlapping(hole.start, hole.end)
            starts = {earliest, *(min(max(round_down(run.start, multiple), earliest), latest) for run in runs)}
            candidate = min((-self._warm.count(start, start + length), hole.length, start) for start in starts)
            if best is None or candidate < best:
                best = candidate
        return None if best is None else best[2]

    def _cool(self, excess: int) -> tuple[Range, ...]:
        """Make `excess` warm addresses cold or more, shortest runs first: long ones can serve more lengths later."""
        cooled = []
        for run in sorted(self._warm, key=_by_length) if excess > 0 else ():
            part = Range(max(run.start, round_down(run.end - excess, self._block)), run.end)
            self._warm.remove(part.start, part.end)
            cooled.append(part)
            excess -= part.length
            if excess <= 0:
                break
        return tuple(cooled)


def _between(parts: Iterable[Range], start: int, end: int) -> tuple[Range, ...]:
    """What is in [start, end) and in none of `parts`, which lie in it in order."""
    found = []
    for part in parts:
        if part.start > start:
            found.append(Range(start, part.start))
        start = part.end
    if start < end:
        found.append(Range(start, end))
    return tuple(found)


def cheapest_window(holes: Sequence[Range], taken: Sequence[Range], length: int) -> list[int] | None:
    """Which of the `taken` ranges (by index) to free so that `length` free addresses follow one another.

    `holes` are the free ranges; none of all these overlap. Of all windows the one that frees the fewest addresses is
    chosen; an empty list if a hole is long enough, None if freeing all of `taken` is not.
    """
    parts = sorted([(part.start, part.end, -1) for part in holes] + [(*part, at) for at, part in enumerate(taken)])
    best: tuple[int, list[int]] | None = None
    first = cost = 0
    for last, (start, end, index) in enumerate(parts):
        if last > first and parts[last - 1][1] != start:
            first, cost = last, 0  # something that stays lies between
        cost += end - start if index >= 0 else 0
        while end - parts[first][1] >= length:  # as narrow as it can be
            cost -= parts[first][1] - parts[first][0] if parts[first][2] >= 0 else 0
            first += 1
        if end - parts[first][0] >= length and (best is None or cost < best[0]):
            best = cost, [at for _, _, at in parts[first : last + 1] if at >= 0]
    return None if best is None else best[1]
