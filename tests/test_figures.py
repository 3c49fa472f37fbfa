"""Figures of any size are readable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.figures import counted, format_number, format_seconds


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"), (1e-9, "0"), (0.0000123, "0.000012"), (0.0517, "0.0517"), (0.104, "0.104"), (1, "1"), (1.5, "1.5"),
        (12.34, "12.3"), (99.96, "100"), (999.6, "1,000"), (10_432, "10,432"), (1e15, "1,000,000,000,000,000"),
        (-3.25, "-3.25"), (float("nan"), "nan"), (float("inf"), "inf"),
    ],
)  # fmt: skip
def test_a_number_has_three_digits_or_all_before_the_point(value: float, written: str) -> None:
    assert format_number(value) == written


@given(st.floats(1e-5, 1e15))
def test_a_number_is_what_it_says_without_an_exponent(value: float) -> None:
    assert "e" not in format_number(value)
    assert float(format_number(value).replace(",", "")) == pytest.approx(value, rel=0.05 if value < 1e-3 else 0.005)


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0 s"), (0.0517, "0.0517 s"), (119.4, "119 s"), (120, "2 min"), (121, "2 min 1 s"), (3599.7, "1 h"),
        (3700, "1 h 2 min"), (7199.9, "2 h"),
        (10_432, "2 h 54 min"), (86_400, "1 d"), (90_000, "1 d 1 h"), (1e9, "11,574 d 2 h"), (float("inf"), "inf s"),
    ],
)  # fmt: skip
def test_a_long_span_is_in_two_units(seconds: float, written: str) -> None:
    assert format_seconds(seconds) == written


def test_one_of_something_is_not_many() -> None:
    assert (counted(0, "step"), counted(1, "step"), counted(1200, "step")) == ("0 steps", "1 step", "1,200 steps")
    assert counted(2, "directory", "directories") == "2 directories"
