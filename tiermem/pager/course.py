"""A step as the plan sees it: how long each page must be there around its accesses, and when it is wanted again.

Owns the `Limits` of what is in use, read ahead and written down beside what is kept, and the `Course` of a step under
them. Does not decide what stays. Guarantees that positions go round: the step after is like this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiermem.pager.page import Kind, Lane, PageKey
from tiermem.pager.schedule import Access


@dataclass(frozen=True, slots=True)
class Limits:
    """What there is room for, in bytes.

    Attributes:
        capacity: for pages in use, read ahead and kept.
        ahead: for what is read ahead of the accesses of both lanes, at most.
        lead: by how much the computation's own accesses are taken to be ahead of an update that lags.
        behind: for pages that the update has let go of and that are still being written down, at most.
    """

    capacity: int
    ahead: int = 0
    lead: int = 0
    behind: int = 0


class Course:
    """What the sweep needs to know of each access, by position.

    Attributes:
        sizes: bytes of the page.
        pages: a number for each page.
        following: how many positions later the page is accessed next, from 1 to the period.
        enters, leaves: how many positions before its access the page has to be there, and how many after it may go.
        ends: whether its contents are forgotten after the access.
        supplied: whether the page, if it is absent, comes from a tier above, where that costs nothing.
    """

    def __init__(
        self,
        accesses: Sequence[Access],
        rooms: Mapping[PageKey, int],
        limits: Limits,
        *,
        supplied: Sequence[bool] | None = None,
    ) -> None:
        """`supplied`: where the computation works on a tier above; by position, whether the page comes from there.

        What the computation has only passes through then, and is not held.
        """
        self.accesses = accesses
        self.sizes = [rooms.get(access.key, 0) for access in accesses]
        count = len(accesses)
        first: dict[PageKey, int] = {}
        self.pages = [first.setdefault(access.key, position) for position, access in enumerate(accesses)]
        self.following = distances(accesses)
        self.ends = [self._ends(position) for position in range(count)]
        self.supplied = [False] * count if supplied is None else list(supplied)
        self.leaves = [
            0 if supplied is not None and access.lane is Lane.COMPUTE else held
            for access, held in zip(accesses, _held(accesses), strict=True)
        ]
        self.enters = _window(range(count), self.sizes, limits.ahead, count)
        if limits.lead and _lags(accesses):
            compute = [position for position in range(count) if accesses[position].lane is Lane.COMPUTE]
            for position, before in zip(compute, _window(compute, self.sizes, limits.lead, count), strict=True):
                self.enters[position] = max(self.enters[position], before)
        self._write_down(limits.behind)

    def next_at(self, position: int) -> int:
        """When the page accessed at `position`, in whatever round, is accessed next."""
        return position + self.following[position % len(self.following)]

    def changes(self, position: int) -> bool:
        """Whether the access leaves other bytes behind than it found."""
        access = self.accesses[position]
        return access.key.kind is not (Kind.GRAD if access.lane is Lane.UPDATE else Kind.PARAM)

    def lapses(self, position: int, *, changed: bool) -> bool:
        """Whether nobody would miss the page after the access, and it may go without being written."""
        following = self.next_at(position) % len(self.accesses)
        return self.ends[position] or (self.supplied[following] and not changed)

    def _ends(self, position: int) -> bool:
        """Gradients are used up by the update; activations are of one step; what passes between ranks of one use."""
        access, wraps = self.accesses[position], position + self.following[position] >= len(self.accesses)
        kind = access.key.kind
        return (
            kind is Kind.TRANSIT
            or (kind is Kind.GRAD and access.lane is Lane.UPDATE)
            or (kind is Kind.ACTIVATION and wraps)
        )

    def _write_down(self, behind: int) -> None:
        """Pages that the update has changed take room until they are written: `behind` bytes of them at a time."""
        updates = [
            position
            for position, access in enumerate(self.accesses)
            if access.lane is Lane.UPDATE and not self.ends[position]
        ]
        count = len(self.accesses)
        backwards = [count - 1 - position for position in reversed(updates)]
        sizes = self.sizes[::-1]
        for position, after in zip(reversed(updates), _window(backwards, sizes, behind, count), strict=True):
            self.leaves[position] = max(self.leaves[position], after)


def distances(accesses: Sequence[Access]) -> list[int]:
    """For each access how many positions later its page is accessed next, in this step or the one after."""
    count, found = len(accesses), []
    seen: dict[PageKey, int] = {}
    for position in range(2 * count - 1, -1, -1):
        key = accesses[position % count].key
        if position < count:
            found.append(seen[key] - position)
        seen[key] = position
    return found[::-1]


def _lags(accesses: Sequence[Access]) -> bool:
    """Whether updates come between gradients, so that the computation goes on while one lags behind."""
    course = [access.lane for access in accesses if access.key.kind is Kind.GRAD]
    updates = [index for index, lane in enumerate(course) if lane is Lane.UPDATE]
    return any(Lane.COMPUTE in course[index:] and Lane.COMPUTE in course[:index] for index in updates[:1])


def _held(accesses: Sequence[Access]) -> list[int]:
    """How long a page is leased, in positions: parameters as long as their unit's other pages are accessed."""
    held = [0] * len(accesses)
    until: dict[Lane, tuple[int, int]] = {}
    for position in range(len(accesses) - 1, -1, -1):
        access = accesses[position]
        unit, last = until.get(access.lane, (-1, position))
        if unit != access.key.unit:
            last = position
        if access.key.kind is Kind.PARAM:
            held[position] = last - position
        until[access.lane] = access.key.unit, last
    return held


def _window(positions: Sequence[int], sizes: Sequence[int], nbytes: int, period: int) -> list[int]:
    """How many positions before each of `positions` the accesses that end there begin to fit into `nbytes`."""
    count, found = len(positions), []
    first, total = 0, 0
    for index in range(2 * count):
        total += sizes[positions[index % count]]
        while first < index and (total > nbytes or index - first >= count):
            total -= sizes[positions[first % count]]
            first += 1
        if index >= count:
            begin = positions[first % count] + first // count * period
            found.append(positions[index % count] + index // count * period - begin)
    return found
