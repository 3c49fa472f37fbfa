"""Sharing a device budget out: what the computation holds fits, wherever on the device it happens to lie."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from doubles_combinations import number_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import BudgetError
from tiermem.memory.arena import Frame, rounded
from tiermem.memory.slab import SlabArena, TensorSlab
from tiermem.memory.tiers import Tier
from tiermem.pager.tiling import SMALLEST_TILE
from tiermem.planner.device import (
    PIECE,
    _beside,
    _needed_by_ranks,
    _taken,
    device_least,
    device_most,
    plan_tiers,
    settled_nbytes,
)
from tiermem.planner.footprint import UnitSize, received_nbytes, state_tile_nbytes

MIB = 1 << 20
PLENTY = 4 << 30
PAGE = rounded(1)
# Which of many fillers goes, by one draw and not by hundreds.
RANDOM = st.integers(0, (1 << 32) - 1).map(random.Random)


def unit(numel: int, nested: int = 0, count: int = 0, frozen: int = 0) -> UnitSize:
    return UnitSize("unit", (numel + frozen) * 4, numel, 4, 8, rounded(nested), count)


UNITS = st.lists(
    st.builds(
        unit, st.integers(1, 5_000_000), st.integers(0, 4 * MIB), st.integers(0, 3), st.sampled_from([0, 1, 900_000])
    ),
    min_size=1,
    max_size=5,
)


@given(units=UNITS)
@settings(max_examples=number_of(80, 200))
def test_the_least_budget_works_and_no_byte_less(units: list[UnitSize]) -> None:
    least = device_least(units)
    footprint, device = plan_tiers(units, PLENTY, least, 16 * MIB)
    assert device.nbytes == least
    assert footprint.tile_numel >= SMALLEST_TILE
    assert 0 <= device.reserve <= least
    with pytest.raises(BudgetError, match=f"set device_memory to {least} bytes"):
        plan_tiers(units, PLENTY, least - 1, 16 * MIB)


@given(units=UNITS, extra=st.integers(0, 200 * MIB))
@settings(max_examples=number_of(80, 200))
def test_what_is_held_fits_in_bytes(units: list[UnitSize], extra: int) -> None:
    budget = device_least(units) + extra
    footprint, device = plan_tiers(units, PLENTY, budget, 16 * MIB)
    tiles = {each: -(-each.trainable_numel // footprint.tile_numel) if device.hold_tiles else 1 for each in units}
    for computed in units:
        for written in units:
            tile = rounded(min(footprint.tile_numel, written.trainable_numel) * 4)
            assert rounded(computed.param_nbytes) + computed.nested_nbytes + tiles[written] * tile <= budget


def place_among_fillers(arena: SlabArena, holds: Sequence[int], data: st.DataObject) -> list[Frame]:
    """Put frames of these bytes where others push them, which can be made to go; return those that are left."""
    filler: list[Frame] = []
    victims = data.draw(RANDOM)
    for nbytes in holds:
        wanted = data.draw(st.integers(0, arena.capacity // PAGE))
        filler += [frame for _ in range(wanted) if (frame := arena.allocate(PAGE)) is not None]
        while arena.allocate(nbytes) is None:
            assert filler, f"no place for {nbytes} bytes"
            arena.free(filler.pop(victims.randrange(len(filler))))
    return filler


@given(data=st.data(), around=st.integers(0, 2), own=st.integers(1, 12))
@settings(max_examples=number_of(120, 300))
def test_no_place_of_what_is_held_leaves_a_unit_without_one(data: st.DataObject, around: int, own: int) -> None:
    """The rule of gaps: frames are put anywhere, the rest is cleared, and the unit and its tiles find room."""
    nested = [data.draw(st.integers(1, 5)) for _ in range(around)]
    size = unit(own * PAGE // 4, sum(nested) * PAGE, around)
    arena = SlabArena(TensorSlab(torch.empty(device_least([size]), dtype=torch.uint8)), Tier.DEVICE)
    filler = []
    held = []
    for pages in nested:
        before = data.draw(st.integers(0, max(0, (arena.capacity - arena.reserved) // PAGE - sum(nested))))
        filler += [arena.allocate(PAGE) for _ in range(before)]
        frame = arena.allocate(pages * PAGE)
        if frame is None:
            return  # the place drawn cannot come about
        held.append(frame)
    for frame in filler:
        arena.free(frame)
    assert arena.clearing(own * PAGE, []) == []
    assert arena.allocate(own * PAGE) is not None
    assert arena.allocate(rounded(min(SMALLEST_TILE * 4, own * PAGE))) is not None


@given(units=UNITS, extra=st.integers(0, 4 * MIB), settle=st.booleans())
@settings(max_examples=number_of(80, 200))
def test_the_budget_named_for_activations_has_room_for_a_piece(units: list[UnitSize], extra: int, settle: bool) -> None:
    _, device = plan_tiers(units, PLENTY, device_least(units) + extra, 16 * MIB, settle=settle)
    enough = device.taken.least_for(PIECE)
    assert (device.passing >= PIECE) == (device.nbytes >= enough)
    _, device = plan_tiers(units, PLENTY, max(device.nbytes, enough), 16 * MIB, settle=settle)
    assert device.passing >= PIECE


@given(units=UNITS, extra=st.integers(0, 16 * MIB), settle=st.booleans())
@settings(max_examples=number_of(80, 200))
def test_a_piece_passes_wherever_it_could_with_the_smallest_tiles(
    units: list[UnitSize], extra: int, settle: bool
) -> None:
    """Larger tiles, all of them at once, and units that are settled are not had at the price of activations."""
    enough = _taken(units, SMALLEST_TILE, roomy=False).least_for(PIECE)
    _, device = plan_tiers(units, PLENTY, max(device_least(units), enough) + extra, 16 * MIB, settle=settle)
    assert device.passing >= PIECE


@given(data=st.data(), nested=st.lists(st.integers(1, 5), max_size=2), own=st.integers(1, 12), settle=st.booleans())
@settings(max_examples=number_of(120, 300))
def test_no_place_of_what_is_leased_leaves_a_piece_of_activations_without_one(
    data: st.DataObject, nested: list[int], own: int, settle: bool
) -> None:
    """Everything the computation and an update can hold lies anywhere; the rest is cleared, and the piece comes."""
    size = unit(own * PAGE // 4, sum(nested) * PAGE, len(nested))
    budget = device_least([size]) + data.draw(st.integers(0, 60)) * PAGE
    footprint, device = plan_tiers([size], PLENTY, budget, 1 << 16, settle=settle)
    tile = rounded(min(footprint.tile_numel, size.trainable_numel) * 4)
    tiles = -(-size.trainable_numel // footprint.tile_numel) if device.hold_tiles else 1
    holds = [*(pages * PAGE for pages in nested), own * PAGE, *[tile] * tiles]
    if device.settled:
        holds += [own * PAGE, tile, state_tile_nbytes(size, footprint.tile_numel)]
    assert (device.taken.nbytes, device.taken.count) == (sum(holds), len(holds))
    piece = device.passing // PAGE * PAGE
    if not piece:
        return
    arena = SlabArena(TensorSlab(torch.empty(budget, dtype=torch.uint8)), Tier.DEVICE)
    for frame in place_among_fillers(arena, sorted(holds, reverse=True), data):
        arena.free(frame)
    assert arena.clearing(piece, []) == []
    assert arena.allocate(piece) is not None


@given(own=st.integers(1, 40), nested=st.lists(st.integers(1, 5), max_size=2), extra=st.integers(0, 200))
@settings(max_examples=number_of(80, 200))
def test_the_worst_places_of_gradient_tiles_leave_the_last_one_its_own(own: int, nested: list[int], extra: int) -> None:
    """Each frame is put one page less than a tile behind the one before: no gap is of use, and each wastes most."""
    size = unit(own * PAGE // 4, sum(nested) * PAGE, len(nested))
    budget = device_least([size]) + extra * PAGE
    footprint, device = plan_tiers([size], PLENTY, budget, 1 << 16)
    tile = rounded(min(footprint.tile_numel, size.trainable_numel) * 4)
    tiles = -(-size.trainable_numel // footprint.tile_numel) if device.hold_tiles else 1
    arena = SlabArena(TensorSlab(torch.empty(budget, dtype=torch.uint8)), Tier.DEVICE)
    filler = {frame.offset: frame for _ in range(budget // PAGE) if (frame := arena.allocate(PAGE)) is not None}
    place = 0
    for nbytes in [*(pages * PAGE for pages in nested), own * PAGE, *[tile] * (tiles - 1)]:
        place += tile - PAGE
        for page in range(place, place + nbytes, PAGE):
            arena.free(filler.pop(page))
        frame = arena.allocate(nbytes)
        assert frame is not None
        assert frame.offset == place
        place += nbytes
    for frame in filler.values():
        arena.free(frame)
    assert arena.allocate(tile) is not None


def test_the_computation_holds_nothing_in_host_memory() -> None:
    """Units around the one being computed lie on the device: host memory need not have room for them."""
    units = [unit(1000, nested=100 * MIB, count=1)]
    footprint, _ = plan_tiers(units, 2 * MIB, device_least(units), 64 << 10)
    assert footprint.least < MIB


def test_tiles_are_made_smaller_for_a_small_device() -> None:
    units = [unit(50 * MIB)]
    small, held = plan_tiers(units, PLENTY, device_least(units) + 64 * 1024, 16 * MIB)
    large, _ = plan_tiers(units, PLENTY, 4 * device_least(units), 16 * MIB)
    assert small.tile_numel < large.tile_numel
    assert not held.hold_tiles
    with pytest.raises(BudgetError, match="set device_memory to") as refused:
        plan_tiers(units, PLENTY, device_least(units) + 64 * 1024, 16 * MIB, tile=large.tile_numel)
    enough = int(str(refused.value).split("set device_memory to ")[1].split()[0])
    assert plan_tiers(units, PLENTY, enough, 16 * MIB, tile=large.tile_numel)[0].tile_numel == large.tile_numel
    with pytest.raises(BudgetError):
        plan_tiers(units, PLENTY, enough - 4096, 16 * MIB, tile=large.tile_numel)


def test_with_the_most_everything_stays() -> None:
    units = [unit(MIB), unit(3 * MIB)]
    assert device_most(units) >= sum(each.param_nbytes for each in units) + device_least(units)


@given(data=st.data(), pages=st.integers(1, 9), frozen=st.integers(0, 5))
@settings(max_examples=number_of(120, 300))
def test_no_place_of_parameters_leaves_the_update_without_its_tiles(
    data: st.DataObject, pages: int, frozen: int
) -> None:
    """The same rule in host memory that lies in one piece: parameters anywhere, then a gradient and a state tile."""
    size = unit(pages * PAGE // 4, frozen=frozen * PAGE // 4)
    with pytest.raises(BudgetError) as caught:
        plan_tiers([size], 1, PLENTY, 1)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    plan, _ = plan_tiers([size], least, PLENTY, 1)
    assert plan.least == least
    arena = SlabArena(TensorSlab(torch.empty(least, dtype=torch.uint8)), Tier.HOST)
    state, grad = (
        rounded((min(SMALLEST_TILE, size.trainable_numel) + 64) * 8),
        rounded(min(SMALLEST_TILE * 4, pages * PAGE)),
    )
    for frame in place_among_fillers(arena, [size.param_nbytes, grad], data):
        arena.free(frame)
    assert arena.allocate(state) is not None


@given(data=st.data(), ranks=st.integers(2, 4), pages=st.integers(1, 9), beside=st.booleans())
@settings(max_examples=number_of(120, 300))
def test_no_place_of_what_ranks_hold_leaves_the_rest_without_one(
    data: st.DataObject, ranks: int, pages: int, beside: bool
) -> None:
    """What is held in an exchange comes in its order, at places that fillers push it to; fillers can be made to go."""
    numel = pages * PAGE // 4
    size = UnitSize("unit", numel * 4, numel, 4, 8, 0, 0, ranks, numel * 4 * ranks)
    needed = _needed_by_ranks([size], SMALLEST_TILE, beside=beside)
    assert needed <= device_most([size])
    arena = SlabArena(TensorSlab(torch.empty(needed, dtype=torch.uint8)), Tier.DEVICE)
    tile, received = rounded(min(SMALLEST_TILE, numel) * 4), received_nbytes(size, SMALLEST_TILE)
    gathered = [size.computed_nbytes] * (2 if beside else 1)
    # A bucket is open already, or asked for while everything else is held that can be.
    holds = [size.bucket_nbytes, size.param_nbytes, *gathered, received, tile]
    if data.draw(st.booleans()):
        holds = (
            [size.param_nbytes, *gathered, received, tile, size.bucket_nbytes] if beside else [*gathered, *holds[:1]]
        )
    place_among_fillers(arena, holds, data)
    assert arena.reserved <= needed


@given(data=st.data(), ranks=st.integers(2, 4), pages=st.integers(1, 9), updated=st.integers(1, 9))
@settings(max_examples=number_of(60, 300))
def test_no_place_of_what_ranks_and_their_update_hold_leaves_the_rest_without_one(
    data: st.DataObject, ranks: int, pages: int, updated: int
) -> None:
    """All that can be held on a device whose unit is updated there, in whatever order it is asked for."""
    computed, other = (
        UnitSize("unit", nbytes, nbytes // 4, 4, 8, 0, 0, ranks, nbytes * ranks)
        for nbytes in (pages * PAGE, updated * PAGE)
    )
    needed = _beside([computed, other], SMALLEST_TILE, [other])
    arena = SlabArena(TensorSlab(torch.empty(needed, dtype=torch.uint8)), Tier.DEVICE)
    tile = [rounded(min(SMALLEST_TILE, each.trainable_numel) * 4) for each in (computed, other)]
    update = [other.param_nbytes, tile[1], state_tile_nbytes(other, SMALLEST_TILE)]
    held = [computed.computed_nbytes, other.computed_nbytes, computed.param_nbytes, computed.bucket_nbytes]
    holds = [*held, received_nbytes(computed, SMALLEST_TILE), tile[0], *update]
    place_among_fillers(arena, data.draw(st.permutations(holds)), data)


def test_ranks_gather_beside_the_computation_where_there_is_room() -> None:
    units = [UnitSize("unit", MIB, MIB // 4, 4, 8, 0, 0, 2, 2 * MIB)]
    least = device_least(units)
    assert not plan_tiers(units, PLENTY, least, 16 * MIB)[1].beside
    assert plan_tiers(units, PLENTY, 4 * least, 16 * MIB)[1].beside
    footprint, device = plan_tiers(units, plan_tiers(units, PLENTY, least, 1)[0].least, 4 * least, 16 * MIB)
    assert footprint.serial
    assert not device.beside, "an update that nobody asks for must not be missed by what is gathered ahead"
    with pytest.raises(BudgetError, match=f"{2 * MIB} bytes of parameters"):
        plan_tiers(units, PLENTY, least - 1, 16 * MIB)


@given(units=UNITS, extra=st.integers(0, 400 * MIB))
@settings(max_examples=number_of(80, 200))
def test_what_is_settled_fits_beside_what_is_leased(units: list[UnitSize], extra: int) -> None:
    budget = device_least(units) + extra
    footprint, device = plan_tiers(units, PLENTY, budget, 16 * MIB, settle=True)
    plain_footprint, plain = plan_tiers(units, PLENTY, budget, 16 * MIB)
    assert (footprint, device.hold_tiles) == (plain_footprint, plain.hold_tiles), "what is leased, and how, stays"
    trainable = [number for number, each in enumerate(units) if each.trainable_numel]
    assert list(device.settled) == trainable[: len(device.settled)], "from the first one on"
    if not device.settled:
        assert device == plain
        return
    kept = [units[number] for number in device.settled]
    tile = footprint.tile_numel
    taken = sum(settled_nbytes(each, tile) for each in kept)
    for each in kept:  # parameters, gradients and state, whatever their tiles are
        tiles = -(-each.trainable_numel // tile)
        state = sum(rounded(min(tile, each.trainable_numel - at * tile) * 8) for at in range(tiles))
        assert settled_nbytes(each, tile) >= each.param_nbytes + each.trainable_numel * 4 + state
    for computed in units:
        gradient = max(
            -(-each.trainable_numel // tile) * rounded(min(tile, each.trainable_numel) * 4) for each in units
        )
        leased = rounded(computed.param_nbytes) + computed.nested_nbytes + gradient
        updated = max(rounded(each.param_nbytes) + rounded(min(tile, each.trainable_numel) * 4) for each in kept)
        assert taken + leased + updated + max(state_tile_nbytes(each, tile) for each in kept) <= budget
    assert device.look_ahead <= budget - taken
    if len(kept) > 2:
        others = [each for number, each in enumerate(units) if number not in device.settled]
        assert taken + sum(rounded(each.param_nbytes) for each in others) <= budget


def test_with_the_most_all_units_are_settled() -> None:
    units = [unit(MIB), unit(3 * MIB), unit(20_000)]
    most = device_most(units, settle=True)
    assert plan_tiers(units, PLENTY, most, 8 << 20, settle=True)[1].settled == (0, 1, 2)
    assert len(plan_tiers(units, PLENTY, most // 2, 8 << 20, settle=True)[1].settled) < 3
    ranks = [UnitSize("unit", MIB, MIB // 4, 4, 8, 0, 0, 2, 2 * MIB)] * 4
    most = device_most(ranks, settle=True)
    assert plan_tiers(ranks, PLENTY, most, 8 << 20, settle=True)[1].settled == (0, 1, 2, 3)
    assert plan_tiers(ranks, PLENTY, device_least(ranks), 8 << 20, settle=True)[1].settled == ()


@given(units=UNITS, tile_nbytes=st.integers(1, 64 * MIB))
@settings(max_examples=number_of(40, 100))
def test_the_most_is_enough_for_the_tiles_that_there_are(units: list[UnitSize], tile_nbytes: int) -> None:
    most = device_most(units, settle=True, tile_nbytes=tile_nbytes)
    _, device = plan_tiers(units, PLENTY, most, tile_nbytes, settle=True)
    trainable = [number for number, each in enumerate(units) if each.trainable_numel]
    assert device.settled in (tuple(trainable), ()), "all of them, or the budget is too small for any beside the rest"
    if device.hold_tiles:
        assert device.settled


def test_a_unit_with_little_in_its_last_tile_takes_little_more_than_its_bytes() -> None:
    each = unit((1 << 20) + 4096)
    assert settled_nbytes(each, 1 << 20) < 1.01 * each.trainable_numel * (4 + 4 + 8)
    assert settled_nbytes(each, 1 << 20) == settled_nbytes(each, 1 << 30) + rounded(64 * 8)


@given(data=st.data(), around=st.integers(0, 2), own=st.integers(1, 9), updated=st.integers(1, 9))
@settings(max_examples=number_of(60, 300))
def test_no_place_of_what_computation_and_update_hold_leaves_the_rest_without_one(
    data: st.DataObject, around: int, own: int, updated: int
) -> None:
    """Either asks first; fillers push their frames anywhere, and can be made to go."""
    nested = [data.draw(st.integers(1, 5)) for _ in range(around)]
    computed = unit(own * PAGE // 4, sum(nested) * PAGE, around)
    other = unit(updated * PAGE // 4)
    needed = _beside([computed, other], SMALLEST_TILE, [other])
    arena = SlabArena(TensorSlab(torch.empty(needed, dtype=torch.uint8)), Tier.DEVICE)
    tiles = [rounded(min(SMALLEST_TILE, each.trainable_numel) * 4) for each in (computed, other)]
    update = [other.param_nbytes, tiles[1], state_tile_nbytes(other, SMALLEST_TILE)]
    compute = [*(pages * PAGE for pages in nested), computed.param_nbytes]
    # The computation gets on beside all that the update holds; the update beside what it holds without gradient tiles.
    holds = data.draw(st.sampled_from([[*update, *compute, tiles[0]], [*compute, *update]]))
    place_among_fillers(arena, holds, data)
