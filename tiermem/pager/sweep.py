"""Whom to evict, all through a step: the sweep that decides what stays from one access to the next.

Owns the orders in which pages go, the walk round the step under a capacity, and the spreading out of what goes. Does
not know tiers, moves or time. Guarantees that what it keeps fits at every position together with what is needed there,
in every step alike.

Victims are chosen by Belady's rule ("A study of replacement algorithms for virtual-storage computers", 1966): of all
pages that may go, the one whose next use is farthest. Two other orders serve as comparison, see `plan.make_plan`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiermem.pager.course import Course
from tiermem.pager.page import Kind

# Times round the step before what happens in it is taken for what happens in every step.
_ROUNDS = 3

# How many gaps are tried, at most, for the room that the sweep has left: each try looks at all of its positions.
_TRIED = 4096

# Bytes by position, for sums over stretches of a step: many thousand positions, looked at thousands of times.
_Bytes = npt.NDArray[np.int64]


class Order:
    """Pages that may go, each by the position of the access it was there for, in the order in which they go."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._heap: list[tuple[int, int]] = []

    def push(self, position: int) -> None:
        """Add the page of the access at `position`."""
        heapq.heappush(self._heap, (self._rank(position), position))

    def pop(self, now: int) -> int | None:  # noqa: ARG002 - `Cheapest` needs it
        """Take the next one to go, by its position; None: there is none."""
        return heapq.heappop(self._heap)[1] if self._heap else None

    def _rank(self, position: int) -> int:
        raise NotImplementedError


class Farthest(Order):
    """The page whose next use is farthest first: Belady's rule."""

    def _rank(self, position: int) -> int:
        return -self._course.next_at(position)


class Oldest(Order):
    """The page used longest ago first."""

    def _rank(self, position: int) -> int:
        return position


class Cheapest:
    """The page first whose next use is farthest for what its going costs: twice as much where it has to be written."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._clean, self._dirty = Farthest(course), Farthest(course)
        self._tops: list[int | None] = [None, None]

    def push(self, position: int) -> None:
        """Add the page of the access at `position`."""
        kind = self._course.accesses[position % len(self._course.accesses)].key.kind
        (self._clean if kind is Kind.PARAM else self._dirty).push(position)

    def pop(self, now: int) -> int | None:
        """Take the next one to go, by its position; None: there is none."""
        tops = self._tops
        for index, queue in enumerate((self._clean, self._dirty)):
            if tops[index] is None:
                tops[index] = queue.pop(now)
        clean, dirty = ((-1 if top is None else max(0, self._course.next_at(top) - now)) for top in tops)
        index = 0 if 2 * clean >= dirty else 1
        found, tops[index] = tops[index], None
        return found


def sweep(course: Course, capacity: int, rule: type[Order | Cheapest]) -> list[bool]:
    """Go round the step `_ROUNDS` times; for each access of the last round, whether its page was still there."""
    count, pages, sizes = len(course.accesses), course.pages, course.sizes
    stays = [True] * count
    coming: dict[int, list[int]] = {}
    going: dict[int, list[int]] = {}
    for position in range(count * _ROUNDS):
        coming.setdefault(position - course.enters[position % count], []).append(position)
        going.setdefault(position + course.leaves[position % count], []).append(position)
    resident: list[int | None] = [None] * count  # by page: the position of the access it is or was there for
    needed = [0] * count
    changed = [False] * count  # by page: whether SWAP has other bytes
    candidates = rule(course)
    taken = 0
    for now in range(-max(course.enters), count * _ROUNDS):
        for position in coming.get(now, ()):
            index, page = position % count, pages[position % count]
            stays[index] = resident[page] is not None
            if not stays[index]:
                taken += sizes[index]
                changed[page] = False
            changed[page] = changed[page] or course.changes(index)
            resident[page] = position
            needed[page] += 1
        while taken > capacity and (victim := candidates.pop(now)) is not None:
            page = pages[victim % count]
            if resident[page] == victim and not needed[page]:
                resident[page] = None
                taken -= sizes[victim % count]
        for position in going.get(now, ()):
            index, page = position % count, pages[position % count]
            needed[page] -= 1
            if needed[page]:
                continue
            if course.lapses(index, changed=changed[page]):
                resident[page] = None
                taken -= sizes[index]
            elif (last := resident[page]) is not None:
                candidates.push(last)
    return stays


@dataclass(frozen=True, slots=True)
class _Gap:
    """The positions from `begin` on, `length` of them, in which a page is not needed before its access at `later`."""

    begin: int
    length: int
    later: int

    def most(self, taken: _Bytes) -> int:
        """The most bytes taken there at any position."""
        first, over = self._parts(len(taken))
        most = int(taken[first].max())
        return max(most, int(taken[over].max())) if over.stop else most

    def add(self, taken: _Bytes, nbytes: int) -> None:
        """Take `nbytes` bytes more there."""
        first, over = self._parts(len(taken))
        taken[first] += nbytes
        taken[over] += nbytes

    def _parts(self, count: int) -> tuple[slice, slice]:
        """Its positions, and those that go over the end of the round."""
        begin = self.begin % count
        return slice(begin, min(count, begin + self.length)), slice(0, max(0, begin + self.length - count))

    def covers(self, position: int, count: int) -> bool:
        """Whether `position` is one of them."""
        return self.left(position, count) > 0

    def left(self, position: int, count: int) -> int:
        """How many of them are left at `position`, it included, if it is one of them; none or less otherwise."""
        return self.length - (position - self.begin) % count


def make_cyclic(course: Course, capacity: int, stays: list[bool]) -> list[bool]:
    """What stays when each round is like the last: less where that would be too much, more where there is room left.

    The sweep's rounds need not be alike: which page of many has no room may wander.
    """
    count, sizes = len(course.accesses), course.sizes
    gaps = _gaps(course)
    taken = _taken(course, [gap for gap in gaps if stays[gap.later]])
    beginning: dict[int, list[int]] = {}
    for number, gap in enumerate(gaps):
        beginning.setdefault(gap.begin % count, []).append(number)
    # Gaps at the position, by (minus the position after the last of them, number): the farthest next use comes first.
    here = [(-gap.left(0, count), number) for number, gap in enumerate(gaps) if gap.covers(0, count)]
    heapq.heapify(here)
    for position in range(count):
        for number in beginning.get(position, ()) if position else ():
            heapq.heappush(here, (-position - gaps[number].length, number))
        while taken[position] > capacity and here and -here[0][0] > position:
            gap = gaps[heapq.heappop(here)[1]]
            if stays[gap.later]:
                stays[gap.later] = False
                gap.add(taken, -sizes[gap.later])
    fullest = int(taken.argmax())
    missing = (gap for gap in gaps if not stays[gap.later] and not course.supplied[gap.later])
    for gap in sorted(missing, key=lambda gap: gap.length)[:_TRIED]:
        size = sizes[gap.later]
        if taken[fullest] + size > capacity and gap.covers(fullest, count):
            continue
        if gap.most(taken) + size <= capacity:
            stays[gap.later] = True
            gap.add(taken, size)
            fullest = int(taken.argmax())
    return stays


def spread(course: Course, capacity: int, stays: Sequence[bool]) -> list[bool]:
    """As `stays`, but what goes of the update's state is taken evenly from the whole step.

    As much of it as has to go at the position where most would be there, and of what could stay over that position:
    what is used around it is there anyway.
    """
    count, accesses = len(course.accesses), course.accesses
    found = [kept or access.key.kind is Kind.STATE for kept, access in zip(stays, accesses, strict=True)]
    gaps = _gaps(course)
    taken = _taken(course, [gap for gap in gaps if found[gap.later]])
    fullest = int(taken.argmax())
    excess = int(taken[fullest]) - capacity
    over = [gap for gap in gaps if accesses[gap.later].key.kind is Kind.STATE and gap.covers(fullest, count)]
    total = sum(course.sizes[gap.later] for gap in over)
    gone = due = 0
    for gap in sorted(over, key=lambda gap: gap.later):
        size = course.sizes[gap.later]
        due += size
        # As large a part of these bytes as of all; by whole numbers, so that it is the same everywhere.
        if gone < excess and 2 * (due * excess - gone * total) >= size * total:
            found[gap.later] = False
            gone += size
    return found


def _gaps(course: Course) -> list[_Gap]:
    """Where pages that have contents are not needed."""
    gaps, count = [], len(course.accesses)
    for position, (following, leaves, ends) in enumerate(
        zip(course.following, course.leaves, course.ends, strict=True)
    ):
        later = (position + following) % count
        length = following - leaves - course.enters[later] - 1
        if not ends and length > 0:
            gaps.append(_Gap(position + leaves + 1, length, later))
    return gaps


def _taken(course: Course, kept: Sequence[_Gap]) -> _Bytes:
    """Bytes taken at each position by what is needed there, and by what is kept."""
    count = len(course.accesses)
    changes = np.zeros(2 * count, dtype=np.int64)  # as if the round were written out twice, for what goes over its end
    for position, (following, leaves) in enumerate(zip(course.following, course.leaves, strict=True)):
        begin, later = position - course.enters[position], (position + following) % count
        end = min(position + leaves, position + following - course.enters[later] - 1)
        changes[begin % count] += course.sizes[position]
        changes[begin % count + end - begin + 1] -= course.sizes[position]
    for gap in kept:
        changes[gap.begin % count] += course.sizes[gap.later]
        changes[gap.begin % count + gap.length] -= course.sizes[gap.later]
    taken: _Bytes = changes.cumsum().reshape(2, count).sum(axis=0)
    return taken
