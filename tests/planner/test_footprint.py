"""Sharing a budget out: what is promised holds for any model and any budget."""

from __future__ import annotations

import pytest
from doubles_combinations import number_of
from doubles_planner import MODELS, TILES, least_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import BudgetError
from tiermem.memory.arena import rounded
from tiermem.memory.sizes import format_bytes
from tiermem.pager.tiling import SMALLEST_TILE
from tiermem.planner.footprint import PASSING, Footprint, UnitSize, plan_footprint
from tiermem.planner.tilesizes import good_tiles

MIB = 1 << 20


def grad_tile(unit: UnitSize, plan: Footprint) -> int:
    return rounded(min(plan.tile_numel, unit.trainable_numel) * unit.grad_itemsize)


def state_tile(unit: UnitSize, plan: Footprint) -> int:
    narrow = min(plan.tile_numel, unit.trainable_numel) * unit.state_itemsize
    return rounded(narrow + min(plan.tile_numel, unit.wide_numel) * unit.wide_itemsize)


def gradients(unit: UnitSize, plan: Footprint) -> int:
    tiles = -(-unit.trainable_numel // plan.tile_numel)
    return grad_tile(unit, plan) * (tiles if plan.hold_tiles else min(tiles, 1))


def worst_case(units: list[UnitSize], plan: Footprint) -> int:
    """The most bytes both actors can hold at one time, from what they do rather than from the planner's formula."""
    compute = max(
        rounded(unit.param_nbytes) + unit.nested_nbytes + gradients(other, plan) for unit in units for other in units
    )
    around = max(unit.nested_nbytes for unit in units)
    update = max(
        (
            rounded(unit.param_nbytes) + plan.depth * (grad_tile(unit, plan) + state_tile(unit, plan))
            for unit in units
            if unit.trainable_numel
        ),
        default=0,
    )
    return max(compute, around + update) if plan.serial else compute + update


@given(units=MODELS, tile=TILES, extra=st.integers(0, 400 * MIB))
@settings(max_examples=number_of(120, 300))
def test_what_is_leased_at_one_time_fits(units: list[UnitSize], tile: int, extra: int) -> None:
    budget = least_of(units) + extra
    plan = plan_footprint(units, budget, tile)
    assert worst_case(units, plan) <= budget
    assert plan.tile_numel % SMALLEST_TILE == 0
    assert plan.tile_numel > 0
    assert 0 <= plan.look_ahead <= budget
    assert max(state_tile(unit, plan) for unit in units) <= plan.reserve <= budget
    lag = max(rounded(unit.param_nbytes) + unit.trainable_numel * unit.grad_itemsize for unit in units)
    assert plan.lag == (0 if plan.serial else lag), "one unit's update may lag behind backward"


@given(units=MODELS, tile=TILES)
@settings(max_examples=number_of(80, 200))
def test_the_least_budget_works_and_no_byte_less(units: list[UnitSize], tile: int) -> None:
    least = least_of(units)
    assert plan_footprint(units, least, tile).least == least
    with pytest.raises(BudgetError, match=f"at least {least} bytes"):
        plan_footprint(units, least - 1, tile)


def test_the_error_says_what_a_tenth_more_than_the_least_brings() -> None:
    units = [UnitSize("large", 64 * MIB, 16 << 20, 4, 8)]
    least = least_of(units)
    small, large = (plan_footprint(units, budget, 4 * MIB).tile_numel * 8 for budget in (least, least * 11 // 10))
    assert small * 4 <= large
    with pytest.raises(BudgetError) as caught:
        plan_footprint(units, least - 1, 4 * MIB)
    hint = f"({format_bytes(small)} a tile, slow; with a tenth more {format_bytes(large)})"
    assert f"set host_memory to {least} bytes or more {hint}" in str(caught.value)
    with pytest.raises(BudgetError) as caught:
        plan_footprint(units, least - 1, small)
    assert "slow" not in str(caught.value), "nothing larger was asked for"


EXTRA = st.one_of(st.integers(0, 400 * MIB), st.integers(0, 4 * PASSING))


@given(units=MODELS, tile=TILES, budgets=st.tuples(EXTRA, EXTRA))
@settings(max_examples=number_of(80, 200))
def test_more_memory_is_never_used_worse(units: list[UnitSize], tile: int, budgets: tuple[int, int]) -> None:
    low, high = (plan_footprint(units, least_of(units) + extra, tile) for extra in sorted(budgets))
    wanted = plan_footprint(units, 1 << 50, tile).tile_numel

    def way(plan: Footprint) -> tuple[bool, bool, bool, bool, int]:
        """How well it works: with room for others to pass, beside the computation, with tiles that are large enough."""
        is_good = not plan.serial and plan.tile_numel >= good_tiles(wanted)[0]
        return plan.passing >= PASSING, not plan.serial, is_good, plan.hold_tiles, plan.depth

    assert way(high) >= way(low)
    if way(high) == way(low):
        assert high.tile_numel >= low.tile_numel


@given(
    width=st.sampled_from([512, 1024, 2048, 4096, 8192]),
    layers=st.integers(2, 80),
    vocabulary=st.sampled_from([256, 32_000, 128_256]),
    tied=st.booleans(),
)
@settings(max_examples=number_of(40, 100))
def test_twice_the_largest_unit_is_enough(width: int, layers: int, vocabulary: int, tied: bool) -> None:
    layer, embedding = 12 * width * width + 2 * width, vocabulary * width

    def unit(name: str, numel: int, nested: int) -> UnitSize:
        return UnitSize(name, numel * 2, numel, grad_itemsize=2, state_itemsize=10, nested_nbytes=nested)

    # The model's own norm is around every layer; a head tied to the embedding borrows it while nothing else is held.
    units = [unit(f"layer {index}", layer, rounded(2 * width)) for index in range(layers)]
    units += [unit("embedding", embedding, rounded(2 * width)), unit("norm", width, 0)]
    if not tied:
        units.append(unit("head", embedding, rounded(2 * width)))
    plan_footprint(units, 2 * max(unit.param_nbytes for unit in units), 4 * MIB)


def test_a_tile_smaller_than_the_comfortable_one_is_taken_when_asked_for() -> None:
    units = [UnitSize("layer", 4 * MIB, 2 * MIB, 2, 10)]
    plan = plan_footprint(units, 400 * MIB, tile_nbytes=SMALLEST_TILE * 10)
    assert (plan.tile_numel, plan.serial, plan.depth) == (SMALLEST_TILE, False, 3)


def test_tiles_stay_large_where_a_slower_way_to_hold_them_fits() -> None:
    # 10 M float32 parameters and a budget of three times their bytes: all gradients at once would leave 2**15 a tile.
    numel = 10_000_000
    units = [UnitSize("layer", 4 * numel, numel, grad_itemsize=4, state_itemsize=8)]
    plan = plan_footprint(units, 3 * 4 * numel + 2 * MIB, 8 * MIB)
    assert (plan.tile_numel, plan.hold_tiles, plan.depth, plan.serial) == (1 << 20, False, 2, False)


@given(st.integers(1, 60), st.sampled_from([8, 10, 12]), st.sampled_from([2, 4]))
def test_large_tiles_are_of_whole_huge_pages(mebibytes: int, state: int, itemsize: int) -> None:
    units = [UnitSize("layer", 64 * MIB * itemsize, 64 * MIB, itemsize, state)]
    for budget in (2 << 30, 64 << 20):
        tile = plan_footprint(units, units[0].param_nbytes * 2 + budget, mebibytes * MIB).tile_numel
        assert tile * state <= max(mebibytes * MIB, SMALLEST_TILE * state)
        assert tile < MIB or (tile * state) % (2 * MIB) == (tile * itemsize) % (2 * MIB) == 0


def test_held_gradients_of_one_unit_beside_the_parameters_of_another() -> None:
    frozen = UnitSize("frozen layer", 40 * MIB, 0, 2, 10)
    trained = UnitSize("head", 20 * MIB, 10 * MIB, 2, 10)
    plan = plan_footprint([frozen, trained], 90 * MIB, MIB)
    assert not plan.hold_tiles or worst_case([frozen, trained], plan) <= 90 * MIB


def test_a_model_without_anything_to_train_has_no_update_to_pay_for() -> None:
    plan = plan_footprint([UnitSize("frozen", 10 * MIB, 0, 2, 1)], 10 * MIB, MIB)
    assert plan.least == 10 * MIB
    assert not plan.serial


def test_where_everything_is_kept_no_bytes_of_parameters_are_named() -> None:
    kept = UnitSize("norms", MIB, MIB // 4, 4, 8, kept=True)
    with pytest.raises(BudgetError, match=r"the largest unit \(norms\) needs at least \d+ bytes"):
        plan_footprint([kept], MIB, MIB)


def test_gradients_of_what_is_kept_have_a_tile_beside_those_that_are_held() -> None:
    rest = UnitSize("rest", 4 * MIB, MIB, 4, 8)
    kept = UnitSize("norms", MIB // 16, MIB // 64, 4, 8, kept=True)
    alone = plan_footprint([rest], 64 * MIB, MIB)
    beside = plan_footprint([rest, kept], 64 * MIB + rounded(MIB // 16), MIB)
    assert alone.hold_tiles
    assert beside.hold_tiles
    assert beside.passing == alone.passing - rounded(MIB // 64 * 4)
