"""How a budget of device memory is shared out, beside that of host memory.

Owns the arithmetic from unit sizes and a device budget to what the computation may hold there at one time. Does not
know torch, pages or streams: bytes in, bytes out. Guarantees that the least budget it names works although a device's
frames lie in one piece and cannot be moved (see "Gaps"), and that tiles fit into both budgets.

Gaps. Frames that are leased stay where they are, all others can be made to go. Between and around n leased frames there
are n + 1 gaps, so a frame of b bytes finds its place if the bytes that are not leased are at least (n + 1) b, wherever
the n frames lie. That is asked for twice: when a unit is gathered inside n others, and when gradient tiles are taken
while a unit, those around it and the tiles before are held: those lie where something had just gone, not side by side.

Several ranks hold more there: what is gathered, the shard it comes from, a bucket of gradients, and what has arrived of
the other ranks' buckets. For each the same rule is asked for, with everything that can lie on the device beside it
(`_needed_by_ranks`).

Activations pass through pieces that are leased one at a time, by the computation, which asks for nothing else
meanwhile. So it is enough that a piece finds its place beside all that can be leased at that moment
(`DeviceFootprint.passing`). Room for a small one is left wherever anything else fits that way.

Settling. A unit whose state stays on the device is updated there, and none of its bytes travels. Units are settled from
the first one on: their gradients come last in backward, so that their update has nothing to hide behind. The first
two are settled wherever they fit beside what computation and update lease, and a unit read ahead; more of them as long
as the parameters of all other units could stay on the device as well, which are used twice a step. Over ranks each
settles its part of the same units. Not what is kept in host memory by choice: that is updated there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiermem.errors import BudgetError
from tiermem.memory.arena import rounded
from tiermem.pager.tiling import SMALLEST_TILE
from tiermem.planner.footprint import (
    Footprint,
    UnitSize,
    grad_tile_nbytes,
    least_budget,
    mean_state_itemsize,
    plan_footprint,
    received_nbytes,
    state_tile_nbytes,
)
from tiermem.planner.resting import resting_nbytes
from tiermem.planner.tilesizes import planned_tile, tile_sizes

# Units whose update nothing follows in backward that it could hide behind: the first of the model.
EXPOSED = 2
# The smallest piece in which activations pass through, bytes: one block of a frame.
PIECE = rounded(1)
# Bytes of a tile of state where nobody says.
_USUAL_TILE = 8 << 20


@dataclass(frozen=True, slots=True)
class Leased:
    """Leased frames: how many they may be at most, and their bytes together."""

    nbytes: int
    count: int

    def least_for(self, frame: int) -> int:
        """The device budget, bytes, in which a frame of so many bytes finds its place beside them."""
        return self.nbytes + (self.count + 1) * rounded(frame)


@dataclass(frozen=True, slots=True)
class DeviceFootprint:
    """How the device budget is shared out.

    Attributes:
        nbytes: the budget.
        hold_tiles: whether a unit's gradient tiles are all leased at once while they arrive.
        beside: whether ranks gather the next unit, and add gradients up, beside the computation.
        reserve: bytes that fetching ahead leaves for demands.
        look_ahead: bytes fetched ahead at most.
        settled: units whose parameters, gradients and state stay on the device, where they are updated, by number.
        taken: what may be leased at most while something small comes and goes (activations).
    """

    nbytes: int
    hold_tiles: bool
    beside: bool
    reserve: int
    look_ahead: int
    settled: tuple[int, ...] = ()
    taken: Leased = Leased(0, 0)

    @property
    def passing(self) -> int:
        """The largest frame, bytes, that finds its place whatever is leased; 0: none does."""
        return max(0, self.nbytes - self.taken.nbytes) // (self.taken.count + 1)


def wished_tile(units: Sequence[UnitSize], host: int, budget: int, *, settle: bool = False) -> int:
    """Bytes of state that a tile should have beside a device; `host`: bytes for pages, of `budget`.

    `settle`: whether units may be updated on the device.
    """
    return planned_tile(budget, beside_device=sum(map(resting_nbytes, units)) <= host, settle=settle)


def plan_tiers(
    units: Sequence[UnitSize],
    host: int,
    device: int,
    tile_nbytes: int,
    look_ahead: int | None = None,
    *,
    tile: int | None = None,
    settle: bool = False,
) -> tuple[Footprint, DeviceFootprint]:
    """Share both budgets (bytes) out; other arguments as for `plan_footprint`.

    `settle`: whether units may be updated on the device, see "Settling".

    With a device the computation leases nothing in host memory; what it needs passes through, one unit at a time.

    Raises:
        BudgetError: the host budget, or the device budget, is too small; names the least that works.
    """
    least = device_least(units)
    if device < least:
        largest = max(units, key=lambda unit: unit.computed_nbytes)
        nbytes = largest.gathered_nbytes or largest.param_nbytes
        raise BudgetError(
            f"device_memory is {device} bytes, but the largest unit ({largest.name}, {nbytes} bytes of "
            f"parameters) needs at least {least} bytes on the device to be computed; "
            f"set device_memory to {least} bytes or more, or pass smaller units"
        )
    for piece in (PIECE, 0):
        nbytes = tile_nbytes
        while True:
            footprint = plan_footprint(_below(units), host, nbytes, look_ahead, tile=tile, gaps=True)
            needed = _needed(units, footprint.tile_numel, piece)
            if needed <= device:
                return footprint, _plan_above(units, device, footprint, piece, settle=settle)
            if tile is not None or footprint.tile_numel <= SMALLEST_TILE:
                break
            nbytes //= 2
    raise BudgetError(
        f"device_memory is {device} bytes, too few for gradient tiles of {footprint.tile_numel} elements; "
        f"set device_memory to {needed} bytes or more"
    )


def _plan_above(
    units: Sequence[UnitSize], device: int, footprint: Footprint, piece: int, *, settle: bool
) -> DeviceFootprint:
    """How the device is shared out beside this sharing of host memory; a piece of so many bytes passes through."""
    tile_numel, alone = footprint.tile_numel, all(unit.ranks == 1 for unit in units)
    wished = _needed(units, tile_numel, piece, roomy=True)
    # Where updates wait to be asked for, only the computation asks, and it comes too late for what is gathered ahead.
    roomy = wished <= device and (alone or not footprint.serial)
    settled = _settled(units, device, tile_numel) if settle and roomy else ()
    left = device - sum(settled_nbytes(units[number], tile_numel) for number in settled)
    spare = left - (wished if roomy else _needed(units, tile_numel, piece))
    return DeviceFootprint(
        nbytes=device,
        hold_tiles=roomy and alone,
        beside=roomy and not alone,
        reserve=max((grad_tile_nbytes(unit, tile_numel) for unit in units), default=0),
        look_ahead=max(spare, left // 2),
        settled=settled,
        taken=_taken(units, tile_numel, roomy=roomy, updated=[units[number] for number in settled]),
    )


def least_below(units: Sequence[UnitSize]) -> int:
    """The smallest host budget that works beside a device, bytes."""
    return least_budget(_below(units), gaps=True)


def _below(units: Sequence[UnitSize]) -> list[UnitSize]:
    """The units as host memory sees them beside a device: what passes through, and what is updated there."""
    return [replace(unit, nested_nbytes=0, nested_kept=0, ranks=1, gathered_nbytes=0) for unit in units]


def settled_nbytes(unit: UnitSize, tile_numel: int) -> int:
    """Bytes that a unit takes on the device whose parameters, gradients and state all stay there."""
    whole, rest = divmod(unit.trainable_numel, tile_numel)
    last = replace(unit, trainable_numel=rest, wide_numel=min(unit.wide_numel, rest))
    tiles = whole * (grad_tile_nbytes(unit, tile_numel) + state_tile_nbytes(unit, tile_numel))
    return rounded(unit.param_nbytes) + tiles + grad_tile_nbytes(last, tile_numel) + state_tile_nbytes(last, tile_numel)


def _settled(units: Sequence[UnitSize], device: int, tile_numel: int) -> tuple[int, ...]:
    """The units to settle: see "Settling". What they leave to be leased has room for a piece of activations, too."""
    found: list[int] = []
    taken, parameters = 0, sum(rounded(unit.param_nbytes) for unit in units)
    for number, unit in enumerate(units):
        if not unit.trainable_numel or unit.kept:
            continue
        taken += settled_nbytes(unit, tile_numel)
        parameters -= rounded(unit.param_nbytes)
        updated = [*(units[other] for other in found), unit]
        leased = _beside(units, tile_numel, updated)
        ahead = max(rounded(each.param_nbytes) for each in units)
        if taken + leased + (min(ahead, parameters) if len(found) < EXPOSED else parameters) > device:
            break
        found.append(number)
    return tuple(found)


def _beside(units: Sequence[UnitSize], tile_numel: int, updated: Sequence[UnitSize]) -> int:
    """What the computation (all gradient tiles at once) and the update of one of `updated` lease there, with gaps.

    The update has three frames in hand: parameters, a gradient tile, a state tile. Whatever the computation asks for
    finds its place beside all of them; so the computation gets on until it waits for the update, and then holds no
    gradient tiles: what the update asks for finds its place beside the rest. Over ranks, where others may announce
    gradients at any time, it finds its place beside everything.
    """
    if any(unit.ranks > 1 for unit in units):
        return _updated_by_ranks(units, tile_numel, updated)
    most = max(-(-unit.trainable_numel // tile_numel) for unit in units)
    grad = max(grad_tile_nbytes(unit, tile_numel) for unit in units)
    param = max(rounded(unit.param_nbytes) for unit in updated)
    state = max(state_tile_nbytes(unit, tile_numel) for unit in updated)
    held = param + grad + state

    def of(unit: UnitSize) -> int:
        around, own, count = rounded(unit.nested_nbytes), rounded(unit.param_nbytes), unit.nested_count
        return around + max(
            held + (count + 4) * own,
            own + held + (max(2 * most, 3) + count + 3) * grad,
            own + (count + 2) * param,
            own + param + (count + 3) * grad,
            own + param + grad + (count + 4) * state,
        )

    return max(map(of, units))


def device_least(units: Sequence[UnitSize]) -> int:
    """The smallest device budget that works, bytes."""
    return leased_nbytes(units, SMALLEST_TILE, roomy=False)


def device_most(units: Sequence[UnitSize], *, settle: bool = False, tile_nbytes: int = _USUAL_TILE) -> int:
    """Bytes with which no parameter would ever have to leave the device: more are of no use.

    `settle`: nor any state, in tiles of `tile_nbytes` bytes.
    """
    if settle:
        tile_numel = tile_sizes(tile_nbytes, mean_state_itemsize(units))[0]
        return _beside(units, tile_numel, units) + sum(settled_nbytes(unit, tile_numel) for unit in units)
    gradients = max((unit.bucket_nbytes for unit in units), default=0)
    alone = all(unit.ranks == 1 for unit in units)
    leased = leased_nbytes(units, SMALLEST_TILE, roomy=not alone)
    return sum(rounded(unit.param_nbytes) for unit in units) + leased + 2 * gradients


def leased_nbytes(units: Sequence[UnitSize], tile_numel: int, *, roomy: bool) -> int:
    """The computation's leases on the device, with room for the gaps between them.

    `roomy`: with all gradient tiles of a unit at once, or, with several ranks, another unit on its way.
    """
    if any(unit.ranks > 1 for unit in units):
        return _needed_by_ranks(units, tile_numel, beside=roomy)
    tile = max((grad_tile_nbytes(unit, tile_numel) for unit in units), default=0)
    most = max((-(-unit.trainable_numel // tile_numel) for unit in units), default=0) if roomy else 1

    def of(unit: UnitSize) -> int:
        around, own = rounded(unit.nested_nbytes), rounded(unit.param_nbytes)
        gathered = around + (unit.nested_count + 1) * own
        # One tile would do with one less, but then nothing small (activations) would pass through in the least budget.
        written = around + own + (max(2 * most, 3) + unit.nested_count) * tile
        return max(gathered, written)

    return max(map(of, units), default=0)


def _needed(units: Sequence[UnitSize], tile_numel: int, piece: int, *, roomy: bool = False) -> int:
    """As `leased_nbytes`, and enough for a piece of activations (bytes; 0: none) beside it."""
    leased = leased_nbytes(units, tile_numel, roomy=roomy)
    return max(leased, _taken(units, tile_numel, roomy=roomy).least_for(piece)) if piece and units else leased


def _taken(units: Sequence[UnitSize], tile_numel: int, *, roomy: bool, updated: Sequence[UnitSize] = ()) -> Leased:
    """All that can be leased on the device while a unit is computed: by the computation, and to update `updated`."""
    of = _RankFrames(units, tile_numel)
    tiles = max((-(-unit.trainable_numel // tile_numel) for unit in units), default=0) if roomy else 1
    frames = [of.computed, *[of.tile] * tiles]
    if any(unit.ranks > 1 for unit in units):
        frames = [*[of.computed, of.bucket] * (2 if roomy else 1), of.sent, of.received, of.tile]
    if updated:
        state = max(state_tile_nbytes(unit, tile_numel) for unit in updated)
        frames += [max(rounded(unit.param_nbytes) for unit in updated), of.tile, state]
    return Leased(of.around + sum(frames), of.count + len(frames))


class _RankFrames:
    """What the computation of one of several ranks may hold on its device at one time: the largest of each, bytes."""

    def __init__(self, units: Sequence[UnitSize], tile_numel: int) -> None:
        self.around = max(rounded(unit.nested_nbytes) for unit in units)
        self.count = max(unit.nested_count for unit in units)
        self.computed = max(unit.computed_nbytes for unit in units)
        self.sent = max(rounded(unit.param_nbytes) if unit.gathered_nbytes else 0 for unit in units)
        self.bucket = max(unit.bucket_nbytes for unit in units)
        self.received = max(received_nbytes(unit, tile_numel) for unit in units)
        self.tile = max(grad_tile_nbytes(unit, tile_numel) for unit in units)

    def room_for(self, frame: int, *others: int) -> int:
        """Bytes with which `frame` finds its place beside `others` and what is gathered around, with gaps."""
        return self.around + sum(others) + (self.count + len(others) + 1) * frame


def _needed_by_ranks(units: Sequence[UnitSize], tile_numel: int, *, beside: bool) -> int:
    """The same with several ranks: for each frame the least bytes with which it finds a place beside the others.

    The others are: what is gathered around; the unit that is computed; the shard from which one is gathered; the open
    bucket (the next one waits until it has been added up); and, as any rank may announce gradients at any time, what
    arrives of those and a tile of the sum. `beside`: and the unit that comes next, while the first is computed.
    """
    of = _RankFrames(units, tile_numel)
    if beside:
        return max(
            of.room_for(of.computed, of.computed, of.sent, of.bucket),
            of.room_for(of.bucket, of.computed, of.computed, of.sent, of.received, of.tile),
            of.room_for(of.received, of.computed, of.computed, of.sent, of.bucket),
            of.room_for(of.tile, of.computed, of.computed, of.sent, of.bucket, of.received),
        )
    return max(
        of.room_for(of.sent, of.bucket),
        of.room_for(of.computed, of.sent, of.bucket),
        of.room_for(of.bucket, of.computed),
        of.room_for(of.received, of.computed, of.sent, of.bucket),
        of.room_for(of.tile, of.computed, of.sent, of.bucket, of.received),
    )


def _updated_by_ranks(units: Sequence[UnitSize], tile_numel: int, updated: Sequence[UnitSize]) -> int:
    """As `_beside`, with several ranks: every frame, the update's three too, finds its place beside all others."""
    of = _RankFrames(units, tile_numel)
    param = max(rounded(unit.param_nbytes) for unit in updated)
    state = max(state_tile_nbytes(unit, tile_numel) for unit in updated)
    frames = [of.computed, of.computed, of.sent, of.bucket, of.received, of.tile, param, of.tile, state]
    return max(of.room_for(frame, *frames[:index], *frames[index + 1 :]) for index, frame in enumerate(frames))
