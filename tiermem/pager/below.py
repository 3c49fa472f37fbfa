"""Which pages stay in host memory from use to use where the computation works on a device above it.

Owns the two-storied plan of a step: what stays on the device, from that which accesses reach host memory at all, and
from that what stays there. Does not know where anything is now, nor time. Guarantees what `plan.py` does, of host
memory: which bytes cross the edge to SWAP is what costs most beside a device, too.

What reaches host memory
------------------------
The computation's parameters, where the device does not have them any more: they pass through. Gradients, which arrive
from the device as soon as they are written. Everything that the update uses; its parameters come from the device, if
they are still there, and are then not kept in host memory for it unless they would have to be written first. Nothing of
a unit that is settled on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tiermem.pager.course import Course, Limits, distances
from tiermem.pager.page import Kind, Lane, PageKey
from tiermem.pager.plan import Plan, best_plan
from tiermem.pager.schedule import Access, Schedule
from tiermem.pager.sweep import Farthest, make_cyclic, sweep

# Parameters are at home on the device only if they leave a quarter of it free: room between them is not in one piece,
# and one that has to go comes down.
_SPARE_DIVISOR = 4
# And only if the largest takes no more than a sixteenth of host memory: there it needs a place in one piece for its
# update, for which pages that were to stay would have to go.
LARGEST_DIVISOR = 16


def make_plan_below(
    schedule: Schedule,
    rooms: Mapping[PageKey, int],
    limits: Limits,
    device: Limits,
    settled: Collection[int] = (),
    *,
    above: Mapping[PageKey, int] | None = None,
) -> Plan:
    """The plan for host memory; arguments as for `plan.make_plan`.

    Args:
        schedule: the accesses of a step.
        rooms: bytes that a page takes.
        limits: what there is room for in host memory.
        device: what there is room for on the device.
        settled: units whose pages stay on the device in any case.
        above: bytes that a page takes on the device; None: as many.
    """
    accesses, own = schedule.accesses, rooms if above is None else above
    roomy = replace(device, capacity=device.capacity - device.capacity // _SPARE_DIVISOR)
    there = _stays_above(accesses, own, roomy, settled, at_home=True)
    parameters = [index for index, access in enumerate(accesses) if access.key.kind is Kind.PARAM]
    largest = max((rooms.get(accesses[index].key, 0) for index in parameters), default=0)
    at_home = largest * LARGEST_DIVISOR <= limits.capacity and all(
        index in there or accesses[index].key.is_of(settled) for index in parameters
    )
    if not at_home:
        there = _stays_above(accesses, own, device, settled)
    reaches = [
        not access.key.is_of(settled)
        and access.key.kind is not Kind.TRANSIT
        and (access.lane is Lane.UPDATE or access.key.kind is not Kind.PARAM or position not in there)
        for position, access in enumerate(accesses)
    ]
    places = [position for position, reached in enumerate(reaches) if reached]
    here = [accesses[position] for position in places]
    supplied = [position in there for position in places]
    course = Course(here, rooms, limits, supplied=supplied)
    if at_home:  # what the update has made of them goes up at once
        course.ends = [ends or access.key.kind is Kind.PARAM for ends, access in zip(course.ends, here, strict=True)]
    plan = best_plan(course, limits, even=not schedule.rests)
    stays = [True] * len(accesses)
    for position, kept in zip(places, plan.stays, strict=True):
        stays[position] = kept
    return replace(plan, stays=tuple(stays), reaches=tuple(reaches), at_home=at_home)


def _stays_above(
    accesses: Sequence[Access],
    rooms: Mapping[PageKey, int],
    device: Limits,
    settled: Collection[int],
    *,
    at_home: bool = False,
) -> set[int]:
    """The positions at which the device still has the page since its access before.

    The update's accesses to parameters are among them: it takes them from there. `at_home`: as if what it makes of them
    were there at once.
    """
    places = [
        position
        for position, access in enumerate(accesses)
        if not access.key.is_of(settled) and (access.lane is Lane.COMPUTE or access.key.kind is Kind.PARAM)
    ]
    here, after = [accesses[position] for position in places], distances(accesses)
    # What the update has changed or used up, the device's copy is of no use any more.
    updated = [
        (access.lane is Lane.UPDATE and not at_home)
        or (access.key.kind is Kind.GRAD and accesses[(position + after[position]) % len(accesses)].lane is Lane.UPDATE)
        for position, access in zip(places, here, strict=True)
    ]
    taken = sum(nbytes for key, nbytes in rooms.items() if key.is_of(settled))
    course, capacity = Course(here, rooms, device), device.capacity - taken
    course.ends = [ends or changed for ends, changed in zip(course.ends, updated, strict=True)]
    stays = make_cyclic(course, capacity, sweep(course, capacity, Farthest)) if here else []
    return {position for position, kept in zip(places, stays, strict=True) if kept}
