"""The suite for machines with a GPU runs to its end without one, and says what it found."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from doubles_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]


def load(folder: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The suite in this process; what it starts are processes of their own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "executable", warm_python.path)
    # What transformers imports has a plug-in for pytest, too.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-W ignore::pytest.PytestAssertRewriteWarning")
    return lambda *arguments: int(load("tools", "gpu_suite").main(arguments))


def test_the_suite_runs_on_a_simulated_device_and_writes_one_result(
    run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = run(
        *("--simulated", "--tests", "states_on_disk", "--contenders", "everything on swap"),
        *("--directory", str(tmp_path), "--results", str(tmp_path / "results")),
    )
    assert code == 0, capfd.readouterr()
    text, raw = sorted((tmp_path / "results").iterdir(), key=lambda path: path.suffix, reverse=True)
    assert (text.suffix, raw.suffix) == (".md", ".json")
    record = json.loads(raw.read_text())
    assert [part["name"] for part in record["parts"]] == ["tests", "benchmark"]
    assert all(part["passed"] for part in record["parts"])
    assert [run["contender"] for run in record["benchmark"]["runs"]] == ["tiermem, everything on swap"]
    assert "| tiermem, everything on swap | " in text.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results"]


def test_a_suite_without_time_says_what_it_did_not_do(
    run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    places = ("--directory", str(tmp_path), "--results", str(tmp_path / "results"))
    assert run("--simulated", "--seconds", "0.1", *places) == 1
    said = capfd.readouterr().out
    assert "FAILED  tests" in said
    assert "FAILED  benchmark" in said
    assert len(list((tmp_path / "results").glob("*.md"))) == 1


@pytest.fixture(scope="module")
def step() -> ModuleType:
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return load("benchmarks", "gpu_step")
    finally:
        sys.path.remove(folder)


def test_the_model_is_the_largest_that_the_peer_can_hold(step: ModuleType) -> None:
    sizes = {name: step.count_parameters(name) for name in ("gpu-large", "gpu")}
    assert 6.5e9 < sizes["gpu-large"] < 7e9
    assert 1.2e9 < sizes["gpu"] < 1.5e9
    chosen = [step.choose_workload(step.Machine(gib << 30, 80 << 30)) for gib in (16, 64, 256)]
    assert chosen == ["io-bound", "gpu", "gpu-large"]


def test_the_budgets_put_things_where_their_names_say(step: ModuleType) -> None:
    parameters = 1_400_000_000
    made = {each.name: each.settings for each in step.contenders(parameters, step.Machine(128 << 30, 80 << 30))}
    host, moments, everything = (
        made[f"tiermem, {name}"] for name in ("states on host", "moments on swap", "everything on swap")
    )
    assert host["host_memory"] > 14 * parameters
    assert 4 * parameters < moments["host_memory"] < 14 * parameters
    assert everything["host_memory"] < 4 * parameters
    assert {settings["device"] for settings in made.values()} == {"cuda"}
    assert host["device_memory"] * 7 < 14 * parameters


def test_the_table(step: ModuleType) -> None:
    good = {"error": None, "seconds": [2.0] * 5, "parameters": 10**9, "peak_rss_bytes": 3e9}
    runs = [
        {"contender": step.PEER, **good, "details": {"peak_device_bytes": 5e9}},
        {
            "contender": "tiermem, states on host",
            **good,
            "seconds": [1.0] * 5,
            "details": {"stall_seconds": [0.1] * 7, "edges": {"host->device": [10**9] * 7}},
        },
        {"contender": "tiermem, late", "error": "not run: the time was up"},
    ]
    peer, ours, late = step.table(runs, "quick").splitlines()[2:]
    assert "| 1.00 |" in peer
    assert "5.00 GB" in peer
    assert "| 2.00 | 0.100 s | host->device 1.00 |" in ours
    assert "| 64 | 0.38 |" in ours, "64 tokens, a thousand million parameters, six operations each"
    assert "not run: the time was up" in late
