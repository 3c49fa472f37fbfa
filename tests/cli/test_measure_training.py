"""What is made of the timelines of a few steps of training."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.cli.measure_training import Measured, moving_beside, rates_of, slower_beside
from tiermem.planner.observed import Observed
from tiermem.stats import READ_EDGE, WRITE_EDGE
from tiermem.timeline import COMPUTE_LANE, STALL, STEP_LANE, Event


def event(name: str, lane: str, start: float, end: float) -> Event:
    return Event(name, lane, start, end, {})


def test_bytes_move_beside_the_computation_where_it_does_not_stand_still() -> None:
    steps = [event("step", STEP_LANE, 10, 20), event("step", STEP_LANE, 20, 30)]
    events = [
        *steps,
        event("page", READ_EDGE, 8, 12),  # two of it in a step
        event("page", WRITE_EDGE, 11, 14),  # two more
        event(STALL, COMPUTE_LANE, 13, 16),  # one of them in vain
        event("unit", COMPUTE_LANE, 10, 30),
        event("page", READ_EDGE, 25, 26),
        event("page", READ_EDGE, 25, 28),
        event("page", READ_EDGE, 40, 50),
    ]
    assert moving_beside(events, steps) == pytest.approx(3 + 3)


def test_what_is_lost_is_lost_while_it_was_there() -> None:
    assert slower_beside(10.0, 10.0, 4.0) == 0.0
    assert slower_beside(10.0, 9.0, 4.0) == 0.0
    assert slower_beside(10.0, 11.0, 0.0) == 1.0, "nothing explains it; no more than twice as long"
    # Six seconds beside it did the work of four: half as long again.
    assert slower_beside(10.0, 12.0, 6.0) == pytest.approx(0.5)


def measured(computed: float, updating: float, kernels: int, *, beside: float = 0.0, moving: float = 0.0) -> Measured:
    seen = Observed(
        forward={0: computed * 0.3},
        backward={0: computed * 0.6},
        elsewhere=computed * 0.1,
        updating=updating,
        read=3e9,
        write=2e9,
        mixed=4e9,
    )
    return Measured((1.0,), (0,), (0,), seen, kernels, beside, moving, {})


@given(
    numel=st.integers(10**5, 10**9),
    element=st.floats(1e-10, 1e-8),
    tile=st.floats(0.0, 1e-3),
    kernels=st.tuples(st.integers(1, 20), st.integers(2, 10)),
    slower=st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 3.0), st.floats(0.0, 0.9)),
    shares=st.tuples(st.floats(0.1, 0.4), st.floats(0.1, 0.4)),
)
def test_rates_are_those_by_which_the_steps_were_made(
    numel: int,
    element: float,
    tile: float,
    kernels: tuple[int, int],
    slower: tuple[float, float, float],
    shares: tuple[float, float],
) -> None:
    """Steps are put together from known rates: elements, tiles, and what each takes from the other while there."""
    few, many = kernels[0], kernels[0] * kernels[1]
    tile = min(tile, numel * element / few)
    alone = measured(1.0, numel * element + tile * few, few)
    kernel = numel * element + tile * many
    # Seconds beside the other, the bytes; what was done meanwhile would have taken less.
    together = min(shares[0], kernel / 2)
    kernel += together * slower[1] / (1 + slower[1])
    moving = shares[1]
    computed = 1.0 + together * slower[0] / (1 + slower[0]) + moving * slower[2] / (1 + slower[2])
    paged = measured(computed, kernel, many, beside=together, moving=moving)
    found = rates_of(alone, paged, numel, (slower[0], slower[1]))
    assert found.tile_seconds == pytest.approx(tile, rel=1e-6, abs=1e-9)
    assert found.update_rate == pytest.approx(1 / element, rel=1e-4)
    assert found.compute_beside_io == pytest.approx(slower[2], rel=1e-6, abs=1e-6)
    assert (found.read, found.write, found.mixed, found.step_seconds) == (3e9, 2e9, 4e9, pytest.approx(0.1))


def test_elements_take_time_whatever_tiles_seemed_to_take() -> None:
    """As on a machine that is busy with something else."""
    found = rates_of(measured(1.0, 0.02, 2), measured(1.0, 5.0, 10), 10**6, (0.0, 0.0))
    assert found.tile_seconds == pytest.approx(0.005)
    assert found.update_rate == pytest.approx(10**8)
    found = rates_of(measured(1.0, 0.02, 2), measured(1.0, 0.01, 10), 10**6, (0.0, 0.0))
    assert (found.tile_seconds, found.update_rate) == (0.0, pytest.approx(5 * 10**7))
