"""Refining a look-ahead: it stays in its range, settles, and goes back where measured steps contradict."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from doubles_planner import workload
from hypothesis import given
from hypothesis import strategies as st

from tiermem.errors import ConfigError
from tiermem.pager.page import Kind, PageKey
from tiermem.planner.clock import carried_out
from tiermem.planner.design import Design, PlanSettings, make_design
from tiermem.planner.footprint import UnitSize
from tiermem.planner.lines import DriveSpeed
from tiermem.planner.machine import Drive, Host, Machine
from tiermem.planner.observed import (
    Observed,
    bandwidths,
    bandwidths_by_stretch,
    observe,
    observed_design,
    one_batch,
    whole_steps,
)
from tiermem.planner.predict import seconds_of_step
from tiermem.planner.refining import COUNTED, SETTLING, TRUST, WORTH_WHILE, LookAheadControl, Stage, foreseeing
from tiermem.planner.simulate import simulate
from tiermem.planner.workload import Workload, order_of, transformer
from tiermem.stats import READ_EDGE, WRITE_EDGE
from tiermem.timeline import COMPUTE_LANE, STALL, STEP_LANE, UPDATE_LANE, Event
from tiermem.zero3.order import Access, Phase

MIB = 1 << 20
POSITIVE = st.floats(1e-3, 1e3)


def foreseen(control: LookAheadControl, *shares: float, seconds: float = 1.0) -> None:
    """Candidates take these shares of the seconds that the planned one takes; those not given as long."""
    candidates = control.candidates()
    control.foreseen(
        {nbytes: seconds * share for nbytes, share in zip(candidates, [1.0, *shares, 1.0, 1.0, 1.0], strict=False)}
    )


def steps(control: LookAheadControl, *seconds: float) -> None:
    for taken in seconds:
        control.measured(taken)


def trying(after: list[float]) -> LookAheadControl:
    control = LookAheadControl(64 * MIB, 256 * MIB)
    steps(control, 9.0, 1.0, 1.5, 0.9)
    assert control.stage is Stage.FORESEEING
    foreseen(control, 1.02, 0.9, seconds=0.95)
    assert (control.stage, control.in_use) == (Stage.TRYING, 32 * MIB)
    assert "10% shorter" in control.reason
    steps(control, *after)
    return control


def test_what_is_foreseen_to_be_shorter_is_tried_and_kept_where_it_is() -> None:
    control = trying([9.0, 0.91, 0.9, 5.0])
    assert (control.stage, control.in_use, control.planned) == (Stage.SETTLED, 32 * MIB, 64 * MIB)
    assert control.reason == "refined: a step takes 0.91 s instead of 1 s"


def test_where_measured_steps_contradict_it_is_taken_back_for_good() -> None:
    control = trying([0.5, 1.2, 0.9, 1.01])
    assert (control.stage, control.in_use) == (Stage.SETTLED, 64 * MIB)
    assert control.reason == "planned; with 32.00 MiB a step took 1.01 s instead of 1 s"
    steps(control, *[0.1] * 20)
    assert (control.stage, control.in_use) == (Stage.SETTLED, 64 * MIB)


def test_too_little_gain_changes_nothing() -> None:
    control = LookAheadControl(64 * MIB, 256 * MIB)
    steps(control, 1.0, 1.0, 1.0, 1.0)
    foreseen(control, 1.0, 1 - WORTH_WHILE + 1e-6)
    assert (control.stage, control.in_use) == (Stage.SETTLED, 64 * MIB)
    assert "no other gains 3%" in control.reason


@pytest.mark.parametrize("off", [1 - TRUST - 0.01, 1 + TRUST + 0.01])
def test_a_simulation_far_from_the_measured_step_is_not_listened_to(off: float) -> None:
    control = LookAheadControl(64 * MIB, 256 * MIB)
    steps(control, 1.0, 1.0, 1.0, 1.0)
    foreseen(control, 0.5, seconds=off)
    assert (control.stage, control.in_use) == (Stage.SETTLED, 64 * MIB)
    assert "simulated to take" in control.reason


def test_steps_of_another_order_begin_anew_with_what_was_planned() -> None:
    control = trying([9.0, 0.8])
    control.begin_anew()
    assert (control.stage, control.in_use) == (Stage.MEASURING, 64 * MIB)
    steps(control, 0.1, 0.1, 0.1)
    assert control.stage is Stage.MEASURING, "steps before it began anew are forgotten"


def test_foreseeing_out_of_turn_is_refused() -> None:
    control = LookAheadControl(64 * MIB, 256 * MIB)
    with pytest.raises(ValueError, match="MEASURING"):
        foreseen(control)
    steps(control, 1.0, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="expected seconds of"):
        control.foreseen({64 * MIB: 1.0})


@given(
    planned=st.integers(0, 1 << 30),
    highest=st.integers(0, 1 << 30),
    told=st.lists(st.tuples(POSITIVE, st.lists(POSITIVE, min_size=4, max_size=4)), max_size=60),
)
def test_any_numbers_leave_it_in_range_and_settle_it(
    planned: int, highest: int, told: list[tuple[float, list[float]]]
) -> None:
    control, twin = LookAheadControl(planned, highest), LookAheadControl(planned, highest)
    range_of = set(control.candidates())
    assert all(nbytes == planned or 4096 <= nbytes <= highest for nbytes in range_of)
    changes, settled = 0, None
    for seconds, simulated in told:
        before = control.in_use
        for each in (control, twin):
            each.measured(seconds)
            if each.stage is Stage.FORESEEING:
                each.foreseen(dict(zip(each.candidates(), simulated, strict=False)))
        assert (control.in_use, control.stage, control.reason) == (twin.in_use, twin.stage, twin.reason)
        assert control.in_use in range_of
        changes += control.in_use != before
        assert settled is None or control.in_use == settled
        settled = control.in_use if control.stage is Stage.SETTLED else None
    assert changes <= 2
    if len(told) >= 2 * (SETTLING + COUNTED):
        assert control.stage is Stage.SETTLED


# What a run's events say


def event(name: str, lane: str, start: float, end: float, **details: object) -> Event:
    return Event(name, lane, start, end, details)


def events_of_a_step(start: float) -> list[Event]:
    """Forward 2 s of which 0.5 waited, backward 3 s, 1 s of kernels; 1 s in no unit, 0.25 of it waited."""
    return [
        event(STALL, COMPUTE_LANE, start + 0.5, start + 1.0),
        event("forward a", COMPUTE_LANE, start, start + 2, unit=0),
        event("unit 0 state", READ_EDGE, start, start + 1, bytes=400),
        event("unit 0 state", WRITE_EDGE, start + 0.5, start + 2.5, bytes=600),
        event("backward a", COMPUTE_LANE, start + 2, start + 5, unit=0),
        event("kernel", UPDATE_LANE, start + 3, start + 4),
        event(STALL, COMPUTE_LANE, start + 5.25, start + 5.5),
        event("step", STEP_LANE, start, start + 6),
    ]


def test_seconds_and_bandwidths_of_a_step() -> None:
    events = [event("step", STEP_LANE, 0, 10), *events_of_a_step(10), *events_of_a_step(16)]
    # What began before these steps, or ends behind them, is none of theirs.
    events = [events[0], event("kernel", UPDATE_LANE, 9, 10.5), *events[1:], event("kernel", UPDATE_LANE, 21.5, 22.5)]
    found = observe(events, 3)
    assert [[step.start for step in whole_steps(events, most)] for most in (1, 2, 3)] == [[16], [10, 16], [10, 16]]
    assert found.forward == {0: 1.5}
    assert found.backward == {0: 3.0}
    assert found.elsewhere == pytest.approx(0.75)
    assert found.updating == pytest.approx(1.0)
    assert (found.read, found.write, found.mixed) == pytest.approx((400.0, 300.0, 700.0))


def test_what_was_waited_for_before_the_first_unit_is_no_computation() -> None:
    stall, forward = event(STALL, COMPUTE_LANE, 10, 10.5), event("forward a", COMPUTE_LANE, 11, 12, unit=0)
    found = observe([event("step", STEP_LANE, 0, 10), stall, forward, event("step", STEP_LANE, 10, 14)], 1)
    assert (found.forward, found.elsewhere) == ({0: 1.0}, 2.5)


def test_without_a_whole_step_there_is_nothing_to_go_by() -> None:
    with pytest.raises(ConfigError, match="more events than are kept"):
        observe(events_of_a_step(0)[4:], 3)
    with pytest.raises(ConfigError, match="more events than are kept"):
        observe([], 3)


MOMENT = st.integers(0, 10**6).map(lambda number: number * 1e-5)
Move = tuple[float, float, int, bool]


def both_ways(moves: list[Move]) -> tuple[list[Event], ...]:
    """Reads and writes of (start, seconds, bytes, whether it is a read)."""
    return tuple(
        [event("m", lane, start, start + length, bytes=size) for start, length, size, way in moves if way is wanted]
        for lane, wanted in ((READ_EDGE, True), (WRITE_EDGE, False))
    )


@given(st.lists(st.tuples(MOMENT, MOMENT, st.integers(0, 10**9), st.booleans()), max_size=20))
def test_no_bandwidth_is_above_that_of_all_transfers_together(moves: list[Move]) -> None:
    most = sum(size / (start + length - start) for start, length, size, _ in moves if start + length > start)
    for rate in bandwidths(*both_ways(moves)):
        assert math.isfinite(rate)
        assert -1e-3 * most <= rate <= most * 1.001


def test_what_was_hardly_seen_is_taken_from_the_others() -> None:
    assert bandwidths([event("m", READ_EDGE, 0, 1, bytes=100)], []) == (100.0, 100.0, 100.0)
    assert bandwidths([], [event("m", WRITE_EDGE, 0, 1, bytes=100)]) == (100.0, 100.0, 100.0)
    assert bandwidths([], []) == (0.0, 0.0, 0.0)
    assert bandwidths([event("m", READ_EDGE, 0, 1, bytes=0)], []) == (0.0, 0.0, 0.0)
    read, shortly = event("m", READ_EDGE, 0, 10, bytes=1000), event("m", WRITE_EDGE, 10, 10.1, bytes=1)
    assert bandwidths([read], [shortly]) == (100.0, 100.0, 100.0)
    assert bandwidths([read], [event("m", WRITE_EDGE, 10, 20, bytes=3000)]) == (100.0, 300.0, 200.0)


@given(
    rates=st.tuples(*[st.floats(1e9, 5e9)] * 3),
    stretches=st.lists(st.tuples(*[st.floats(0.01, 1.0)] * 3), min_size=12, max_size=30),
)
def test_bytes_of_stretches_tell_bandwidths_that_single_transfers_hide(
    rates: tuple[float, float, float], stretches: list[tuple[float, float, float]]
) -> None:
    """In each a read begins alone, a write joins it, and ends alone: as one move each, however their bytes moved."""
    reads, writes, began = [], [], 0.0
    for number, (alone, both, behind) in enumerate(stretches):
        # Of different kinds, as steps have them.
        lengths = [length * (10.0 if number % 3 == kind else 0.1) for kind, length in enumerate((alone, behind, both))]
        read, write, mixed = (rate * length for rate, length in zip(rates, lengths, strict=True))
        joined = began + lengths[0]
        ended = joined + lengths[2] + lengths[1]
        # The write waited: what moved together were bytes read.
        reads.append(event("r", READ_EDGE, began, joined + lengths[2], bytes=read + mixed))
        writes.append(event("w", WRITE_EDGE, joined, ended, bytes=write))
        began = ended + 1.0
    # Drawn to their mean, and the lengths of other kinds in each stretch.
    assert bandwidths_by_stretch(reads, writes) == pytest.approx(rates, rel=0.15)


def test_a_write_that_waited_is_not_taken_for_a_slow_drive() -> None:
    """It waits for ten seconds of reads, and has all its bytes in five: a third of its drive's rate over its time.

    The two of them always come together, so what is known is the rate of both, 50 bytes in 15 seconds.
    """
    moves: list[Move] = []
    for began in range(0, 300, 30):
        moves += [(began, 10, 30, True), (began, 15, 20, False), (began + 20, 5, 15, True)]
    reads, writes = both_ways(moves)
    assert bandwidths(reads, writes)[1] == pytest.approx(4 / 3)
    assert bandwidths_by_stretch(reads, writes)[1] == pytest.approx(50 / 15, rel=0.02)


def test_stretches_that_are_all_alike_tell_the_mean() -> None:
    moves = [
        [event("m", lane, turn, turn + length, bytes=100) for turn in (0, 10, 20)]
        for lane, length in ((READ_EDGE, 2), (WRITE_EDGE, 4))
    ]
    assert bandwidths_by_stretch(*moves) == pytest.approx((50.0, 50.0, 50.0), rel=1e-6)
    assert bandwidths_by_stretch([], []) == (0.0, 0.0, 0.0)
    assert bandwidths_by_stretch([event("m", READ_EDGE, 0, 1, bytes=0)], []) == (0.0, 0.0, 0.0)
    assert bandwidths_by_stretch([event("m", READ_EDGE, 1, 1, bytes=9)], []) == (0.0, 0.0, 0.0)
    alone = bandwidths_by_stretch([event("m", READ_EDGE, 0, 1, bytes=100)], [])
    assert alone == pytest.approx((100.0, 100.0, 100.0))


@given(st.lists(st.tuples(MOMENT, MOMENT, st.integers(0, 10**9), st.booleans()), max_size=20))
def test_bandwidths_of_whatever_stretches_lie_about_their_mean(moves: list[Move]) -> None:
    found = bandwidths_by_stretch(*both_ways(moves))
    assert all(math.isfinite(rate) and rate >= 0 for rate in found)
    assert max(found) <= 16.001 * min(found)


@pytest.mark.parametrize("batches", [1, 2, 3, 4])
def test_batches_are_found_in_the_order_of_a_step(batches: int) -> None:
    work = replace(small_work(), batches=batches)
    assert one_batch(work.step_order) == (work.order, batches)


def test_a_gradient_in_parts_is_not_simulated() -> None:
    with pytest.raises(ConfigError, match="in several parts"):
        one_batch([Access(0, Phase.FORWARD), Access(0, Phase.GRADIENT), Access(0, Phase.GRADIENT)])


# The simulation of what was observed

MACHINE = Machine(
    name="test",
    source="described for a test",
    host=Host(flops={"bfloat16": 1e12}, update_rate={"bfloat16": 8e8}, lease_seconds=0.0, step_seconds=0.0),
    drive=Drive(read=1e9, write=1e9, mixed=1e9, latency=0.0),
)


def small_work() -> Workload:
    work = transformer(3_000_000, batch=1, seq=64)
    return replace(work, order=order_of([(unit, unit > 0) for unit in range(len(work.units))]))


def small_design() -> Design:
    work = small_work()
    budget = work.parameters * 12 // 4 // 4096 * 4096
    return make_design(work, MACHINE, PlanSettings(host_memory=budget, update="backward"))


def observed_of(design: Design, updating: float) -> Observed:
    """What a run without anything that slows anything else down would observe."""
    return Observed(
        forward={unit: times.forward for unit, times in enumerate(design.times)},
        backward={unit: times.backward + times.gradient for unit, times in enumerate(design.times)},
        elsewhere=0.0,
        updating=updating,
        read=1e9,
        write=1e9,
        mixed=1e9,
    )


def test_the_design_of_what_is_observed_is_that_of_the_same_step() -> None:
    design = small_design()
    simulated = simulate(design)
    work, types = design.workload, ("bfloat16", "float32")
    found = observed_design(
        observed_of(design, simulated.updating),
        work.step_order,
        [UnitSize(unit.name, unit.numel * 2, unit.trainable, 2, 10) for unit in work.units],
        design.settings,
        design.footprint,
        types=types,
    )
    assert found.pages() == design.pages()
    assert found.schedule == design.schedule
    again = simulate(found)
    assert again.seconds == pytest.approx(simulated.seconds, rel=0.05)
    assert again.edges == pytest.approx(simulated.edges, rel=0.05)


def test_what_moves_or_updates_nothing_is_not_simulated() -> None:
    design, unit = small_design(), UnitSize("unit", 2000, 1000, 2, 10)
    seen = observed_of(design, 1.0)
    for observed, units in (
        (replace(seen, read=0.0, write=0.0, mixed=0.0), [unit]),
        (replace(seen, updating=0.0), [unit]),
        (seen, [replace(unit, trainable_numel=0)]),
    ):
        with pytest.raises(ConfigError, match="nothing is moved"):
            observed_design(observed, [], units, design.settings, design.footprint, types=("bfloat16", "float32"))


def test_seconds_are_those_of_one_call_and_of_what_is_not_called_the_steps() -> None:
    """Of two batches of three units, the first of which backward does not need."""
    order = order_of([(unit, unit > 0) for unit in range(3)])
    seen = Observed(
        forward=dict.fromkeys(range(3), 0.4),
        backward=dict.fromkeys(range(3), 0.6),
        elsewhere=0.1,
        updating=5.0,
        read=3e9,
        write=2e9,
        mixed=1e9,
    )
    unit = UnitSize("unit", 2000, 1000, 2, 5)
    # With 8-bit moments: all of a unit's may be float32 all the same, or those of some elements.
    units = [replace(unit, state_itemsize=10), replace(unit, wide_numel=64, wide_itemsize=5), replace(unit, kept=True)]
    settings = PlanSettings(host_memory=MIB, queue_depth=3, block_size=MIB)
    types, runs = ("bfloat16", "int8"), {1: [(500, 500), (0, 500)]}
    found = observed_design(seen, order * 2, units, settings, small_design().footprint, types=types, runs=runs)
    assert (found.workload.order, found.workload.batches) == (order, 2)
    assert [(times.forward, times.backward) for times in found.times] == [(0.2, 0.0), (0.2, 0.3), (0.2, 0.3)]
    assert found.step_seconds == pytest.approx(0.7)
    assert found.update_seconds == pytest.approx(5.0 / 3000)
    assert found.drive == DriveSpeed(read=3e9, write=2e9, mixed=1e9, latency=0.0, depth=3, block=MIB)
    works = found.workload.units
    assert [(work.numel, work.trainable, work.kept) for work in works] == [(1000, 1000, n == 2) for n in range(3)]
    assert [work.exact for work in works] == [((0, 1000),), ((0, 64),), ()]
    assert [work.runs for work in works] == [(), ((500, 500), (0, 500)), ()]


def test_foreseeing_simulates_each_candidate_in_portions() -> None:
    design = small_design()
    ahead = design.footprint.look_ahead
    course, pauses = foreseeing(design, [ahead, ahead // 2]), 0
    for _ in course:
        pauses += 1
    assert pauses > 100, "a portion is small"
    found = carried_out(foreseeing(design, [ahead, ahead // 2]))
    settings = design.settings
    assert found == {
        nbytes: seconds_of_step(small_work(), MACHINE, replace(settings, look_ahead=nbytes))
        for nbytes in (ahead, ahead // 2)
    }
    assert PageKey(0, Kind.PARAM) in dict(design.pages())


def test_seconds_foreseen_through_fewer_units_are_those_of_all() -> None:
    work, settings = workload([20_000] * 60), PlanSettings(host_memory=MIB, look_ahead=64 << 10)
    found = carried_out(foreseeing(make_design(work, MACHINE, settings), [64 << 10]))
    assert found == {64 << 10: seconds_of_step(work, MACHINE, settings)}
