"""The memory limit used by the promises about memory is real; and training keeps within one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from limits import run_limited, run_python_limited

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


def test_a_child_within_its_limit_lives_and_its_peak_is_known() -> None:
    run = run_python_limited("x = bytearray(40 << 20); print(len(x))", 200 * MIB)
    assert run.completed.returncode == 0, run.completed.stderr
    assert run.completed.stdout == f"{40 * MIB}\n"
    assert run.peak_bytes is None or 40 * MIB <= run.peak_bytes <= 200 * MIB


def test_a_child_beyond_its_limit_is_killed() -> None:
    run = run_python_limited("x = bytearray(400 << 20); print(len(x))", 200 * MIB)
    assert run.was_killed
    assert run.completed.stdout == ""


def test_page_cache_counts_but_gives_way(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(300 * MIB))
    code = "f = open('big', 'rb')\nwhile f.read(1 << 20): pass\nprint('read')"
    run = run_python_limited(code, 100 * MIB, cwd=tmp_path)
    assert run.completed.stdout == "read\n", run.completed.stderr
    (tmp_path / "big").unlink()


def test_half_a_billion_parameters_train_in_one_gibibyte(tmp_path: Path) -> None:
    """8.6 GB of AdamW state, all of the process within 1 GiB: interpreter, libraries, activations, budget."""
    # Peak RSS is the stricter of the two measures: library pages that another process touched first are not charged to
    # this group. The budget, twice the largest unit, leaves room for what is outside it.
    command = [
        *(sys.executable, "-m", "tiermem", "train", "--model", "llama-537m", "--steps", "2", "--batch", "1"),
        *("--seq", "64", "--host-memory", "208MiB", "--swap-dir", str(tmp_path), "--json"),
    ]
    run = run_limited(command, 1024 * MIB, timeout_seconds=280, cwd=ROOT)
    assert run.completed.returncode == 0, run.completed.stderr
    report = json.loads(run.completed.stdout)
    assert report["parameters"] > 530_000_000
    assert report["state_bytes"] > 8 * report["host_memory"]
    assert report["peak_rss_bytes"] < 1024 * MIB
    assert len(report["steps"]) == 2
    assert list(tmp_path.iterdir()) == []
