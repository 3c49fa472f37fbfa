"""From the recorded order of a step to the pager's schedule.

Owns the one place that says where in a step the update touches a unit's pages, for each update schedule. Does not know
when anything really happens. Guarantees that the schedule holds every access the computation made, in its order, and
for each updated unit the accesses of its update, tile by tile, at the place where the update schedule puts them.

Where gradient tiles are leased as gradients arrive, a tile that several parameters share is accessed several times, and
hardly ever in the order of tiles: backward comes to the last parameters first. A schedule that had each tile once, in
order, would send the forecast astray (a page that was just written would seem to be needed a step later): measured with
65 M float32 parameters and a budget of 15 % of their state, a quarter more bytes were read.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from types import MappingProxyType

from tiermem.pager.page import Kind, Lane, PageKey
from tiermem.pager.schedule import Schedule, schedule_of
from tiermem.zero3.order import Access, Phase
from tiermem.zero3.shards import Shard

Arrivals = Mapping[int, Sequence[int]]

# A unit's parameters, and gradient and state of two tiles: enough for its update to begin with. Micro-batches that go
# through a unit together compute for so long that memory would be full of tiles which nobody can use yet, and the next
# unit's parameters find no room: `pager/README.md`, "Ahead of time".
_HASTY = 5


def plan_step(
    accesses: Sequence[Access],
    tiles: Mapping[int, int],
    update: str,
    shards: Sequence[Shard] = (),
    *,
    beside: bool = False,
    touches: Sequence[tuple[int, PageKey]] = (),
    arrivals: Arrivals = MappingProxyType({}),
    resting: Container[int] = (),
    together: bool = False,
) -> Schedule:
    """The schedule of a step like the recorded one.

    Args:
        accesses: what the computation did, in order.
        tiles: how many tiles each unit has; units without any are never updated.
        update: "backward" (after a unit's last gradient), "forward" (before its first forward) or "step" (at the end,
            in forward order).
        shards: what this rank keeps of each unit; needed with several ranks, whose transient pages want room too.
        beside: whether the next unit is gathered while one is computed.
        touches: pages of activations, each with the number of accesses that came before it.
        arrivals: of units whose gradient tiles are leased one after the other as gradients arrive, the tiles in that
            order; of all others they are leased at once.
        resting: units that are updated as in "forward" though others are in "backward" (resting.py).
        together: whether several micro-batches go through a unit before the next one.
    """
    transit = {shard.unit: shard for shard in shards if shard.layout.ranks > 1}
    if transit and beside:
        accesses = _one_ahead(accesses)
    before, after = _places(accesses, tiles, update, resting)
    touched: dict[int, list[PageKey]] = {}
    for position, key in touches:
        touched.setdefault(position, []).append(key)

    def walk() -> Iterator[tuple[Lane, PageKey]]:
        for index, access in enumerate(accesses):
            yield from ((Lane.COMPUTE, key) for key in touched.get(index, ()))
            for unit in before.get(index, ()):
                yield from _update(unit, tiles[unit])
            written = arrivals.get(access.unit) or range(tiles.get(access.unit, 0))
            yield from _compute(access, written, transit.get(access.unit))
            for unit in after.get(index, ()):
                yield from _update(unit, tiles[unit])
        yield from ((Lane.COMPUTE, key) for key in touched.get(len(accesses), ()))

    return schedule_of(walk(), hasty=_HASTY if together else None)


def _places(
    accesses: Sequence[Access], tiles: Mapping[int, int], update: str, resting: Container[int]
) -> tuple[Mapping[int, Sequence[int]], Mapping[int, Sequence[int]]]:
    """Which units are updated before the access of each index, and which behind it."""
    received = list(dict.fromkeys(access.unit for access in accesses if access.phase is Phase.GRADIENT))
    updated = [unit for unit in received if tiles.get(unit, 0)]
    last = {access.unit: index for index, access in enumerate(accesses) if access.phase is Phase.GRADIENT}
    first: dict[int, int] = {}
    for index, access in enumerate(accesses):
        if access.phase is Phase.FORWARD:
            first.setdefault(access.unit, index)
    before: dict[int, list[int]] = {}
    after: dict[int, list[int]] = {}
    for unit in sorted(updated, key=lambda unit: first.get(unit, len(accesses))):
        if unit in first and (update == "forward" or (update == "backward" and unit in resting)):
            before.setdefault(first[unit], []).append(unit)
        else:
            after.setdefault(last[unit] if update == "backward" else len(accesses) - 1, []).append(unit)
    return before, after


def _compute(access: Access, tiles: Sequence[int], shard: Shard | None) -> Iterator[tuple[Lane, PageKey]]:
    if access.phase is Phase.GRADIENT:
        if shard is not None:
            yield Lane.COMPUTE, shard.bucket_key
            yield Lane.COMPUTE, shard.received_key
        for tile in tiles:
            yield Lane.COMPUTE, PageKey(access.unit, Kind.GRAD, tile)
    else:
        yield Lane.COMPUTE, PageKey(access.unit, Kind.PARAM)
        if shard is not None and not shard.whole:
            yield Lane.COMPUTE, shard.gathered_key


def _one_ahead(accesses: Sequence[Access]) -> list[Access]:
    """Each gathering at the place of the one before it; the first stays where it is."""
    places = [index for index, access in enumerate(accesses) if access.phase is not Phase.GRADIENT]
    at: dict[int, list[Access]] = {}
    for index, place in enumerate(places):
        at.setdefault(places[max(0, index - 1)], []).append(accesses[place])
    return [
        each
        for index, access in enumerate(accesses)
        for each in ([access] if access.phase is Phase.GRADIENT else at.get(index, ()))
    ]


def _update(unit: int, tiles: int) -> Iterator[tuple[Lane, PageKey]]:
    yield Lane.UPDATE, PageKey(unit, Kind.PARAM)
    for tile in range(tiles):
        yield Lane.UPDATE, PageKey(unit, Kind.GRAD, tile)
        yield Lane.UPDATE, PageKey(unit, Kind.STATE, tile)
