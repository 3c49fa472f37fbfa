"""A budget is never exceeded and never goes below zero."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.errors import ConfigError, InvariantError
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
        assert budget.high_water == peak


def test_negative_amounts_are_refused() -> None:
    with pytest.raises(ConfigError):
        Budget(Tier.HOST, -1)
    budget = Budget(Tier.HOST, 10)
    with pytest.raises(InvariantError):
        budget.try_reserve(-1)
    with pytest.raises(InvariantError):
        budget.release(-1)
