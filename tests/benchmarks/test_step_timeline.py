"""A step's timeline: every byte is in the slices, phases have their means, and the benchmark runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from doubles_python import WarmPython
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from step_timeline import SLICES, Span, look, text_of

ROOT = Path(__file__).resolve().parents[2]
SECOND = 1e6  # in microseconds, as traces have them


def event(name: str, lane: str, start: float, end: float, **details: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": lane, "ts": start * SECOND, "dur": (end - start) * SECOND, "args": details}


def step_of(*events: dict[str, Any], start: float = 10.0, end: float = 14.0) -> dict[str, Any]:
    """The last step of a trace, after one that is not to be looked at."""
    before = [event("step", "steps", 0.0, start), event("page", "swap->host", 1.0, 2.0, bytes=5)]
    level = {"ph": "C", "name": "reserved HOST", "ts": start * SECOND, "args": {"value": 1}}
    return look([*before, level, event("step", "steps", start, end), *events])


def test_rates_waiting_and_updating_are_means_over_each_phase() -> None:
    found = step_of(
        event("forward layer", "compute", 10.0, 11.0),
        event("page", "swap->host", 10.0, 11.0, bytes=3e9),
        event("backward layer", "compute", 11.0, 13.0),
        event("stall", "compute", 11.0, 11.5, waits=[]),
        event("page", "host->swap", 12.0, 14.0, bytes=2e9),
        event("kernel", "update", 12.0, 13.0),
    )
    forward, backward, rest, whole = found["phases"]
    assert found["seconds"] == pytest.approx(4.0)
    assert (forward["name"], forward["read"], forward["written"]) == ("forward", pytest.approx(3.0), 0.0)
    assert (backward["start"], backward["end"]) == (pytest.approx(1.0), pytest.approx(3.0))
    assert backward["written"] == pytest.approx(0.5)
    assert backward["writing"] == pytest.approx(0.5)
    assert backward["waiting"] == pytest.approx(0.25)
    assert backward["updating"] == pytest.approx(0.5)
    assert rest["written"] == pytest.approx(1.0)
    assert whole["read"] == pytest.approx(0.75)
    assert "| backward | 2.00 | 0.00 | 0.50 | 0.0 | 0.5 | 25% | 50% |" in text_of({"name": "case", **found})


def test_a_step_without_backward_has_no_such_phase() -> None:
    assert [phase["name"] for phase in step_of()["phases"]] == ["forward", "all of it"]


@given(st.lists(st.tuples(st.floats(8, 16), st.floats(0, 4), st.integers(1, 10**9)), max_size=8))
def test_slices_have_what_moves_in_the_step_and_nothing_else(moves: list[tuple[float, float, int]]) -> None:
    found = step_of(*(event("page", "swap->host", start, start + long, bytes=size) for start, long, size in moves))
    width = found["seconds"] / SLICES
    inside = sum(size * Span(start, start + long).share(10.0, 14.0) for start, long, size in moves)
    assert sum(each["read"] * width for each in found["slices"]) == pytest.approx(inside / 1e9, rel=1e-3, abs=1e-6)


def test_it_runs_and_writes_a_result(warm_python: WarmPython, tmp_path: Path) -> None:
    arguments = ["--quick", "--steps", "2", "--directory", str(tmp_path), "--results", str(tmp_path / "results")]
    done = warm_python.run(str(ROOT / "benchmarks" / "step_timeline.py"), *arguments)
    assert done.returncode == 0, done.stderr
    (raw,) = (tmp_path / "results").glob("step_timeline_*.json")
    (case,) = json.loads(raw.read_text())["cases"]
    assert len(case["slices"]) == SLICES
    assert [phase["name"] for phase in case["phases"]][:2] == ["forward", "backward"]
    assert "| backward |" in done.stdout
