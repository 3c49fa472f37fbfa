"""The training benchmark runs, quickly, and says what it measured."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from doubles_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]
Benchmark = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_benchmark(warm_python: WarmPython) -> Benchmark:
    """The contenders are processes of their own too, started in the same way.

    In float32: many processors have no instructions for bfloat16.
    """
    return partial(warm_python.run, str(ROOT / "benchmarks" / "train_step.py"), "--quick", "--param-dtype", "float32")


def test_the_result_names_machine_versions_date_and_command(run_benchmark: Benchmark, tmp_path: Path) -> None:
    done = run_benchmark("--no-tiermem", "--directory", str(tmp_path), "--results", str(tmp_path / "results"))
    assert done.returncode == 0, done.stderr
    (markdown,) = (tmp_path / "results").glob("train_step_*.md")
    text = markdown.read_text()
    for word in ("cores", "torch", "date: 20", "--no-tiermem", "| plain |", "ratio to plain"):
        assert word in text
    (run,) = json.loads(markdown.with_suffix(".json").read_text())["runs"]
    assert len(run["seconds"]) == 5
    assert run["peak_rss_bytes"] > run["baseline_rss_bytes"] > 0


def test_tiermem_runs_beside_plain_and_its_schedules_agree(run_benchmark: Benchmark, tmp_path: Path) -> None:
    """Weights are drawn in another order than plain PyTorch draws them, so losses are compared among schedules only."""
    results = tmp_path / "results"
    settings = [f"host_memory=8MiB,update={update}" for update in ("backward", "forward")]
    contenders = ["--tiermem", settings[0], "--tiermem", settings[1]]
    done = run_benchmark(*contenders, "--directory", str(tmp_path), "--results", str(results))
    assert done.returncode == 0, done.stderr
    (raw,) = results.glob("*.json")
    plain, backward, forward = json.loads(raw.read_text())["runs"]
    assert backward["losses"] == forward["losses"]
    assert backward["parameters"] == forward["parameters"] == plain["parameters"]
    for run in (plain, backward, forward):
        assert run["losses"][0] == pytest.approx(math.log(512), abs=0.1)
    assert len(backward["details"]["bytes_read"]) == 7


def test_micro_batches_in_a_loop_and_together_have_the_same_losses(run_benchmark: Benchmark, tmp_path: Path) -> None:
    results, settings = tmp_path / "results", "host_memory=4MiB,update=forward,moments=int8,accumulate=2"
    contenders = ["--no-plain", "--tiermem", settings, "--tiermem", f"{settings},vertical=yes"]
    done = run_benchmark(*contenders, "--directory", str(tmp_path), "--results", str(results))
    assert done.returncode == 0, done.stderr
    (raw,) = results.glob("*.json")
    loop, together = json.loads(raw.read_text())["runs"]
    assert loop["losses"] == together["losses"]
    assert sum(together["details"]["bytes_read"]) < 0.8 * sum(loop["details"]["bytes_read"])  # about half as many


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_steps_are_held_against_what_fio_reaches_in_the_same_rounds(run_benchmark: Benchmark, tmp_path: Path) -> None:
    contenders = ["--no-plain", "--tiermem", "host_memory=8MiB,update=forward", "--fio"]
    done = run_benchmark(*contenders, "--directory", str(tmp_path), "--results", str(tmp_path / "results"))
    assert done.returncode == 0, done.stderr
    (raw,) = (tmp_path / "results").glob("*.json")
    ours, alone = json.loads(raw.read_text())["runs"]
    rate = statistics.median(alone["details"]["rates"][2:7])
    moved = statistics.median(ours["drive_bytes_read"]) + statistics.median(ours["drive_bytes_written"])
    expected = statistics.median(ours["seconds"]) / (moved / 1e9 / rate)
    assert f"| {expected:.2f} |" in done.stdout
    assert f"in the same rounds: {rate:.2f} GB/s" in done.stdout


def test_a_contender_that_fails_is_said(run_benchmark: Benchmark) -> None:
    for how in ([], ["--in-turns"]):
        done = run_benchmark(*how, "--no-plain", "--tiermem", "no_such_field=1")
        assert done.returncode == 1
        assert "failed: exit code 1" in done.stdout
