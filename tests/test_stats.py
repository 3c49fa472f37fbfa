"""What is counted turns up once, in the right step, and in the total."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.errors import InvariantError
from tiermem.stats import Counters, EdgeStatistics, Statistics, StepStatistics, TierStatistics


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_step_holds_what_happened_in_it() -> None:
    clock = Clock()
    counters = Counters(clock)
    counters.move_started("swap->host")
    clock.now += 2
    counters.move_finished("swap->host", 10)
    counters.count(cache_hits=1)
    clock.now += 1
    counters.step()
    counters.move_started("swap->host")
    counters.move_started("host->swap")
    clock.now += 4
    counters.move_finished("host->swap", 7)
    counters.move_finished("swap->host", 20)
    counters.count(cache_misses=3, stall_seconds=0.5, evictions=2, discards=1, held_frames=1)
    clock.now += 1
    step = counters.step()
    assert (step.seconds, step.stall_seconds, step.bytes_read, step.bytes_written) == (5.0, 0.5, 20, 7)
    assert (step.cache_hits, step.cache_misses, step.evictions, step.discards, step.held_frames) == (0, 3, 2, 1, 1)
    assert step.edge("swap->host") == EdgeStatistics("swap->host", 20, 1, 4.0)
    statistics = counters.snapshot([TierStatistics("HOST", 9, 8, 9)])
    assert (statistics.last, statistics.steps) == (step, 2)
    assert (statistics.total.seconds, statistics.total.bytes_read, statistics.total.cache_hits) == (8.0, 30, 1)
    assert statistics.tiers[0].high_water == 9


def test_busy_seconds_count_overlapping_moves_once_and_are_split_at_the_step() -> None:
    clock = Clock()
    counters = Counters(clock)
    counters.move_started("swap->host")
    clock.now += 1
    counters.move_started("swap->host")
    clock.now += 1
    counters.move_finished("swap->host", 5)
    assert counters.snapshot().total.edge("swap->host") == EdgeStatistics("swap->host", 5, 1, 2.0)
    first = counters.step()
    clock.now += 3
    counters.move_finished("swap->host", 5)
    clock.now += 10
    second = counters.step()
    assert [step.edge("swap->host").busy_seconds for step in (first, second)] == [2.0, 3.0]
    assert counters.snapshot().total.edge("swap->host") == EdgeStatistics("swap->host", 10, 2, 5.0)


@given(st.lists(st.tuples(st.sampled_from(["count", "step", "move", "look"]), st.integers(0, 9))))
def test_the_total_is_the_sum_of_everything(script: list[tuple[str, int]]) -> None:
    clock = Clock()
    counters = Counters(clock)
    hits = moved = steps = 0
    for action, number in script:
        clock.now += number
        if action == "count":
            counters.count(cache_hits=number)
            hits += number
        elif action == "move":
            counters.move_started("swap->host")
            counters.move_finished("swap->host", number)
            moved += number
        elif action == "step":
            counters.step()
            steps += 1
        statistics = counters.snapshot()
        assert statistics == counters.snapshot()
        assert (statistics.total.cache_hits, statistics.total.bytes_read, statistics.steps) == (hits, moved, steps)
        assert statistics.total.seconds == clock.now - 100.0


def test_counting_from_several_threads_loses_nothing() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(500):
            counters.count(cache_hits=1, stall_seconds=1.0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    step = counters.step()
    assert (step.cache_hits, step.stall_seconds) == (2000, 2000.0)


def test_who_wants_to_know_is_told_of_every_step() -> None:
    clock = Clock()
    told: list[tuple[float, float]] = []
    counters = Counters(clock, lambda started, ended: told.append((started, ended)))
    clock.now += 5
    counters.step()
    clock.now += 1
    counters.step()
    assert told == [(100.0, 105.0), (105.0, 106.0)]


def test_nothing_happened() -> None:
    step = StepStatistics()
    assert (step.bytes_read, step.hit_rate, step.edge("x").bytes_per_second) == (0, 1.0, 0.0)
    assert "total of 0 steps" in Statistics().table()


def test_the_table_is_aligned_text() -> None:
    edges = (EdgeStatistics("swap->host", 3 << 30, 12, 2.0), EdgeStatistics("host->swap", 1 << 20, 1, 0.5))
    last = StepStatistics(seconds=1.25, stall_seconds=0.5, cache_hits=3, cache_misses=1, edges=edges)
    table = Statistics(last, last.plus(last), 2, (TierStatistics("HOST", 1 << 30, 5, 1 << 29),)).table()
    lines = table.splitlines()
    assert lines[0].split() == ["last", "step", "total", "of", "2", "steps"]
    assert len({len(line) for line in lines[: lines.index("")]}) == 1
    for expected in ("3.00 GiB", "6.00 GiB", "3 (75%)", "1.250", "host->swap bytes", "512.00 MiB", "1.61"):
        assert expected in table


def test_finishing_what_never_started_is_an_error() -> None:
    counters = Counters()
    with pytest.raises(InvariantError):
        counters.move_finished("swap->host", 1)
    counters.move_started("swap->host")
    counters.move_finished("swap->host", 1)
    with pytest.raises(InvariantError):
        counters.move_finished("swap->host", 1)
