"""A step of few units stands for one of many: same sizes, same share of the budget, nearly the same prediction."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import pytest
from doubles_combinations import number_of, some_of
from doubles_planner import MACHINE, run_steps, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.memory.arena import rounded
from tiermem.pager.tiling import SMALLEST_TILE
from tiermem.planner.batches import COARSE, FINE, with_batches
from tiermem.planner.design import Design, PlanSettings, least_host_memory, make_design
from tiermem.planner.device import device_least, settled_nbytes
from tiermem.planner.machine import Device, Link
from tiermem.planner.parts import unit_sizes
from tiermem.planner.predict import seconds_of_step, simulate_quickly
from tiermem.planner.retile import retiled
from tiermem.planner.simulate import Simulation, simulate
from tiermem.planner.thin import drawn_out, repetitions, thinned
from tiermem.planner.workload import Workload, transformer
from tiermem.planner.world import World

MIB = 1 << 20


def design(work: Workload, share: float, update: str) -> Design:
    total = work.parameters * (work.state_itemsize + 2 * work.itemsize)
    budget = int(least_host_memory(work, 1) + share * total) // 4096 * 4096
    return make_design(work, MACHINE, PlanSettings(host_memory=budget, update=update))


def test_what_comes_again_is_found_whatever_stands_around_it() -> None:
    work = workload([9, *[5, 3] * 6, 7, *[4] * 5, 8])
    found = repetitions(work)
    assert [(each.units, each.block) for each in found] == [(tuple(range(1, 13)), 2), (tuple(range(14, 19)), 1)]


@given(
    # Units that differ by an element are taken for alike.
    runs=st.lists(
        st.tuples(st.integers(2_000, 10_000).map(lambda n: 10 * n), st.integers(1, 25)), min_size=1, max_size=3
    ),
    most=st.integers(2, 40),
    share=st.floats(0.05, 1.2),
    batches=st.sampled_from([1, 3]),
)
@settings(max_examples=number_of(10, 25))
def test_units_tiles_and_order_that_are_left_are_those_of_the_whole_step(
    runs: list[tuple[int, int]], most: int, share: float, batches: int
) -> None:
    work = workload([numel for numel, count in runs for _ in range(count)], batches=batches)
    exact = design(work, share, "forward")
    thin = thinned(exact, most)
    assert len(thin.workload.units) <= len(exact.workload.units)
    assert thin.footprint == exact.footprint
    assert 0 < thin.settings.host_memory <= exact.settings.host_memory
    kept = [next(n for n, unit in enumerate(work.units) if unit.name == left.name) for left in thin.workload.units]
    expected = [access for access in exact.workload.order if access.unit in kept]
    assert [(kept[access.unit], access.phase) for access in thin.workload.order] == [
        (access.unit, access.phase) for access in expected
    ]
    assert [thin.tiles(n) for n in range(len(kept))] == [exact.tiles(unit) for unit in kept]
    alike = {(unit.numel, unit.trainable) for unit in work.units}
    assert {(unit.numel, unit.trainable) for unit in thin.workload.units} == alike, "no kind of unit is lost"
    assert simulate(thin).seconds > 0, "what is left of the budget holds what is in use"


def beside_a_device(
    work: Workload, settled: float, update: str, *, simulated: bool = False, update_on: str = "auto"
) -> Design:
    """Beside a device with room to settle about this share of the units, host memory for a third of the rest."""
    sizes = unit_sizes(work, each=True)
    alone = work.parameters * work.itemsize * (1 - settled)
    nbytes = device_least(sizes) + int(alone + sum(settled_nbytes(size, 1 << 20) for size in sizes) * settled)
    device = Device(memory=8 << 30, flops={"bfloat16": 1e13}, to_device=2e10, to_host=2e10, simulated=simulated)
    cached = work.parameters * 14 * max(0.1, 1 - settled) / 3
    host = int(least_host_memory(work, 1, device=True) + cached) // 4096 * 4096
    plan = PlanSettings(host_memory=host, device_memory=nbytes // 4096 * 4096, update=update, update_on=update_on)
    return make_design(work, replace(MACHINE, device=device), plan)


@pytest.mark.parametrize(
    ("share", "update"), some_of([(0.5, "backward"), (3.0, "step")], [(0.05, "step"), (0.5, "forward")])
)
def test_what_is_settled_on_a_device_is_as_large_a_part_of_fewer_units(share: float, update: str) -> None:
    exact = beside_a_device(workload([1_000_000] * 80), share, update)
    assert exact.settled == frozenset(range(len(exact.settled)))
    assert (len(exact.settled) == 80) == (share > 1)
    assert len(exact.settled) >= 2
    thin = thinned(exact, 24)
    assert len(thin.settled) == pytest.approx(len(exact.settled) * 0.3, abs=2)
    quick, stood_in = simulate_quickly(exact)
    whole = simulate(exact)
    assert stood_in
    assert quick.seconds == pytest.approx(whole.seconds, rel=0.15)
    little = max(4 << 20, sum(whole.edges.values()) // 40)
    for edge in ("host->device", "device->host", "swap->host", "host->swap"):
        assert quick.edges.get(edge, 0) == pytest.approx(whole.edges.get(edge, 0), rel=0.15, abs=little), edge
    for tier in quick.tiers:
        assert tier.high_water <= tier.budget


def test_what_repeats_nowhere_stays_as_it_is() -> None:
    exact = design(workload(list(range(50_000, 90_000, 1_000))), 0.3, "forward")
    assert thinned(exact, 10) is exact


@pytest.mark.parametrize(("update", "share"), some_of([("backward", 0.5)], [("step", 0.1), ("forward", 0.1)]))
def test_two_short_steps_say_what_the_long_one_would(update: str, share: float) -> None:
    exact = design(workload([3_000_000] * 100), share, update)
    quick, stood_in = simulate_quickly(exact)
    assert stood_in
    whole = simulate(exact)
    assert quick.seconds == pytest.approx(whole.seconds, rel=0.12)
    assert quick.bytes_read + quick.bytes_written == pytest.approx(whole.bytes_read + whole.bytes_written, rel=0.1)
    assert quick.computing == pytest.approx(whole.computing, rel=0.03)
    assert all(tier.high_water <= tier.budget == exact.settings.host_memory for tier in quick.tiers)


@pytest.mark.parametrize(
    ("update", "share"), some_of([("auto", 0.3)], [("forward", 0.1), ("backward", 0.5), ("step", 0.1)])
)
def test_a_step_of_few_batches_says_what_one_of_many_would(update: str, share: float) -> None:
    exact = design(workload([1_000_000] * 5, batches=70), share, update)
    quick, stood_in = simulate_quickly(exact)
    assert stood_in
    whole = simulate(exact)
    assert quick.seconds == pytest.approx(whole.seconds, rel=0.02)
    for phase, seconds in whole.phases.items():
        assert quick.phases[phase] == pytest.approx(seconds, rel=0.05, abs=0.02 * whole.seconds)
    assert quick.bytes_read == pytest.approx(whole.bytes_read, rel=0.02)
    assert quick.bytes_written == pytest.approx(whole.bytes_written, rel=0.02)
    assert quick.computing == pytest.approx(whole.computing, rel=0.01)
    assert all(tier.high_water <= tier.budget == exact.settings.host_memory for tier in quick.tiers)


@given(
    numels=st.lists(st.sampled_from([200_000, 500_000, 1_000_000]), min_size=2, max_size=5),
    share=st.sampled_from([0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.1]),
    update=st.sampled_from(["forward", "backward", "step", "auto"]),
    more=st.integers(1, 24),
)
@settings(max_examples=number_of(3, 40))
def test_what_all_batches_move_is_what_few_of_them_say(numels: list[int], share: float, update: str, more: int) -> None:
    one = design(workload(numels), share, update)
    exact = with_batches(one, FINE.batches(one) + more)
    quick, whole = simulate_quickly(exact)[0], simulate(exact)
    assert quick.seconds == pytest.approx(whole.seconds, rel=0.03)
    little = 4 * max(numels)  # a unit's parameters, read or written once more
    assert quick.bytes_read == pytest.approx(whole.bytes_read, rel=0.05, abs=little)
    assert quick.bytes_written == pytest.approx(whole.bytes_written, rel=0.05, abs=little)


@pytest.mark.parametrize(("update", "share"), some_of([("step", 0.7), ("backward", 0.9)], [("forward", 0.8)]))
def test_what_moves_once_a_step_moves_no_more_in_a_thousand_batches(update: str, share: float) -> None:
    """By the line through two steps three times as much was written."""
    exact = design(workload([1_000_000] * 5, batches=1000), share, update)
    few = simulate(with_batches(exact, 40))
    quick = simulate_quickly(exact)[0]
    assert few.bytes_read > 0
    assert quick.bytes_read == pytest.approx(few.bytes_read, rel=0.35)
    assert quick.bytes_written == pytest.approx(few.bytes_written, rel=0.35)


def test_few_batches_are_simulated_as_they_are() -> None:
    one_batch = design(workload([1_000_000] * 5), 0.3, "forward")
    exact, one = with_batches(one_batch, FINE.batches(one_batch)), []

    def noted(asked: Design, *, with_plan: bool = False) -> Simulation:
        assert asked == exact
        one.append(simulate(with_batches(exact, 1), with_plan=with_plan))
        return one[-1]

    assert simulate_quickly(exact, simulated=noted) == (one[0], False)
    assert len(one) == 1


def test_what_fits_moves_nothing_in_short_either() -> None:
    exact = design(workload([500_000] * 150), 1.3, "forward")
    assert simulate_quickly(exact)[0].bytes_read == simulate(exact).bytes_read == 0


@pytest.mark.parametrize(("update", "share", "kept"), [("forward", 0.3, 0), ("step", 0.1, 20), ("backward", 0.05, 0)])
def test_of_what_is_not_in_hand_at_one_time_the_same_share_is_left(update: str, share: float, kept: int) -> None:
    work = workload([3_000_000] * 100)
    work = replace(work, units=tuple(replace(unit, kept=n < kept) for n, unit in enumerate(work.units)))
    exact, nbytes = design(work, share, update), 3_000_000 * 2
    thin, footprint = thinned(exact, 25), exact.footprint
    # Of bfloat16: two bytes of gradient and ten of state. One unit is computed, another updated, tile after tile, and
    # two tiles come and go; what is kept has a gradient tile of its own. (The first row has larger tiles than units.)
    assert footprint.hold_tiles
    tile = 12 * min(footprint.tile_numel, 3_000_000)
    in_hand = 3 * nbytes + (footprint.depth + 2) * tile + footprint.look_ahead + footprint.lag + bool(kept) * tile // 6
    stays = [nbytes * sum(unit.kept for unit in each.workload.units) for each in (exact, thin)]
    budgets = [exact.settings.host_memory - stays[0], thin.settings.host_memory - stays[1]]
    pages = [7 * nbytes * len(each.workload.units) for each in (exact, thin)]
    assert in_hand_of(*budgets, pages[0] - stays[0], pages[1] - stays[1]) == pytest.approx(in_hand, rel=0.01)


def in_hand_of(budget: int, left: int, whole: int, part: int) -> float:
    """What two budgets say is in hand, of a step of so many bytes and of a part of it that has its share of the rest.

    What is in hand counts the less the more of the whole the budget holds.
    """
    share = part / whole
    return (left - budget * share) / (1 - budget / whole) / (1 - share)


@pytest.mark.parametrize(("share", "update_on"), [(0.0, "host"), (0.5, "auto")])
def test_of_a_device_what_is_settled_and_in_hand_keeps_its_bytes(share: float, update_on: str) -> None:
    exact = beside_a_device(workload([1_000_000] * 80), share, "step", update_on=update_on)
    thin, page = thinned(exact, 24), rounded(2_000_000)
    assert bool(exact.settled) == (update_on == "auto")
    shared = [each.device_budget - settled_on(each) for each in (exact, thin)]  # type: ignore[operator]
    # Parameters and gradients of the others; two units' parameters, and a gradient, are in hand.
    others = [2 * page * (count - len(each.settled)) for each, count in ((exact, 80), (thin, 24))]
    assert in_hand_of(*shared, *others) == pytest.approx(min(shared[0], 3 * page), rel=0.02)


def settled_on(design: Design) -> int:
    sizes = unit_sizes(design.workload, each=True)
    return sum(settled_nbytes(sizes[unit], design.footprint.tile_numel) for unit in design.settled)


@pytest.mark.parametrize(("extra", "block"), [(0, 16 << 10), (0, MIB), (20_000_000, MIB), (20_000_000, 16 * MIB)])
@pytest.mark.parametrize("factor", [2, 10_000])
@pytest.mark.parametrize(("ranks", "device"), [(1, False), (1, True), (2, False), (2, True)])
def test_larger_tiles_have_the_budget_and_the_requests_of_those_they_stand_for(
    extra: int, block: int, factor: int, ranks: int, device: bool
) -> None:
    work = workload([2_000_000, 1_500_000])
    beside = Device(memory=8 << 30, flops={"bfloat16": 1e13}, to_device=2e10, to_host=2e10) if device else None
    machine = replace(MACHINE, device=beside, link=Link(rate=1e9))
    host = least_host_memory(work, ranks, device=device) + extra
    plan = PlanSettings(host_memory=host, device_memory=64 << 20, ranks=ranks, block_size=block)
    exact = make_design(work, machine, plan)
    tile, large = exact.footprint.tile_numel, retiled(exact, factor)
    assert large.footprint.tile_numel == min(tile * factor, rounded_up(2_000_000 // ranks, SMALLEST_TILE))
    more = large.footprint.tile_numel - tile
    # Ten bytes of state and two of gradient an element: as many tiles more as the update has in hand, one that
    # read-ahead leaves room for, one that a gradient arrives in.
    tiles, arrives = exact.footprint.depth + 2, 2 * ranks * more if ranks > 1 else 0
    assert large.footprint.reserve - exact.footprint.reserve == pytest.approx(12 * more, abs=8192)
    grown = large.settings.host_memory - host
    assert grown == pytest.approx(12 * more * tiles + (0 if device else arrives), abs=8192 * tiles)
    if device:
        assert large.device_budget - exact.device_budget == pytest.approx(2 * 12 * more + arrives, abs=8192 * 3)  # type: ignore[operator]
    # No request of a small tile is larger than that, and a serial update reads one and writes another of them at most.
    assert large.drive.block == min(block, rounded_up(tile * 10, 4096))
    few = exact.footprint.serial and tile * 10 < block
    assert large.drive.depth == (2 * exact.footprint.depth if few else exact.drive.depth)


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def test_the_line_goes_through_its_ends() -> None:
    exact = design(workload([1_000_000] * 40), 0.4, "forward")
    ends = [(each, simulate(each)) for each in (thinned(exact, 12), thinned(exact, 24))]
    assert drawn_out(ends[0], ends[1], ends[1][0]).seconds == pytest.approx(ends[1][1].seconds)
    assert drawn_out(ends[0], ends[1], ends[0][0]).edges == pytest.approx(ends[0][1].edges)


def test_seconds_of_measured_units_are_their_mean() -> None:
    work = workload([100_000] * 30)
    units = tuple(replace(unit, seconds=(0.1 * (n % 2 + 1), 0.2)) for n, unit in enumerate(work.units))
    exact = design(replace(work, units=units), 0.5, "forward")
    times = thinned(exact, 10).times
    assert sum(each.forward for each in times[1:]) / len(times[1:]) == pytest.approx(0.15, rel=0.02)


def calls_in(work: Callable[[], object]) -> Counter[str]:
    """Calls of functions by file while something is done."""
    counted: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            counted[frame.f_code.co_filename.rpartition("tiermem/")[2]] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return counted


def test_the_work_of_a_prediction_hardly_grows_with_the_units() -> None:
    # Calls, not seconds. Four times the units: linear would be four times the calls.
    calls = {}
    for count in (250, 1000):
        work = workload([300_000] * count)
        settings = PlanSettings(host_memory=work.parameters * 3 // 4096 * 4096)
        calls[count] = calls_in(lambda work=work, settings=settings: seconds_of_step(work, MACHINE, settings))  # type: ignore[misc]
    assert sum(calls[1000].values()) <= 2 * sum(calls[250].values()), calls
    assert calls[1000]["pager/service.py"] <= 1.5 * calls[250]["pager/service.py"], calls


def test_the_work_of_a_prediction_does_not_grow_with_the_batches() -> None:
    simulated: list[int] = []

    def noted(design: Design, *, with_plan: bool = False) -> Simulation:
        simulated.append(design.workload.batches)
        return simulate(design, with_plan=with_plan)

    exact = design(workload([300_000] * 5, batches=2000), 0.5, "forward")
    assert simulate_quickly(exact, with_plan=True, simulated=noted)[0].plan is not None
    seconds_of_step(exact.workload, MACHINE, exact.settings, noted)
    assert simulated == [FINE.batches(exact), COARSE.batches(exact)]
    assert max(simulated) <= 64


def test_the_work_of_an_exact_step_grows_with_the_units_and_no_faster() -> None:
    totals = []
    for count in (20, 40, 80):
        exact = design(workload([300_000] * count), 0.3, "forward")
        totals.append(sum(calls_in(lambda exact=exact: run_steps(World(exact), 2)).values()))  # type: ignore[misc]
    assert totals[2] - totals[1] <= 2 * (totals[1] - totals[0]) * 1.25, totals
    assert totals[2] <= 2.5 * totals[1], totals


def test_a_trillion_parameters_are_predicted_with_few_units_and_tiles() -> None:
    work = transformer(10**12, batch=1, seq=128)
    exact = make_design(work, MACHINE, PlanSettings(host_memory=512 << 30))
    short = thinned(exact, 24)
    assert len(short.workload.units) == 24
    assert short.workload.units[0] == exact.workload.units[0], "what is there once stays"
    most = sum(short.tiles(unit) for unit in range(24))
    assert most < sum(exact.tiles(unit) for unit in range(len(work.units))) / 5
