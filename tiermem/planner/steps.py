"""From the recorded order of a step to the pager's schedule.

Owns the one place that says where in a step the update touches a unit's pages, for each update schedule. Does not know
when anything really happens. Guarantees that the schedule holds every access the computation made, in its order, and
for each updated unit the accesses of its update, tile by tile, at the place where the update schedule puts them.

Where gradient tiles are leased as gradients arrive, a tile that several parameters share is accessed several times, and
hardly ever in the order of tiles: backward comes to the last parameters first. A schedule that had each tile once, in
order, would send the forecast astray (a page that was just written would seem to be needed a step later): measured with
65 M float32 parameters and a budget of 15 % of their state, a quarter more bytes were read.

Over ranks a bucket is asked for before the next unit is gathered, and a unit's gradients are added up after the next
bucket was asked for. A schedule that had the first after the gathering, and the second before that bucket, sent the
forecast a whole step ahead several times in each backward (README.md, "Several ranks"). So did one in which ranks that
have all parameters take the next unit of backward only when the one before it is added up: nothing has to be gathered.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    two: bool = True,
    touches: Sequence[tuple[int, PageKey]] = (),
    arrivals: Arrivals = MappingProxyType({}),
    resting: Collection[int] = (),
    together: bool = False,
    late: bool = False,
) -> Schedule:
    """The schedule of a step like the recorded one.

    Args:
        accesses: what the computation did, in order.
        tiles: how many tiles each unit has; units without any are never updated.
        update: "backward" (after a unit's last gradient), "forward" (before its first forward) or "step" (at the end,
            in forward order).
        shards: what this rank keeps of each unit; needed with several ranks, whose transient pages want room too.
        beside: whether ranks gather the next unit while one is computed.
        two: whether there is room for a bucket of gradients beside one that is being added up over ranks.
        touches: pages of activations, each with the number of accesses that came before it.
        arrivals: of units whose gradient tiles are leased one after the other as gradients arrive, the tiles in that
            order; of all others they are leased at once.
        resting: units that are updated as in "forward" though others are in "backward" (resting.py).
        together: whether several micro-batches go through a unit before the next one.
        late: whether gradients are added up over ranks after the last backward.
    """
    transit = {shard.unit: shard for shard in shards if shard.layout.ranks > 1}
    whole = any(shard.whole for shard in transit.values())
    before, after = _places(accesses, tiles, update, resting)
    stale = {each.unit for each in accesses if each.phase is Phase.GRADIENT} if whole else set()
    touched = _by_position(touches)

    def updated(units: Iterable[int]) -> Iterator[tuple[Lane, PageKey]]:
        for unit in units:
            yield from _update(unit, tiles[unit])

    def walk() -> Iterator[tuple[Lane, PageKey]]:
        for part, index in _course(accesses, beside=beside, whole=whole, two=two, late=late, alone=not transit):
            unit = accesses[index].unit
            if part is _Part.BEGIN:
                yield from ((Lane.COMPUTE, key) for key in touched.get(index, ()))
            elif part is _Part.TAKE:
                yield from updated(before.get(index, ()))
                yield from _take(unit, transit.get(unit), stale)
            elif part is _Part.ADD:
                yield from _add(unit, arrivals.get(unit) or range(tiles.get(unit, 0)), transit.get(unit))
                yield from updated(() if late else after.get(index, ()))
            elif unit in transit:
                yield Lane.COMPUTE, transit[unit].bucket_key
        if accesses and (late or accesses[-1].phase is not Phase.GRADIENT):
            yield from updated(after.get(len(accesses) - 1, ()))
        yield from ((Lane.COMPUTE, key) for key in touched.get(len(accesses), ()))

    return schedule_of(walk(), hasty=_HASTY if together else None, rests=update == "backward" and bool(resting))


class _Part(enum.Enum):
    """What an access consists of: its turn comes; a unit is taken; or a bucket is, and what is in it is added up."""

    BEGIN = enum.auto()
    TAKE = enum.auto()
    BUCKET = enum.auto()
    ADD = enum.auto()


def _course(
    accesses: Sequence[Access], *, beside: bool, whole: bool, two: bool, late: bool, alone: bool
) -> Iterator[tuple[_Part, int]]:
    """The parts of all accesses, each with its access' index, in the order in which pages are leased for them.

    `beside`: the next unit is gathered, and gradients are added up, beside the computation. One thread does both, one
    thing after the other: `zero3.conductor`. A bucket that is not the unit's last is kept open until the next one is
    wanted: `zero3.exchange`. `whole`: ranks have all parameters, so that in backward nothing is gathered, and a unit is
    taken while the one before it is added up. `two`: there is room for a bucket beside one that is being added up.
    `late`: buckets wait for the end, and are taken once more for that. `alone`: there are no buckets, and nothing is
    done ahead.
    """
    last = {access.unit: index for index, access in enumerate(accesses) if access.phase is Phase.GRADIENT}
    taken = filled = -1  # ahead of their turn
    beside = beside and not alone
    ahead = beside and not whole
    waiting: list[int] = []  # to be added up; one at most
    for index, access in enumerate(accesses):
        yield _Part.BEGIN, index
        left_open = any(each != last[accesses[each].unit] for each in waiting)
        if access.phase is Phase.GRADIENT:
            if left_open or not two:
                yield from _added_up(waiting)
            if filled != index:
                yield _Part.BUCKET, index
            yield from _added_up(waiting)
            if late:
                continue
            waiting.append(index)
            if alone or (not beside and index == last[access.unit]):
                yield from _added_up(waiting)
            continue
        afterwards = beside and whole and not left_open
        if not afterwards and (access.phase is Phase.FORWARD or not (taken == index or left_open)):
            yield from _added_up(waiting)
        if taken != index:
            yield _Part.TAKE, index
        gradient = index + 1 < len(accesses) and accesses[index + 1] == Access(access.unit, Phase.GRADIENT)
        if beside and gradient and not left_open and (two or not waiting):
            filled = index + 1
            yield _Part.BUCKET, filled
        if not left_open:
            yield from _added_up(waiting)
        rest = (place for place in range(index + 1, len(accesses)) if accesses[place].phase is not Phase.GRADIENT)
        following = next(rest, None) if ahead else None
        if following is not None and accesses[following].unit != access.unit:
            taken = following
            yield _Part.TAKE, following
    yield from _added_up(waiting)
    for unit in sorted(last) if late else ():
        yield from ((_Part.BUCKET, last[unit]), (_Part.ADD, last[unit]))


def _by_position(touches: Sequence[tuple[int, PageKey]]) -> Mapping[int, Sequence[PageKey]]:
    touched: dict[int, list[PageKey]] = {}
    for position, key in touches:
        touched.setdefault(position, []).append(key)
    return touched


def _added_up(waiting: list[int]) -> Iterator[tuple[_Part, int]]:
    yield from ((_Part.ADD, index) for index in waiting)
    waiting.clear()


def _places(
    accesses: Sequence[Access], tiles: Mapping[int, int], update: str, resting: Collection[int]
) -> tuple[Mapping[int, Sequence[int]], Mapping[int, Sequence[int]]]:
    """Which units are updated before the access of each index, and which after it."""
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


def _take(unit: int, shard: Shard | None, stale: set[int]) -> Iterator[tuple[Lane, PageKey]]:
    if unit in stale:  # updated in the step before, and now completed from the other ranks, which writes its page
        stale.discard(unit)
        yield Lane.COMPUTE, PageKey(unit, Kind.PARAM)
    yield Lane.COMPUTE, PageKey(unit, Kind.PARAM)
    if shard is not None and not shard.whole:
        yield Lane.COMPUTE, shard.gathered_key


def _add(unit: int, tiles: Iterable[int], shard: Shard | None) -> Iterator[tuple[Lane, PageKey]]:
    if shard is not None:
        yield Lane.COMPUTE, shard.received_key
    for tile in tiles:
        yield Lane.COMPUTE, PageKey(unit, Kind.GRAD, tile)


def _update(unit: int, tiles: int) -> Iterator[tuple[Lane, PageKey]]:
    yield Lane.UPDATE, PageKey(unit, Kind.PARAM)
    for tile in range(tiles):
        yield Lane.UPDATE, PageKey(unit, Kind.GRAD, tile)
        yield Lane.UPDATE, PageKey(unit, Kind.STATE, tile)
