"""Time on simulated lines: what the model says of bandwidth, depth, priorities and shared cores."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.planner.clock import Clock, Gate, Signal, carried_out
from tiermem.planner.lines import Cores, DriveModel, DriveSpeed, Wire

MB = 1_000_000


def drive(**changes: Any) -> DriveModel:
    speed = {"read": 1e9, "write": 8e8, "mixed": 6e8, "latency": 1e-4, "depth": 8, "block": MB}
    return DriveModel(DriveSpeed(**{**speed, **changes}))


def run(resource: Any) -> float:
    """Let all of its work end; the seconds that took."""
    now = 0.0
    while (seconds := resource.next_end()) != float("inf"):
        now += seconds
        resource.advance(seconds)
    return now


def test_one_direction_alone_has_its_own_bandwidth() -> None:
    for write, rate in ((False, 1e9), (True, 8e8)):
        line = drive(latency=0.0)
        line.start(100 * MB, write=write, priority=0, done=lambda: None)
        assert run(line) == pytest.approx(100 * MB / rate)


def test_both_directions_share_what_the_drive_gives_to_both() -> None:
    line, ended = drive(latency=0.0), []
    for write in (False, True):
        line.start(60 * MB, write=write, priority=0, done=lambda write=write: ended.append(write))
    seconds = run(line)
    assert 120 * MB / 1e9 < seconds < 120 * MB / 6e8
    assert ended == [False, True], "at equal priority reads have the larger part of the queue"


def test_a_demand_goes_before_what_was_asked_for_earlier() -> None:
    line, ended = drive(depth=1), []
    for name, priority in (("ahead", 1), ("ahead too", 1), ("demand", 0)):
        line.start(10 * MB, write=False, priority=priority, done=lambda name=name: ended.append(name))
    run(line)
    assert ended[0] == "demand"


def test_what_is_promoted_overtakes() -> None:
    line, ended = drive(depth=1), []
    transfers = [
        line.start(10 * MB, write=False, priority=1, done=lambda name=name: ended.append(name)) for name in "abc"
    ]
    transfers[2].promote()
    run(line)
    assert ended == ["c", "a", "b"]


def test_writes_go_on_beside_waiting_reads() -> None:
    line, ended = drive(), []
    for number in range(40):
        line.start(10 * MB, write=False, priority=1, done=lambda number=number: ended.append(number))
    line.start(10 * MB, write=True, priority=2, done=lambda: ended.append("write"))
    run(line)
    assert ended.index("write") < 20, "the operation behind keeps its share of the queue"


def test_small_blocks_one_at_a_time_pay_the_latency_each() -> None:
    line = drive(depth=1, block=100_000)
    line.start(10 * MB, write=False, priority=0, done=lambda: None)
    assert run(line) == pytest.approx(100 * (1e-4 + 1e-4))


@given(
    sizes=st.lists(st.tuples(st.integers(4096, 50 * MB), st.booleans(), st.integers(0, 2)), min_size=1, max_size=12),
    depth=st.integers(1, 16),
)
@settings(max_examples=100)
def test_no_more_bytes_flow_than_the_rates_say(sizes: list[tuple[int, bool, int]], depth: int) -> None:
    line, ended = drive(depth=depth), []
    for nbytes, write, priority in sizes:
        line.start(nbytes, write=write, priority=priority, done=lambda: ended.append(1))
    seconds = run(line)
    assert len(ended) == len(sizes), "every transfer ends"
    assert sum(nbytes for nbytes, _, _ in sizes) <= seconds * 1e9 * (1 + 1e-6)


def test_a_wire_carries_one_after_the_other() -> None:
    wire, ended = Wire(1e9, latency=0.0), []
    for name, priority in (("first", 1), ("second", 1), ("demand", 0)):
        wire.start(MB, priority=priority, done=lambda name=name: ended.append(name))
    assert run(wire) == pytest.approx(3e-3)
    assert ended == ["demand", "first", "second"]


def test_cores_are_shared_by_computation_and_update() -> None:
    cores, ended = Cores((0.5, 1.0, 0.0, 0.0), lambda: False), []
    cores.compute(1.0, lambda: ended.append("compute"))
    cores.update(1.0, lambda: ended.append("update"))
    # Beside each other: two thirds and a half of their speed. Computation ends after 1.5 s, the update is at 0.75 then.
    assert run(cores) == pytest.approx(1.75)
    assert ended == ["compute", "update"]
    assert cores.busy == [pytest.approx(1.5), pytest.approx(1.75)]


def test_both_are_slower_while_bytes_move() -> None:
    moving = [True]
    cores, ended = Cores((0.0, 0.0, 0.5, 1.0), lambda: moving[0]), []

    def computed() -> None:
        ended.append("compute")
        moving[0] = False

    cores.compute(1.0, computed)
    cores.update(1.0, lambda: ended.append("update"))
    # Two thirds and half of their speed until the computation ends after 1.5 s; then no byte moves any more.
    assert run(cores) == pytest.approx(1.75)
    assert ended == ["compute", "update"]


def test_a_gate_lets_in_as_many_as_it_is_wide() -> None:
    cores = Cores((0.0, 0.0, 0.0, 0.0), lambda: False)
    clock = Clock([cores], settle=lambda: None, passing=lambda _: None, stuck=lambda: False)
    gate, inside, ended = Gate(clock, 2), [], Signal()

    def visitor(name: str) -> Any:
        yield gate.enter()
        inside.append(name)

    for name in "abc":
        clock.start(visitor(name))
    assert not carried_out(clock.running_until(ended)), "nothing is left to wait for"
    assert inside == ["a", "b"]
    gate.leave()
    assert not carried_out(clock.running_until(ended))
    assert inside == ["a", "b", "c"]
