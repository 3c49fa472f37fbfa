"""The suite for machines with a GPU runs to its end without one, and says what it found."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
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


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return load("tools", "gpu_suite")


def test_a_part_that_cannot_be_run_stops_no_other_and_is_written_down_at_once(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[list[str]] = []
    write = suite.write

    def noted(options: Any, parts: Any, raw: Any) -> Path:
        written.append([part.name for part in parts])
        return write(options, parts, raw)

    def broken(*arguments: Any) -> None:
        raise ValueError("no such report")

    measured = suite.Part("benchmark", True, 1.0, "1 contenders")
    monkeypatch.setattr(suite, "write", noted)
    monkeypatch.setattr(suite, "name_device", lambda: "the one that is there")
    monkeypatch.setattr(suite, "run_tests", broken)
    monkeypatch.setattr(suite, "run_benchmark", lambda *arguments: measured)
    monkeypatch.setattr(suite, "run_sanitizer", lambda seconds: suite.Part("compute-sanitizer", None, 0.0, "none"))
    places = ["--directory", str(tmp_path), "--results", str(tmp_path / "results")]
    assert suite.main(places) == 1
    assert written == [
        [],
        ["tests", "compute-sanitizer"],
        ["tests", "compute-sanitizer", "benchmark"],
    ]
    (raw,) = (tmp_path / "results").glob("*.json")
    first, second, last = json.loads(raw.read_text())["parts"]
    assert second["passed"] is None
    assert "| compute-sanitizer | not run | 0 | none |" in next((tmp_path / "results").glob("*.md")).read_text()
    assert json.loads(raw.read_text())["device"] == "the one that is there"
    assert first["summary"] == "ValueError: no such report"
    assert "in broken" in first["output"], "where it happened"
    assert last["passed"]


def test_a_gpu_that_cannot_be_asked_is_a_line_of_the_result(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    python = tmp_path / "python"
    for said, name in (
        ("echo a warning; echo H100, 79 GiB", "H100, 79 GiB"),
        (
            "echo CUDA error: uncorrectable ECC error; exit 1",
            "not known: exit code 1: CUDA error: uncorrectable ECC error",
        ),
        ("exit 0", "not known: it said nothing"),
    ):
        python.write_text(f"#!/bin/sh\n{said}\n")
        python.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(python))
        assert suite.name_device() == name


def test_failures_before_a_hang_are_in_the_result(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hanging(command: list[str], seconds: float, environment: dict[str, str]) -> Any:
        Path(environment["TIERMEM_GPU_SUITE_FAILURES"]).write_text("a::bad\nlong story\n\n")
        return suite.Outcome(100.0, "not done after 100 s", True, "a::hangs")

    monkeypatch.setattr(suite, "run", hanging)
    part = suite.run_tests(tmp_path, suite.parse([]), 100.0)
    assert (part.passed, part.summary) == (False, "not done after 100 s")
    assert part.output == "a::bad\nlong story\n\na::hangs"


def test_what_outlives_its_time_is_ended_with_all_it_has_started(suite: ModuleType, tmp_path: Path) -> None:
    mark = tmp_path / "child"
    parent = f"sleep 600 & echo $! > {mark}; echo the child lives; wait"
    done = suite.run(["/bin/sh", "-c", parent], 2.0, {})
    assert done.ended
    assert done.problem == "not done after 2 s"
    assert "the child lives" in done.output, "what it said until then"
    pid, ended = int(mark.read_text()), time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < ended
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("tool", "passed", "summary"),
    [
        ("echo 0 errors", True, "clean"),
        ("echo 3 errors; exit 9", False, "exit code 9: 3 errors"),
        ("echo so far 0 errors; sleep 600", False, "not finished: not done after 1 s"),
    ],
)
def test_under_the_sanitizer_passed_means_finished_and_clean(
    tool: str, passed: bool, summary: str, suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, run = tmp_path / "compute-sanitizer", suite.run
    program.write_text(f"#!/bin/sh\n{tool}\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(suite, "run", lambda command, seconds, environment: run(command, 1.0, environment))
    part = suite.run_sanitizer(60.0)
    assert (part.passed, part.summary) == (passed, summary)
    assert ("errors" in part.output) == (not passed), "what it said until then"
    late = suite.run_sanitizer(9.0)
    assert (late.passed, late.seconds) == (False, 0.0)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    none = suite.run_sanitizer(60.0)
    assert (none.passed, none.summary) == (None, "not installed")


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (None, 0), (False, 1)])
def test_a_sanitizer_that_was_not_finished_is_no_success_of_the_suite(
    passed: bool | None, code: int, suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run_tests", "run_benchmark"):
        monkeypatch.setattr(suite, name, lambda *arguments: suite.Part("good", True, 1.0, ""))
    monkeypatch.setattr(suite, "run_sanitizer", lambda seconds: suite.Part("compute-sanitizer", passed, 1.0, ""))
    monkeypatch.setattr(suite, "write", lambda *arguments: tmp_path)
    monkeypatch.setattr(suite, "name_device", lambda: "none")
    assert suite.main(["--directory", str(tmp_path), "--results", str(tmp_path)]) == code


def test_tests_that_fail_or_find_no_time_are_in_the_result_with_their_words(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report like pytest's, of a failure, an error in a fixture, and an end before the last test."""
    report = (
        '<testsuites><testsuite tests="3" failures="1" errors="1" skipped="0">'
        '<testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure message="short">long story</failure></testcase>'
        '<testcase classname="a" name="unready"><error message="no device"/></testcase>'
        "</testsuite></testsuites>"
    )
    asked: list[dict[str, str]] = []

    def told(command: list[str], seconds: float, environment: dict[str, str]) -> Any:
        asked.append(environment)
        (tmp_path / "tests.xml").write_text(report)
        return suite.Outcome(1.0, "exit code 2: the time for the tests is up", False, "the end of it")

    monkeypatch.setattr(suite, "run", told)
    part = suite.run_tests(tmp_path, suite.parse(["--simulated"]), 100.0)
    assert not part.passed
    assert part.summary == "3 tests, 1 failures, 1 errors, 0 skipped; a::bad; a::unready"
    assert part.output == "a::bad\nlong story\n\na::unready\nno device"
    assert float(asked[0]["TIERMEM_GPU_SUITE_SECONDS"]) == 90.0
    report = '<testsuites><testsuite tests="2" failures="0" errors="0" skipped="0"/></testsuites>'
    part = suite.run_tests(tmp_path, suite.parse(["--simulated"]), 100.0)
    assert not part.passed, "not all of them were run"
    assert part.summary.endswith("the time for the tests is up")
    assert part.output == "the end of it"


@pytest.fixture(scope="module")
def step() -> ModuleType:
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return load("benchmarks", "gpu_step")
    finally:
        sys.path.remove(folder)


def test_the_model_is_the_largest_that_the_peer_can_hold(step: ModuleType) -> None:
    sizes = {name: step.count_parameters(name) for name in ("gpu-large", "gpu", "gpu-small")}
    assert 6.5e9 < sizes["gpu-large"] < 7e9
    assert 1.2e9 < sizes["gpu"] < 1.5e9
    assert 0.5e9 < sizes["gpu-small"] < 0.6e9
    chosen = [step.choose_workload(step.Machine(gib << 30, 80 << 30), 3600.0) for gib in (8, 16, 64, 256)]
    assert chosen == ["io-bound", "gpu-small", "gpu", "gpu-large"]
    small = step.choose_workload(step.Machine(256 << 30, 80 << 30), 330.0)
    assert small == "gpu-small", "seven large ones are not soon built"
    disks = [step.choose_workload(step.Machine(256 << 30, 80 << 30, gib << 30), 3600.0) for gib in (7, 64, 200)]
    assert disks == ["io-bound", "gpu", "gpu-large"]


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
            "predicted": 0.9125,
            "details": {"stall_seconds": [0.1] * 7, "edges": {"host->device": [10**9] * 7}},
        },
        {"contender": "tiermem, late", "error": "not run: the time was up"},
    ]
    peer, ours, late = step.table(runs, "quick").splitlines()[2:]
    assert "| 1.00 |" in peer
    assert "5.00 GB" in peer
    assert "| 2.00 | 0.100 s | host->device 1.00 |" in ours
    assert ours.endswith("| 3.00 GB | 0.912 s |")
    assert peer.endswith("| 3.00 GB |  |"), "only ours are planned"
    assert "| 32 | 0.19 |" in ours, "32 tokens, a billion parameters, six operations each"
    assert "not run: the time was up" in late
