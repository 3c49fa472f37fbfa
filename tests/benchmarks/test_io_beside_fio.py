"""The comparison with fio runs, with fio and without, and compares like with like."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "benchmarks" / "io_beside_fio.py"
    sys.path.insert(0, str(path.parent))
    try:
        spec = importlib.util.spec_from_file_location("io_beside_fio", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["io_beside_fio"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def run_benchmark(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "io_beside_fio.py"), "--quick", "--directory", str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, check=False)


def test_without_fio_only_we_are_measured_and_it_is_said(tmp_path: Path) -> None:
    done = run_benchmark(tmp_path, "--fio", "no-such-fio", "--results", str(tmp_path / "results"))
    assert done.returncode == 0, done.stderr
    assert "fio: skipped" in done.stdout
    (markdown,) = (tmp_path / "results").glob("io_beside_fio_*.md")
    assert "No comparison" in markdown.read_text()
    runs = json.loads(markdown.with_suffix(".json").read_text())["runs"]
    assert {run["pattern"] for run in runs} == {"read", "write", "mixed"}
    assert all(run["gigabytes_per_second"] > 0 and run["cpu_cores"] > 0 for run in runs)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_beside_fio_both_are_measured_and_compared(tmp_path: Path) -> None:
    done = run_benchmark(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of fio's (") == 6  # with fio in huge pages, and as it comes
    assert "psync, 8 MiB" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_ratios_are_taken_within_rounds(script: ModuleType) -> None:
    rates = [("tiermem, 8 MiB", 0, 2.0, 0.1), ("libaio, 8 MiB", 0, 4.0, 0.1)]
    rates += [("tiermem, 8 MiB", 1, 9.0, 0.1), ("libaio, 8 MiB", 1, 9.0, 0.1)]
    rates += [("tiermem, 1 MiB", 0, 1.0, 0.1), ("psync, 1 MiB", 0, 1.0, 0.1)]
    runs = [script.Run("read", number, name, rate, cores) for name, number, rate, cores in rates]
    runs.append(script.Run("read", 0, "io_uring, 8 MiB", error="not permitted"))
    text = script.table("read", runs)
    assert "tiermem, 8 MiB beside libaio, 8 MiB: bandwidth 0.750 of fio's (0.50 to 1.00 in a round)" in text
    assert "CPU for each byte 1.50 of fio's" in text
    assert "| io_uring, 8 MiB | failed: not permitted" in text
