"""`tiermem tune`: simulated, measured, written, and read again by `train --config`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import tiermem
from tiermem.cli import beginning, main, tune_steps
from tiermem.cli.machines import load_profile
from tiermem.cli.tune import run
from tiermem.planner import tuning
from tiermem.planner.machine import Machine
from tiermem.planner.predict import seconds_of_step
from tiermem.planner.settings import PlanSettings
from tiermem.planner.workload import Workload, transformer

QUICK = ["tune", "--model", "llama-tiny", "--batch", "1", "--seq", "16", "--machine", "laptop", "--update", "forward"]


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


FORESEEN: dict[str, float] = {}


@pytest.fixture(autouse=True)
def _simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step of the same machine, many times searched for here, takes the same seconds each time."""

    def seconds(workload: Workload, machine: Machine, settings: PlanSettings) -> float:
        key = repr((workload, machine, settings))
        if key not in FORESEEN:
            FORESEEN[key] = seconds_of_step(workload, machine, settings)
        return FORESEEN[key]

    monkeypatch.setattr(tuning, "seconds_of_step", seconds)


def test_json_has_the_choice_the_curve_and_the_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--host-memory", "4MiB", "--steps", "1", "--best", "2", "--output", "tuned.toml", "--json"]
    assert main.run([*QUICK, *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["settings"]) == {"update", "look_ahead", "tile_size", "queue_depth", "block_size"}
    assert found["predicted_seconds"] > 0
    assert found["measured_seconds"] > 0
    assert found["default_measured_seconds"] >= found["measured_seconds"]
    tried = {point["changed"] for point in found["curve"]}
    assert tried >= {"", "look_ahead", "tile_size", "queue_depth", "block_size"}
    assert tried <= {"", *found["settings"]}, "as in the file"
    assert sum(point["measured_seconds"] is not None for point in found["curve"]) in (1, 2, 3)
    loaded = tiermem.Config.load(tmp_path / "tuned.toml")
    assert loaded.host_nbytes == 4 << 20
    written = loaded.to_dict()
    for name, value in found["settings"].items():
        # What the choice leaves alone stays what it was, and both mean the same.
        assert written[name] == value
    assert [path.name for path in tmp_path.iterdir()] == ["tuned.toml"], "trials leave nothing behind"


@pytest.mark.parametrize("where", [["--swap-dir", "swap"], []])
def test_what_it_writes_is_what_train_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: list[str]
) -> None:
    (tmp_path / "swap").mkdir()
    arguments = ["--host-memory", "2MiB", "--steps", "0", "--output", "tuned.json", *where]
    assert main.run([*QUICK, *arguments]) == 0
    out = capsys.readouterr().out
    assert "by simulation" in " ".join(out.split())
    monkeypatch.chdir("/")  # from anywhere
    train = [
        "train",
        "--config",
        str(tmp_path / "tuned.json"),
        "--model",
        "llama-tiny",
        "--steps",
        "2",
        "--batch",
        "1",
        "--seq",
        "16",
    ]
    assert main.run([*train, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host_memory"] == 2 << 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["swap", "tuned.json"]


def tuned_by(times: Any, output: Path | None = None, update: Any = "forward") -> Any:
    config = tiermem.Config(host_memory="2MiB", swap_dirs=["."], update=update)
    machine = load_profile("laptop")
    work = transformer(500_000, batch=1, seq=64)
    console = Console(file=io.StringIO())
    return run(work, machine, config, measure=times, best=3, output=output, console=console)


def test_the_default_stays_unless_something_is_measured_to_be_faster() -> None:
    asked: list[tiermem.Config] = []

    def same(config: tiermem.Config) -> float:
        asked.append(config)
        return 1.0

    report = tuned_by(same)
    assert report.is_default_best
    assert asked[0] == report.config == tiermem.Config(host_memory="2MiB", swap_dirs=["."], update="forward")


def test_a_terminal_of_eighty_columns_has_room_for_the_table() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(tuned_by(lambda config: 1.0).to_table())
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "…" not in shown
    for word in ("changed", "look-ahead", "(default)", "tile", "depth", "block", "measured"):
        assert word in shown


def test_a_measurement_overrules_the_simulation(tmp_path: Path) -> None:
    asked: list[tiermem.Config] = []

    def third_is_best(config: tiermem.Config) -> float:
        asked.append(config)
        return {1: 2.0, 2: 1.9, 3: 1.5}.get(len(asked), 3.0)

    report = tuned_by(third_is_best, tmp_path / "choice.toml")
    assert len(asked) >= 3
    assert report.config == asked[2]
    assert json.loads(report.to_json())["measured_seconds"] == 1.5
    assert tiermem.Config.load(tmp_path / "choice.toml") == report.config


@pytest.mark.parametrize("best", [1, 2, 3])
def test_what_is_reported_is_what_is_written(tmp_path: Path, best: int) -> None:
    """Also of an update that was left to "auto", of which the search knows only how it begins."""
    asked: list[tiermem.Config] = []

    def one_is_best(config: tiermem.Config) -> float:
        asked.append(config)
        return 1.0 if len(asked) == best else 2.0

    report = json.loads(tuned_by(one_is_best, tmp_path / "choice.toml", update="auto").to_json())
    written = tiermem.Config.load(tmp_path / "choice.toml")
    assert written == asked[best - 1]
    assert {name: written.to_dict()[name] for name in report["settings"]} == report["settings"]
    assert report.items() >= report["settings"].items()


def test_what_cannot_be_tuned_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*QUICK, "--host-memory", "4KiB"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "needs at least" in captured.err
    assert captured.err.count("\n") == 1


def test_a_place_for_the_choice_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.run([*QUICK, "--host-memory", "8MiB", "--output", str(tmp_path / "none" / "run.toml")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--output: " in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_choice_for_which_the_disk_is_too_full_is_printed_all_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "full.toml").symlink_to("/dev/full")
    assert main.run([*QUICK, "--host-memory", "2MiB", "--steps", "0", "--output", "full.toml", "--json"]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["predicted_seconds"] > 0
    assert found["output"] is None
    line = captured.err.splitlines()[-1]
    assert line.startswith("tiermem: --output: the settings could not be written: ")
    assert "No space left on device" in line
    assert "full.toml" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seq", "100000"], "at most 8192 tokens in a sequence, --seq is 100000"),
        (["--batch", "999999999"], "of token numbers alone"),
        (["--text", "none"], "found no none; correct the path"),
        (["--model", "llama-70b"], "swapping needs"),
    ],
)
def test_what_train_refuses_is_refused_before_anything_is_simulated(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def simulate(*_: Any, **__: Any) -> None:
        raise AssertionError("simulated")

    monkeypatch.setattr("tiermem.cli.tune_steps.model_workload", simulate)
    monkeypatch.setattr("tiermem.cli.disk.free_together", lambda directories: 2**30)
    assert main.run([*QUICK, *arguments]) == 1
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_measured_steps_no_disk_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tiermem.cli.disk.free_together", lambda directories: 1)
    assert main.run([*QUICK, "--host-memory", "2MiB", "--steps", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured_seconds"] is None


def test_each_trial_trains_once_in_folders_of_its_own_and_its_first_steps_do_not_count(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed: list[tiermem.Config] = []

    class Trial:
        def __init__(self, options: Any, config: tiermem.Config, subject: Any) -> None:
            assert all(path.is_dir() for path in config.swap_paths)
            self.config = config

        def step(self, number: int) -> Any:
            return SimpleNamespace(seconds=(9.0, 8.0, 7.0, 1.0, 5.0, 2.0)[number])

        def close(self) -> None:
            closed.append(self.config)

    monkeypatch.setattr(tune_steps, "Training", Trial)
    monkeypatch.setattr(tuning, "seconds_of_step", lambda *_: 1.0)
    where = [tmp_path / "a", tmp_path / "b"]
    for directory in where:
        (directory / "tiermem-tune-left").mkdir(parents=True)
        (directory / "tiermem-tune-left" / "tiermem.swapfile").touch()
    swap = [text for directory in where for text in ("--swap-dir", str(directory))]
    assert main.run([*QUICK, "--host-memory", "2MiB", "--steps", "3", "--best", "2", *swap, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured_seconds"] == found["default_measured_seconds"] == 2.0
    assert len(closed) == 2, "the default is among the best two, and measured once"
    for config in closed:
        assert [path.parent for path in config.swap_paths] == where
        assert not config.commits
    assert [list(directory.iterdir()) for directory in where] == [[], []], "nor what a trial that was killed has left"


def test_what_is_to_be_typed_next_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*QUICK, "--host-memory", "4MiB", "--steps", "0", "--output", "my choice.toml"]) == 0
    assert "tiermem train --config 'my choice.toml'" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("more", "said"), [((), True), (("--machine", "laptop"), False)])
def test_a_dtype_that_this_processor_has_no_instructions_for_is_remarked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], said: bool
) -> None:
    monkeypatch.setattr(tune_steps, "find_machine", lambda *_, **__: load_profile("laptop"))
    monkeypatch.setattr(beginning, "times_float32", lambda dtype: 9.6)
    tune = [
        "tune",
        "--model",
        "llama-tiny",
        "--batch",
        "1",
        "--seq",
        "16",
        "--update",
        "forward",
        "--steps",
        "0",
        *more,
    ]
    assert main.run(tune) == 0
    assert ("at least 9 times as long as float32" in capsys.readouterr().err) is said


def test_the_chosen_line_is_marked_where_nothing_is_bold() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(tuned_by(lambda config: 1.0).to_table())
    assert isinstance(console.file, io.StringIO)
    assert [line.split()[1] for line in console.file.getvalue().splitlines() if line.startswith("*")] == ["(default)"]
