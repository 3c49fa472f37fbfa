"""How a budget of host memory is shared out: what is leased at once, how large tiles are, what runs beside what.

Owns the arithmetic from unit sizes and a budget to a `Footprint`. Does not know tensors, pages or files: bytes in,
bytes out. Guarantees that the leases which the computation and the update can hold at one time fit into the budget
together, so that neither ever waits for the other's lease while holding what the other needs; where no sharing fits,
the error names the largest unit and the least budget that works.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from tiermem.errors import BudgetError
from tiermem.memory.arena import rounded
from tiermem.memory.sizes import format_bytes
from tiermem.pager.tiling import SMALLEST_TILE
from tiermem.planner.tilesizes import good_tiles, tile_sizes
from tiermem.zero3.shards import Shard, arriving_nbytes

Way = tuple[bool, int, bool, bool]  # hold_tiles, depth, serial, beside
# From the fastest down.
_ALONE = ((True, 3, False, False), (True, 2, False, False), (False, 2, False, False), (False, 1, True, False))
_RANKS = ((False, 3, False, True), (False, 2, False, True), (False, 2, False, False), (False, 1, True, False))
# Left for activations to pass through, unless the budget is so small that nothing else would fit.
PASSING = 128 << 10
_TILES_AHEAD = 4  # of the update


@dataclass(frozen=True, slots=True)
class UnitSize:
    """One unit as the budget sees it.

    Attributes:
        name: for messages.
        param_nbytes: bytes of its parameters.
        trainable_numel: elements that are updated.
        grad_itemsize: bytes of one gradient element.
        state_itemsize: bytes of optimizer state for one element, rounded up.
        wide_numel: elements that are updated and have more state than that: float32 moments among 8-bit ones.
        wide_itemsize: how many bytes more.
        kept: whether its parameters stay in host memory by choice.
        nested_kept: of `nested_nbytes`, those of such units.
        nested_nbytes: parameter bytes of the units that are leased while this one is computed: those around it and
            those whose parameters it borrows, each `rounded`.
        nested_count: how many these are at most.
        ranks: how many ranks share the unit; `param_nbytes` and `trainable_numel` are those of one part.
        gathered_nbytes: bytes of the transient page in which the unit is while it is computed; 0: its own page.
        copies: how many copies of the model the ranks of a run keep.
    """

    name: str
    param_nbytes: int
    trainable_numel: int
    grad_itemsize: int
    state_itemsize: int
    nested_nbytes: int = 0
    nested_count: int = 0
    ranks: int = 1
    gathered_nbytes: int = 0
    wide_numel: int = 0
    wide_itemsize: int = 0
    kept: bool = False
    nested_kept: int = 0
    copies: int = 1

    @property
    def computed_nbytes(self) -> int:
        """Bytes of the frame it is computed from."""
        return rounded(self.gathered_nbytes or self.param_nbytes)

    @property
    def bucket_nbytes(self) -> int:
        """Bytes of its whole gradient before it is added up over the ranks."""
        return rounded(self.trainable_numel * self.grad_itemsize * self.ranks)


@dataclass(frozen=True, slots=True)
class Footprint:
    """How the budget is shared out.

    Attributes:
        tile_numel: elements of a tile.
        hold_tiles: whether a unit's gradient tiles are all leased at once while they arrive (one trip to the pager).
        depth: tiles the update has in hand at once: 1 means that reading and updating alternate.
        serial: whether the update runs only while the computation waits for it.
        beside: whether ranks gather the next unit, and add gradients up, beside the computation.
        reserve: bytes that read-ahead leaves for demands.
        look_ahead: bytes fetched ahead at most.
        lag: bytes that updates may keep in memory while they lag behind backward; zero in serial.
        least: the smallest budget that would work, bytes.
        passing: bytes beside what computation and update must hold to get on, an update with one tile in hand: what
            comes and goes (activations) may be leased in them.
    """

    tile_numel: int
    hold_tiles: bool
    depth: int
    serial: bool
    beside: bool
    reserve: int
    look_ahead: int
    lag: int
    least: int
    passing: int = 0

    @property
    def lead(self) -> int:
        """Bytes by which the plan of what stays takes the computation to be ahead of an update that lags.

        Half of what it may be at most: where it is ahead by more, a page that was to stay is read again; where it is
        not, room kept for it would cost as many bytes in every step.
        """
        return self.lag // 2


def least_budget(units: Sequence[UnitSize], *, gaps: bool = False) -> int:
    """The smallest budget that works, in bytes; `gaps` as for `plan_footprint`."""
    return _least(_beside_kept(units), gaps=gaps) + kept_nbytes(units)


def kept_nbytes(units: Sequence[UnitSize]) -> int:
    """Bytes of host memory that parameters take which stay there by choice."""
    return sum(rounded(unit.param_nbytes) for unit in units if unit.kept)


def plan_footprint(
    units: Sequence[UnitSize],
    budget: int,
    tile_nbytes: int,
    look_ahead: int | None = None,
    *,
    tile: int | None = None,
    gaps: bool = False,
) -> Footprint:
    """Share `budget` bytes out.

    Args:
        units: every unit of the model.
        budget: bytes of host memory.
        tile_nbytes: bytes of optimizer state a tile should have; smaller ones are taken where the budget asks for it.
        look_ahead: bytes to fetch ahead at most; None: whatever the leases leave.
        tile: elements of a tile, where they are given: those of a run that is resumed.
        gaps: whether the memory is one piece, so that a tile must find its place between what the update holds.

    Raises:
        BudgetError: the computation or the update of a single unit does not fit.
    """
    every, staying, kept = units, [unit for unit in units if unit.kept], kept_nbytes(units)
    units = _beside_kept(units)
    least = _least(units, gaps=gaps) + kept
    if budget < least:
        larger = _with_more(every, least, tile_nbytes, gaps=gaps) if tile is None else ""
        raise _too_little(units, budget, least, kept, larger)
    budget -= kept  # what stays has its bytes for itself; the rest is shared out among all others
    ways = _RANKS if units and units[0].ranks > 1 else _ALONE
    sizes, wanted = tile_sizes(tile_nbytes, mean_state_itemsize(units)), 1 << 62
    # Layers are alike, and the most of any counts; a way and a size are tried again for other claims to what is left.
    unlike = list({replace(unit, name=""): unit for unit in units}.values())
    compute_bytes, update_bytes = cache(partial(_compute_bytes, unlike)), cache(partial(_update_bytes, unlike))
    for passing, (hold_tiles, depth, serial, beside), smallest in _tries(ways, sizes[0]):
        for tile_numel in [size for size in sizes if size >= smallest] if tile is None else [tile]:
            compute = compute_bytes(tile_numel, hold_tiles=hold_tiles, beside=beside)
            if hold_tiles:  # gradients of what is kept come between those of the rest, and take one tile beside them
                compute += max((grad_tile_nbytes(unit, tile_numel) for unit in staying), default=0)
            update = update_bytes(tile_numel, depth, gaps=gaps)
            needed = max(compute, update + _nested(units)) if serial else compute + update
            held = needed if serial else compute + update_bytes(tile_numel, 1, gaps=gaps)
            free, wanted = budget - held, min(wanted, max(needed, held + passing))
            if needed <= budget and free >= passing:
                most = max(budget - needed, budget // 2)
                return Footprint(
                    tile_numel=tile_numel,
                    hold_tiles=hold_tiles,
                    depth=depth,
                    serial=serial,
                    beside=beside,
                    reserve=_reserve(units, tile_numel),
                    look_ahead=_look_ahead(units, tile_numel, most) if look_ahead is None else look_ahead,
                    lag=0 if serial else _lag(units),
                    least=least,
                    passing=free,
                )
    raise BudgetError(f"host_memory is {budget + kept} bytes, expected at least {wanted + kept}")


def _beside_kept(units: Sequence[UnitSize]) -> Sequence[UnitSize]:
    """The units as those see them who lease host memory beside what is kept there: that takes no more of it."""
    if not any(unit.kept or unit.nested_kept for unit in units):
        return units
    return [
        replace(
            unit,
            param_nbytes=0 if unit.kept else unit.param_nbytes,
            nested_nbytes=unit.nested_nbytes - unit.nested_kept,
            kept=False,
            nested_kept=0,
        )
        for unit in units
    ]


def _with_more(units: Sequence[UnitSize], least: int, tile_nbytes: int, *, gaps: bool) -> str:
    """What a tenth more than the least budget brings: the least one may cut a model into tens of thousands of tiles."""
    small, large = (plan_footprint(units, least + more, tile_nbytes, gaps=gaps).tile_numel for more in (0, least // 10))
    if large < 4 * small:
        return ""
    slow, better = (format_bytes(tile * mean_state_itemsize(units)) for tile in (small, large))
    return f" ({slow} a tile, slow; with a tenth more {better})"


def _too_little(units: Sequence[UnitSize], budget: int, least: int, kept: int, larger: str) -> BudgetError:
    largest = max(units, key=lambda unit: unit.computed_nbytes)
    nbytes = largest.gathered_nbytes or largest.param_nbytes
    size = f", {nbytes} bytes of parameters" if nbytes else ""  # none: they stay
    taken = f" beside the {kept} bytes of parameters that keep= has stay there" if kept else ""
    return BudgetError(
        f"host_memory is {budget} bytes, but the largest unit ({largest.name}{size}) needs at least {least - kept} "
        f"bytes to be computed and updated{taken}; set host_memory to {least} bytes or more{larger}, "
        f"{'keep fewer parameters, ' if kept else ''}or pass smaller units"
    )


def _tries(ways: Sequence[Way], wanted: int) -> Iterator[tuple[int, Way, int]]:
    """In what order to look for a sharing that fits: (bytes to pass through, way to work, smallest tile).

    Tiles become smaller than is good for them only if no way would fit otherwise, but for the serial ones: to have the
    update wait for the computation costs more.
    """
    for passing in (PASSING, 0):
        for smallest in good_tiles(wanted):
            yield from ((passing, way, smallest) for way in ways if not way[2])
        yield from ((passing, way, SMALLEST_TILE) for way in ways if way[2])


def mean_state_itemsize(units: Sequence[UnitSize]) -> int:
    """Bytes of state of an element, on the average and rounded up: what most tiles are like where sizes are mixed."""
    trainable = [unit for unit in units if unit.trainable_numel]
    state = sum(unit.trainable_numel * unit.state_itemsize + unit.wide_numel * unit.wide_itemsize for unit in trainable)
    return -(-state // max(1, sum(unit.trainable_numel for unit in trainable))) or 8


def grad_tile_nbytes(unit: UnitSize, tile_numel: int) -> int:
    """Bytes of a GRAD tile of the unit, at most."""
    return rounded(min(tile_numel, unit.trainable_numel) * unit.grad_itemsize)


def state_tile_nbytes(unit: UnitSize, tile_numel: int) -> int:
    """Bytes of a STATE tile of the unit, at most."""
    if not unit.trainable_numel:
        return 0
    nbytes = (min(tile_numel, unit.trainable_numel) + 64) * unit.state_itemsize
    return rounded(nbytes + min(tile_numel, unit.wide_numel) * unit.wide_itemsize)


def _compute_bytes(units: Sequence[UnitSize], tile_numel: int, *, hold_tiles: bool, beside: bool) -> int:
    """The computation's leases: one unit, those around it, and gradients.

    Gradient tiles that are held belong to the unit whose gradient came last, which may be another one than is being
    computed: the tiles of an output layer tied to the embedding are still held when the last block is gathered.
    """
    computed = max((unit.computed_nbytes + rounded(unit.nested_nbytes) for unit in units), default=0)
    if any(unit.ranks > 1 for unit in units):
        return computed + _transit_bytes(units, tile_numel, beside=beside)
    return computed + _gradient_bytes(units, tile_numel, hold_tiles=hold_tiles)


def _transit_bytes(units: Sequence[UnitSize], tile_numel: int, *, beside: bool) -> int:
    """What several ranks need besides: a shard that is sent, buckets of gradients, what of them has arrived.

    `beside`: another unit on its way here, and another bucket that is filled while the first is exchanged.
    """
    buckets = max((unit.bucket_nbytes for unit in units), default=0) * (2 if beside else 1)
    arrived = max((received_nbytes(unit, tile_numel) + grad_tile_nbytes(unit, tile_numel) for unit in units), default=0)
    sent = max((rounded(unit.param_nbytes) for unit in units if unit.gathered_nbytes), default=0)
    ahead = max((unit.computed_nbytes for unit in units), default=0) if beside else 0
    return buckets + arrived + sent + ahead


def lagging_nbytes(shard: Shard) -> int:
    """Bytes that a unit keeps in memory from its gradient to the end of its update."""
    parameters = 0 if shard.layout.kept else rounded(shard.nbytes)
    return parameters + shard.trainable_numel * shard.layout.dtype.itemsize


def received_nbytes(unit: UnitSize, tile_numel: int) -> int:
    """Bytes that arrive from all ranks in the largest exchange of gradients."""
    numel = min(tile_numel, unit.trainable_numel)
    return rounded(arriving_nbytes(numel, unit.grad_itemsize, unit.ranks, unit.copies))


def _gradient_bytes(units: Sequence[UnitSize], tile_numel: int, *, hold_tiles: bool) -> int:
    def of(unit: UnitSize) -> int:
        tiles = -(-unit.trainable_numel // tile_numel)
        return grad_tile_nbytes(unit, tile_numel) * (tiles if hold_tiles else min(1, tiles))

    return max(map(of, units), default=0)


def _update_bytes(units: Sequence[UnitSize], tile_numel: int, depth: int, *, gaps: bool) -> int:
    """The update's leases: a unit and `depth` tiles.

    With gaps it gets on if a state tile finds one of the three places beside parameters and gradient tile; that it had
    more tiles in hand, or that a unit passes through, is then a matter of waiting.
    """

    def of(unit: UnitSize) -> int:
        if not unit.trainable_numel:
            return 0
        state, grad = state_tile_nbytes(unit, tile_numel), grad_tile_nbytes(unit, tile_numel)
        return rounded(unit.param_nbytes) + max(depth * (state + grad), (grad + 3 * state) if gaps else 0)

    return max(map(of, units), default=0)


def _nested(units: Sequence[UnitSize]) -> int:
    return max((rounded(unit.nested_nbytes) for unit in units), default=0)


def _lag(units: Sequence[UnitSize]) -> int:
    """One unit beside the one being computed.

    More would gain nothing where the drive is the limit, and take the room of what the plan keeps.
    """

    def of(unit: UnitSize) -> int:
        return rounded(unit.param_nbytes) + unit.trainable_numel * unit.grad_itemsize

    return max(map(of, units), default=0)


def _look_ahead(units: Sequence[UnitSize], tile_numel: int, most: int) -> int:
    """The next unit, and tiles enough to keep a drive busy; more would take the room of what the plan keeps."""
    unit = max((rounded(unit.param_nbytes) for unit in units), default=0)
    return min(most, unit + _TILES_AHEAD * _reserve(units, tile_numel))


def _reserve(units: Sequence[UnitSize], tile_numel: int) -> int:
    """The largest demand that no schedule announces: a tile of the update.

    A unit's parameters, and the tiles its gradient will be written to, are in the schedule and so among what read-ahead
    makes room for anyway; one that comes as a surprise takes the room of what was fetched for later.
    """
    return max((state_tile_nbytes(unit, tile_numel) + grad_tile_nbytes(unit, tile_numel) for unit in units), default=0)


def _least(units: Sequence[UnitSize], *, gaps: bool) -> int:
    compute = _compute_bytes(units, SMALLEST_TILE, hold_tiles=False, beside=False)
    return max(compute, _update_bytes(units, SMALLEST_TILE, 1, gaps=gaps) + _nested(units))
