"""Which pages stay in host memory from one use to the next: decided for a whole step before it begins.

Owns the `Plan` and the pure function that makes it. Does not know where anything is now, nor when transfers end: it
fixes which bytes move, the clock only when. Guarantees that what it keeps, what is in use and what is read ahead fit
into the budget together wherever that can be, and that by its own count it never moves more bytes than if the page
used longest ago had always been the one to go (LRU). With a device above host memory: `below.py`.

Of plans that move as many bytes the better one has them moved all through the step. The sweep's does not: of pages that
are used once a step it lets the same stretch of the step go every time, where the drive is then the limit, and has
nothing to do elsewhere. So what stays is spread out, if that costs hardly more bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from tiermem.pager.course import Course, Limits
from tiermem.pager.page import PageKey
from tiermem.pager.schedule import Schedule
from tiermem.pager.sweep import Cheapest, Farthest, Oldest, make_cyclic, spread, sweep

# What a plan that is spread out may move, as a share of the one that moves least: README.md, "All through the step".
_SPREAD = 1.05


@dataclass(frozen=True, slots=True)
class Plan:
    """For each position of the schedule, whether the page is still in memory since its access before.

    Attributes:
        stays: by position; where False, its bytes are fetched for that access (or it has none yet).
        read: bytes read in a step.
        written: bytes written in a step.
        reaches: by position, whether the access reaches host memory; None: all do, there is no device above it.
        at_home: whether the device has all parameters all the time, so that they need no copy below.
    """

    stays: tuple[bool, ...]
    read: int
    written: int
    reaches: tuple[bool, ...] | None = None
    at_home: bool = False

    @property
    def moved(self) -> int:
        """Bytes read and written in a step."""
        return self.read + self.written


def make_plan(schedule: Schedule, rooms: Mapping[PageKey, int], limits: Limits) -> Plan:
    """The plan that moves the fewest bytes, of those that three orders of eviction lead to, or hardly more, spread out.

    Args:
        schedule: the accesses of a step.
        rooms: bytes that a page takes; a page that is not there takes none.
        limits: what there is room for.
    """
    return best_plan(Course(schedule.accesses, rooms, limits), limits, even=not schedule.rests)


def best_plan(course: Course, limits: Limits, *, even: bool) -> Plan:
    """The same for a course under these limits; `even`: spread out, where that costs little."""
    if not course.accesses:
        return Plan((), 0, 0)
    swept = (sweep(course, limits.capacity, rule) for rule in (Farthest, Cheapest, Oldest))
    *plans, oldest = [_counted(course, make_cyclic(course, limits.capacity, stays)) for stays in swept]
    best = min(*plans, oldest, key=lambda plan: plan.moved)
    if not even or not best.moved:
        return best
    stays = make_cyclic(course, limits.capacity, spread(course, limits.capacity, best.stays))
    spread_out = _counted(course, stays)
    return spread_out if spread_out.moved <= min(oldest.moved, _SPREAD * best.moved) else best


def _counted(course: Course, stays: list[bool]) -> Plan:
    """The plan with its bytes: a page is read where it did not stay, and written if it goes changed."""
    positions: dict[PageKey, list[int]] = {}
    for position, access in enumerate(course.accesses):
        positions.setdefault(access.key, []).append(position)
    read = written = 0
    for own in positions.values():
        changed = False
        # Twice round: whether it begins the step changed is known at the end of one.
        for counts, (before, later) in [(counts, pair) for counts in (0, 1) for pair in pairwise([*own, own[0]])]:
            changed = (changed or course.changes(before)) and not course.ends[before]
            if not stays[later]:
                read += 0 if course.ends[before] or course.supplied[later] else counts * course.sizes[later]
                written += counts * course.sizes[later] if changed else 0
                changed = False
    return Plan(tuple(stays), read, written)
