"""The run of a model larger than the device: it learns, and the table says what it held."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_largest


def test_it_trains_on_a_simulated_device_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swap, trace = tmp_path / "swap", tmp_path / "traces" / "timeline.json"
    swap.mkdir()
    small = ("--device-memory", "1MiB", "--host-memory", "16MiB", "--steps", "3")
    assert gpu_largest.main(["--simulated", *small, "--directory", str(swap), "--trace", str(trace)]) == 0
    said = capsys.readouterr()
    assert "| parameters, all of them trained | 724,864 |" in said.out
    assert said.err.count("loss") == 5
    assert list(swap.iterdir()) == []
    assert "device->host" in trace.read_text()


def test_the_table_has_the_medians_behind_the_first_two_steps() -> None:
    raw = {
        "parameters": 2_000_000_000,
        "tiers": {"SWAP": 16_000_000_000, "HOST": 8_000_000_000, "DEVICE": 400_000_000},
        "moments": "int8",
        "update": "backward",
        "tokens": 4000,
        "ready_seconds": 12.0,
        "seconds": [1.0, 9.0, 2.0, 4.0, 1.0],
        "losses": [3.0, 2.5, 2.0, 1.0, 0.5],
        "edges": [{"a": 9_000_000_000}, {}, *[{"a": 1_000_000_000}] * 3],
        "peak_device_bytes": 3_000_000_000,
        "peak_rss_bytes": 9_000_000_000,
    }
    table = gpu_largest.table(raw)
    assert "| s/step | 2.00 (1.00 to 4.00, 3 steps) |" in table
    assert "| tokens/s | 2000 |" in table
    assert "| device budget | 0.40 GB, a 40th (70th) |" in table
    assert "| GB a step | a 1.0 |" in table
