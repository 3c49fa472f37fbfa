"""Bytes and seconds become days, by plain division."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.errors import ConfigError
from tiermem.stats import WRITE_EDGE, EdgeStatistics, Statistics, StepStatistics
from tiermem.wear import Endurance, Wear, measure_wear, parse_endurance

TB = 10**12


def test_a_published_example() -> None:
    """A 2 TB drive of 1200 TBW: at 10 GB every 5 seconds it is written 86.4 times a day and lasts a week."""
    wear = measure_wear(30 * 10**9, paced_bytes=10 * 10**9, seconds=5.0, endurance=Endurance(2 * TB, 1200 * TB))
    assert wear.bytes_per_day == 172.8 * TB
    assert wear.drive_writes_per_day == pytest.approx(86.4)
    assert wear.life_days == pytest.approx(1200 / 172.8)
    assert wear.used == pytest.approx(0.03 / 1200)


def test_what_was_not_given_is_not_guessed() -> None:
    assert measure_wear(5, paced_bytes=5, seconds=86_400.0) == Wear(5, 5.0)
    assert measure_wear(0, paced_bytes=0, seconds=1.0, endurance=Endurance(None, TB)).life_days is None
    assert measure_wear(7, paced_bytes=0, seconds=0.0, endurance=Endurance(None, TB)) == Wear(7, 0.0, used=7 / TB)


@given(st.integers(1, 10**15), st.floats(0.001, 1e6), st.integers(1, 10**16))
def test_living_out_the_life_uses_up_the_endurance(paced: int, seconds: float, endurance: int) -> None:
    wear = measure_wear(paced, paced_bytes=paced, seconds=seconds, endurance=Endurance(None, endurance))
    assert wear.life_days is not None
    assert wear.life_days * wear.bytes_per_day == pytest.approx(endurance)


def test_endurance_is_read_in_both_ways() -> None:
    assert parse_endurance("600TB") == Endurance(None, 600 * TB)
    assert parse_endurance("600TB@2TB", TB) == Endurance(2 * TB, 600 * TB)
    assert parse_endurance("1DWPD", 2 * TB) == Endurance(2 * TB, 2 * TB * 365 * 5)
    assert parse_endurance("1DWPD@4TB", 2 * TB) == Endurance(4 * TB, 4 * TB * 365 * 5)
    assert parse_endurance(" 0.3 dwpd / 3y ", 10 * TB) == Endurance(10 * TB, 3 * TB * 365 * 3)
    assert parse_endurance(None, TB) == Endurance(TB, None)


@pytest.mark.parametrize("text", ["", "lots", "0TB", "0DWPD", "-1DWPD", "1DWPD/0y", "1 drive", "@", "1DWPD@lots"])
def test_endurance_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_endurance(text, TB)


def test_drive_writes_need_a_capacity() -> None:
    with pytest.raises(ConfigError, match="capacity"):
        parse_endurance("1DWPD")


def test_statistics_know_their_wear() -> None:
    step = StepStatistics(seconds=2.0, edges=(EdgeStatistics(WRITE_EDGE, 100),))
    total = step.plus(step).plus(StepStatistics(seconds=6.0, edges=(EdgeStatistics(WRITE_EDGE, 800),)))
    wear = Statistics(step, total, 2).wear(Endurance(None, 10**6))
    assert wear.bytes_written == 1000
    assert wear.bytes_per_day == 100 / 2.0 * 86_400
    assert wear.used == 0.001
    assert Statistics().wear().bytes_per_day == 0.0
