"""What is made of the timelines of a few steps of training."""

from __future__ import annotations

import dataclasses

import pytest
from doubles_combinations import some_of
from hypothesis import given
from hypothesis import strategies as st

from tiermem.cli.measure_training import Measured, beside_io, rates_of
from tiermem.planner.design import least_host_memory, make_design
from tiermem.planner.machine import Drive, Host, Machine
from tiermem.planner.observed import Observed
from tiermem.planner.settings import PlanSettings
from tiermem.planner.simulate import simulate
from tiermem.planner.workload import transformer


def measured(computed: float, updating: float, kernels: int, *, beside: float = 0.0) -> Measured:
    seen = Observed(
        forward={0: computed * 0.3},
        backward={0: computed * 0.6},
        elsewhere=computed * 0.1,
        updating=updating,
        read=3e9,
        write=2e9,
        mixed=4e9,
    )
    return Measured((1.0,), (0,), (0,), seen, kernels, beside, {})


@given(
    numel=st.integers(10**5, 10**9),
    element=st.floats(1e-10, 1e-8),
    tile=st.floats(0.0, 1e-3),
    kernels=st.tuples(st.integers(1, 20), st.integers(2, 10)),
    slower=st.floats(0.0, 3.0),
    together=st.floats(0.1, 0.4),
)
def test_rates_are_those_by_which_the_steps_were_made(
    numel: int,
    element: float,
    tile: float,
    kernels: tuple[int, int],
    slower: float,
    together: float,
) -> None:
    """Steps are put together from known rates: elements, tiles, and what the computation takes from kernels."""
    few, many = kernels[0], kernels[0] * kernels[1]
    tile = min(tile, numel * element / few)
    alone = measured(1.0, numel * element + tile * few, few)
    kernel = numel * element + tile * many
    # Seconds beside the computation; what was done meanwhile would have taken less.
    together = min(together, kernel / 2)
    kernel += together * slower / (1 + slower)
    paged = measured(1.0, kernel, many, beside=together)
    found = rates_of(alone, paged, numel, slower)
    assert found.tile_seconds == pytest.approx(tile, rel=1e-6, abs=1e-9)
    assert found.update_rate == pytest.approx(1 / element, rel=1e-4)
    assert (found.read, found.write, found.mixed, found.step_seconds) == (3e9, 2e9, 4e9, pytest.approx(0.1))


def test_elements_take_time_whatever_tiles_seemed_to_take() -> None:
    """As on a machine that is busy with something else."""
    found = rates_of(measured(1.0, 0.02, 2), measured(1.0, 5.0, 10), 10**6, 0.0)
    assert found.tile_seconds == pytest.approx(0.005)
    assert found.update_rate == pytest.approx(10**8)
    found = rates_of(measured(1.0, 0.02, 2), measured(1.0, 0.01, 10), 10**6, 0.0)
    assert (found.tile_seconds, found.update_rate) == (0.0, pytest.approx(5 * 10**7))


WORK = transformer(1_000_000, batch=1, seq=16)
BUDGET = PlanSettings(host_memory=2 * least_host_memory(WORK, 1), update="backward")
FORWARD, BACKWARD = 0.004, 0.008


def machine(slower: float) -> Machine:
    host = Host(update_rate={WORK.dtype: 1e9}, lease_seconds=1e-4, compute_beside_io=slower)
    return Machine(name="m", source="s", host=host, drive=Drive(read=2e9, write=1e9, mixed=2e9))


def steps_of(seconds: float) -> tuple[Measured, Measured]:
    """Trainings alone and with bytes that move; a step of the second takes so long."""
    units = range(len(WORK.units))
    seen = Observed(
        forward=dict.fromkeys(units, FORWARD),
        backward=dict.fromkeys(units, BACKWARD),
        elsewhere=0.0,
        updating=0.001,
        read=0.0,
        write=0.0,
        mixed=0.0,
    )
    alone = Measured((0.1,), (0,), (0,), seen, 1, 0.0, {})
    return alone, dataclasses.replace(alone, seconds=(seconds / 2, seconds, seconds * 3))


def simulated(slower: float) -> float:
    units = tuple(dataclasses.replace(unit, seconds=(FORWARD, BACKWARD)) for unit in WORK.units)
    given = machine(slower)
    given = dataclasses.replace(given, host=dataclasses.replace(given.host, copy_rate=1e18))
    return simulate(make_design(dataclasses.replace(WORK, units=units), given, BUDGET)).seconds


@pytest.mark.parametrize("slower", some_of([1.7], [0.4, 0.9]))
def test_what_moving_bytes_cost_is_what_makes_a_simulated_step_as_long_as_the_measured_one(slower: float) -> None:
    found = beside_io(*steps_of(simulated(slower)), WORK, machine(0.3), BUDGET)
    assert found == pytest.approx(slower, abs=0.01)
    assert simulated(found) == pytest.approx(simulated(slower), rel=0.01)
    assert simulated(found) > 1.01 * simulated(0.0), "or nothing was shown"


def test_moving_bytes_cost_nothing_or_three_times_as_much_where_no_cost_explains_a_step() -> None:
    assert beside_io(*steps_of(simulated(0.0) / 2), WORK, machine(0.3), BUDGET) == 0.0
    assert beside_io(*steps_of(simulated(2.0) * 2), WORK, machine(0.3), BUDGET) == pytest.approx(2.0, rel=0.01)
