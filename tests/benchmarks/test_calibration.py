"""What the calibration makes of a timeline."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from calibration import moving_beside, slower_beside

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
