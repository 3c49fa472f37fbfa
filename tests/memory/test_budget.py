"""A budget is never exceeded and never goes below zero."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.errors import CapacityError, ConfigError, InvariantError
from tiermem.memory.budget import Budget
from tiermem.memory.tiers import Tier


@given(st.integers(0, 100), st.lists(st.tuples(st.booleans(), st.integers(0, 60))))
def test_numbers_stay_in_bounds(capacity: int, steps: list[tuple[bool, int]]) -> None:
    budget = Budget(Tier.HOST, capacity)
    reserved = peak = 0
    for reserve, nbytes in steps:
        if reserve:
            fits = reserved + nbytes <= capacity
            assert budget.try_reserve(nbytes) is fits
            reserved += nbytes if fits else 0
        elif nbytes <= reserved:
            budget.release(nbytes)
            reserved -= nbytes
        else:
            with pytest.raises(InvariantError):
                budget.release(nbytes)
        peak = max(peak, reserved)
        assert 0 <= budget.reserved == reserved <= capacity
        assert budget.free == capacity - reserved
        assert budget.high_water == peak


def test_no_room_is_an_error_with_numbers() -> None:
    budget = Budget(Tier.DEVICE, 100)
    budget.reserve(90)
    budget.release(30)
    with pytest.raises(CapacityError, match=r"DEVICE needs 50 bytes .* only 40 .* 100 are free; high-water mark 90"):
        budget.reserve(50)
    assert budget.reserved == 60


def test_negative_amounts_are_refused() -> None:
    with pytest.raises(ConfigError):
        Budget(Tier.HOST, -1)
    budget = Budget(Tier.HOST, 10)
    with pytest.raises(InvariantError):
        budget.try_reserve(-1)
    with pytest.raises(InvariantError):
        budget.release(-1)
