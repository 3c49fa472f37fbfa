"""Rounding to multiples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiermem.memory.rounding import round_down, round_up


@given(st.integers(0, 1 << 70), st.integers(1, 1 << 40))
def test_rounding_takes_the_nearest_multiple_of_its_side(number: int, multiple: int) -> None:
    up, down = round_up(number, multiple), round_down(number, multiple)
    assert up % multiple == down % multiple == 0
    assert down <= number <= up
    assert number - down < multiple and up - number < multiple  # noqa: PT018
