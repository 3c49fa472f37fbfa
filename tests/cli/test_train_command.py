"""The train command, with a plain PyTorch stand-in for the core: options, checks, errors, JSON."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import swap
import tiermem
from tiermem.cli import beginning, main
from tiermem.cli import train as train_module
from tiermem.cli.interrupts import INTERRUPTED
from tiermem.cli.launch import Launch
from tiermem.cli.presets import find_model
from tiermem.cli.progress import TrainProgress
from tiermem.cli.report import StepReport, TrainReport
from tiermem.errors import CapacityError

SCHEDULER = {"base_lrs": [3e-4], "last_epoch": 1, "_step_count": 2, "lr_lambdas": [None]}
SHORT = ["train", "--model", "llama-tiny", "--steps", "2", "--batch", "2", "--seq", "32"]


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_core: Any) -> None:
    monkeypatch.chdir(tmp_path)


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("tiermem: ")
    return lines[0]


def test_json_is_one_object_with_the_names_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*SHORT, "--accumulate", "3", "--host-memory", "96MiB", "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["parameters"] > 50_000
    assert report["state_bytes"] == 16 * report["parameters"]
    assert report["host_memory"] == 96 * 2**20
    assert report["peak_rss_bytes"] >= report["baseline_rss_bytes"] > 0
    assert len(report["steps"]) == 2
    for step in report["steps"]:
        contract = {"loss", "seconds", "stall_seconds", "bytes_read", "bytes_written", "tokens"}
        assert set(step) == contract | {"number", "edges"}
        assert step["tokens"] == 2 * 32 * 3
        assert 4 < step["loss"] < 7
        assert (step["stall_seconds"], step["bytes_read"], step["bytes_written"]) == (0.0, 30, 20)
    assert "step 2/2" in captured.err


def test_without_json_a_table_and_a_sentence_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(SHORT) == 0
    captured = capsys.readouterr()
    assert "step 2/2" in captured.err
    assert "tokens per second" in captured.out
    assert "of model state trained with 1.00 MiB of host memory" in " ".join(captured.out.split())


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_null_in_json(loss: float) -> None:
    step = StepReport(loss, seconds=1.0, stall_seconds=0.0, bytes_read=0, bytes_written=0, tokens=1)
    report = TrainReport("m", 1, 16, 1, baseline_rss_bytes=1, peak_rss_bytes=2, steps=(step,))
    assert json.loads(report.to_json())["steps"][0]["loss"] is None


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ((4.0,), "4.000 at first, 4.000 at last │"),
        ((4.0, 2.0), "4.000 at first, 3.000 at last (mean of 2 steps)"),
        ((9.0, 5.0, 4.0, 3.0, 2.0, 1.0), "9.000 at first, 3.000 at last (mean of 5 steps)"),
    ],
)
def test_the_table_says_what_the_loss_at_last_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, losses: tuple[float, ...], said: str
) -> None:
    """It is not that of the last step, which is on stderr."""
    monkeypatch.setenv("COLUMNS", "200")
    one = {"seconds": 1.0, "stall_seconds": 0.0, "bytes_read": 0, "bytes_written": 0, "tokens": 1}
    report = TrainReport("m", 1, 16, 4096, 1, 2, tuple(StepReport(loss, **one) for loss in losses))
    main.show_training(report, json=False, with_overlap=False)
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("seconds", "tokens", "figures"),
    [
        (
            5000.0,
            256,
            ("2 in 2 h 47 min, median 1 h 23 min", "0.0512", "9.31 GiB, 0.001 GB/s", "stall 25%  read 0.001 "),
        ),
        (0.02, 256, ("2 in 0.04 s, median 0.02 s", "12,800", "9.31 GiB, 250 GB/s", "12,800 tok/s")),
    ],
)
def test_steps_of_any_length_have_readable_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seconds: float, tokens: int,
    figures: tuple[str, ...],
) -> None:  # fmt: skip
    """On a processor without instructions for a dtype a step of a large model takes hours."""
    monkeypatch.setenv("COLUMNS", "200")
    step = StepReport(1.0, seconds, seconds / 4, bytes_read=5 * 10**9, bytes_written=0, tokens=tokens)
    main.show_training(TrainReport("m", 1, 16, 4096, 1, 2, (step, step)), json=False, with_overlap=False)
    progress = TrainProgress(Console(), steps=2, host_memory=1, baseline=0, state_bytes=1)
    said = capsys.readouterr().out + progress.describe(step)
    for figure in figures:
        assert figure in said


def test_figures_of_steps_that_differ_are_those_of_all_of_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    steps = tuple(
        StepReport(1.0, seconds, stall, bytes_read=3 * 10**9, bytes_written=10**9, tokens=40)
        for seconds, stall in ((1.0, 0.5), (2.0, 0.0), (7.0, 1.5))
    )
    report = TrainReport("m", 1, 16, 4096, baseline_rss_bytes=1 << 20, peak_rss_bytes=3 << 20, steps=steps)
    main.show_training(report, json=False, with_overlap=False)
    said = " ".join(capsys.readouterr().out.split())
    for figure in (
        *("3 in 10 s, median 2 s", "tokens per second │ 12 ", "computation waited │ 20 % of", "2.00 MiB above"),
        *("8.38 GiB, 0.9 GB/s", "2.79 GiB, 0.3 GB/s", "to 1.000 in 3 steps."),
    ):
        assert figure in said
    one = replace(report, steps=steps[:1])
    assert one.to_sentence().endswith(" in 1 step.")


def test_a_run_with_no_step_left_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    report = TrainReport("m", 1, 16, 4096, 1, 2, ())
    main.show_training(report, json=False, with_overlap=True)
    assert "No step was left to do" in " ".join(capsys.readouterr().out.split())


def test_the_same_seed_gives_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for seed in ("1", "1", "2"):
        assert main.run([*SHORT, "--seed", seed, "--json"]) == 0
        losses.append([step["loss"] for step in json.loads(capsys.readouterr().out)["steps"]])
    assert losses[0] == losses[1] != losses[2]


def test_options_reach_the_configuration(plain_core: Any, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    arguments = ["--swap-dir", "a", "--swap-dir", "b", "--device-memory", "1GiB", "--update", "step"]
    assert main.run([*SHORT, *arguments, "--param-dtype", "float32", "--resume", "--keep"]) == 0
    (runtime,) = plain_core.runtimes
    assert runtime.config.swap_dirs == ("a", "b")
    assert runtime.config.device_nbytes == 2**30
    assert runtime.config.update == "step"
    assert runtime.config.param_dtype == "float32"
    assert plain_core.resumes == ["auto"]
    assert runtime.calls == ["commit 1", "commit 2", "close remove=None"]


@pytest.mark.parametrize(
    ("dtype", "times", "said"),
    [("bfloat16", 9.6, True), ("float16", 9.6, True), ("bfloat16", 1.4, False), ("float32", 9.6, False)],
)
def test_a_dtype_that_the_processor_has_no_instructions_for_is_remarked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dtype: str, times: float, said: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(beginning, "times_float32", lambda dtype: times)
    assert main.run([*SHORT, "--param-dtype", dtype, "--json"]) == 0
    captured = capsys.readouterr()
    first = captured.err.splitlines()[0]
    assert first.startswith(f"{dtype} takes this processor at least 9 times as long as float32") is said
    assert first.startswith("step 1/2") is not said
    assert json.loads(captured.out)["steps"], "and nothing of it on stdout"


@pytest.mark.parametrize(("more", "said"), [(("--device-memory", "1GiB"), True), (("--device-memory", "auto"), False)])
def test_a_budget_for_a_device_that_is_not_there_is_said_to_be_unused(
    capsys: pytest.CaptureFixture[str], more: tuple[str, ...], said: bool
) -> None:
    assert main.run([*SHORT, "--param-dtype", "float32", *more]) == 0
    assert ("device_memory is not used" in capsys.readouterr().err) is said


def test_a_home_directory_is_meant_by_a_tilde(
    plain_core: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shells leave that of `--swap-dir=~/run` as it is, and a configuration file's is meant so, too."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "run").mkdir(parents=True)
    (tmp_path / "home" / "text").write_text("a text to learn " * 100)
    (tmp_path / "home" / "model").mkdir()
    find_model("llama-tiny").save_pretrained(tmp_path / "home" / "model")
    paths = ["--model=~/model", "--swap-dir=~/run", "--text=~/text", "--timeline=~/trace.json"]
    assert main.run([*SHORT, *paths]) == 0, capsys.readouterr().err
    (runtime,) = plain_core.runtimes
    assert runtime.config.swap_dirs == (str(tmp_path / "home" / "run"),)
    assert (tmp_path / "home" / "trace.json").read_text() == "[]"
    for model in (["~/model"], ["--model=~/model/config.json"]):
        assert main.run(["plan", *model, "--machine=~/none.toml"]) == 1
        assert f"no profile and no file '{tmp_path}/home/none.toml'" in capsys.readouterr().err


def test_a_configuration_file_is_used_and_options_go_on_top(plain_core: Any, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(
        json.dumps({"swap_dirs": [str(tmp_path)], "update": "step", "host_memory": "1GiB"})
    )
    assert main.run([*SHORT, "--config", "run.json", "--host-memory", "64MiB"]) == 0
    (runtime,) = plain_core.runtimes
    assert runtime.config.swap_dirs == (str(tmp_path),)
    assert runtime.config.update == "step"


def test_a_configuration_file_without_directories_takes_those_of_the_options(plain_core: Any, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"host_memory": "64MiB"}))
    assert main.run([*SHORT, "--config", "run.json", "--swap-dir", str(tmp_path)]) == 0
    (runtime,) = plain_core.runtimes
    assert runtime.config.swap_dirs == (str(tmp_path),)


def test_a_configuration_file_without_directories_has_the_default_one(
    plain_core: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"host_memory": "64MiB"}))
    assert main.run([*SHORT, "--config", "run.json"]) == 0
    (directory,) = plain_core.runtimes[0].config.swap_dirs
    assert Path(directory).parent == tmp_path
    assert plain_core.runtimes[0].config.host_nbytes == 64 << 20
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    capsys.readouterr()
    assert main.run([*SHORT, "--config", "run.json", "--resume"]) == 1
    assert "run.json names no swap_dirs" in error_line(capsys)
    (tmp_path / "run.json").write_text(json.dumps({"swap_dirs": []}))
    assert main.run([*SHORT, "--config", "run.json"]) == 1
    assert "expected one or more directories" in error_line(capsys)


def test_the_default_swap_directory_is_removed_afterwards(plain_core: Any, tmp_path: Path) -> None:
    assert main.run(SHORT) == 0
    (directory,) = plain_core.runtimes[0].config.swap_dirs
    assert Path(directory).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_the_default_swap_directory_stays_when_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its name is not of the user's choice, and a resume needs it."""
    assert main.run([*SHORT, "--keep"]) == 0
    (made,) = tmp_path.iterdir()
    said = f"the run is kept in {made}: --resume --swap-dir {made.name} goes on from there"
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_gradient_checkpointing_and_a_timeline(tmp_path: Path) -> None:
    assert main.run([*SHORT, "--gradient-checkpointing", "--timeline", "trace.json"]) == 0
    assert (tmp_path / "trace.json").exists()


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_timeline_for_which_the_disk_is_too_full_does_not_cost_the_report(
    form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*SHORT, "--timeline", "/dev/full", *form]) == 1
    printed = capsys.readouterr()
    assert ('"steps"' if form else "tokens per second") in printed.out
    assert "--timeline: /dev/full could not be written: " in " ".join(printed.err.split())
    assert "No space left" in printed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no-such-model"], ["no-such-model", "llama-tiny", "llama-70b"]),
        (["--model", ""], ['no preset and no file ""', "llama-tiny"]),
        (["--model", "broken.json"], ["broken.json", "not a Hugging Face model configuration"]),
        (["--text", "no-such-text"], ["expected files or folders of text, found no no-such-text"]),
        (["--text", "short.txt"], ["the text has 3 bytes, a sequence needs 32"]),
        (["--seq", "100000"], ["at most 8192 tokens", "100000"]),
        (["--tokenizer", "none.json"], ["expected a tokenizer.json, found no file none.json"]),
        (["--tokenizer", "."], ["found the folder .: name the file in it"]),
        (["--tokenizer", "broken.json"], ["broken.json is not a tokenizer.json"]),
        (["--config", "none.toml"], ["cannot read settings from none.toml"]),
        (["--swap-dir", "missing"], ["swap directory missing does not exist"]),
        (["--swap-dir", "short.txt"], ["swap directory short.txt is not a directory"]),
        (["--model", "llama-70b"], ["swapping needs", "of disk", "free"]),
        (["--timeline", "missing/trace.json"], ["--timeline: missing is not a directory"]),
        (["--timeline", "."], ["--timeline: expected the name of a file"]),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    arguments: list[str],
    words: list[str],
    plain_core: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "broken.json").write_text("{}")
    monkeypatch.setattr("tiermem.cli.disk.free_together", lambda directories: 2**30)
    before = sorted(tmp_path.iterdir())
    assert main.run([*SHORT, *arguments]) == 1
    line = error_line(capsys)
    for word in words:
        assert word in line
    assert plain_core.runtimes == []
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("available", "returned"), [(3 << 30, False), (2 << 30, True)])
def test_large_blocks_are_given_back_only_where_memory_is_short(
    available: int, returned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr("tiermem.cli.train.available_host_memory", lambda: available)
    monkeypatch.setattr("tiermem.cli.train.return_large_blocks", lambda: calls.append(None))
    assert main.run([*SHORT, "--host-memory", "96MiB"]) == 0
    assert bool(calls) == returned


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_swap_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert main.run([*SHORT, "--swap-dir", "locked"]) == 1
    assert "locked is not writable" in error_line(capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["train", "--steps", "none"],
        ["train", "--steps", "0"],
        ["train", "--no-such-option"],
        ["train", "--seed", str(2**64)],
        ["train", "--resume"],
        ["train", "--resume", "--overwrite", "--swap-dir", "."],
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(arguments) == 2
    command = "" if arguments == ["nonsense"] else " train"
    assert f"(see tiermem{command} --help)" in error_line(capsys)


def test_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    expected = f"tiermem {tiermem.__version__}, torch {metadata.version('torch')}"
    assert capsys.readouterr().out.startswith(expected)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--swap-dir", ""],
        ["train", "--text", ""],
        ["train", "--swap-dir", "a", "--swap-dir", ""],
        ["tune", "--output", ""],
        ["doctor", "--swap-dir", ""],
        ["bench", "--dir", ""],
        ["snapshot", "list", ""],
        ["snapshot", "export", "run", "--to", ""],
    ],
)
def test_an_empty_path_is_not_the_current_directory(
    plain_core: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 2
    line = error_line(capsys)
    assert "expected a path, found an empty text" in line
    assert (arguments[-2] if arguments[-2].startswith("--") else "PATHS") in line
    assert plain_core.runtimes == []


def test_a_batch_that_memory_has_no_room_for_names_its_option(
    plain_core: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["train", "--batch", "999999999"]) == 1
    assert "--batch 999999999 of --seq 256 are 1.86 TiB of token numbers alone" in error_line(capsys)
    assert plain_core.runtimes == []


def test_errors_of_the_core_are_one_line(plain_core: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for error in (CapacityError("too little:\n  7 bytes"), swap.SwapError("cannot read"), OSError(28, "No space left")):
        plain_core.error = error
        assert main.run(SHORT) == 1
        error_line(capsys)
    assert list(tmp_path.iterdir()) == []


def test_the_largest_rate_trains() -> None:
    assert main.run([*SHORT, "--lr", "1e30"]) == 0


def test_weights_that_a_resumed_training_does_not_read_are_said(
    plain_core: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    more = ["--swap-dir", str(tmp_path), "--resume", "--json"]
    said = "training goes on from committed step 1: --weights w is not read"
    for weights, committed, expected in ((["--weights", "w"], True, 1), ([], True, 0), (["--weights", "w"], False, 0)):
        plain_core.committed = {"step": 1, "scheduler": SCHEDULER} if committed else None
        assert main.run([*SHORT, *weights, *more]) == 0
        assert " ".join(capsys.readouterr().err.split()).count(said) == expected


@pytest.mark.parametrize(("rate", "times"), [("3e-4", 0), ("0.1", 1)])
def test_a_rate_that_a_resumed_training_does_not_take_is_said(
    plain_core: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, rate: str, times: int
) -> None:
    plain_core.committed = {"step": 1, "scheduler": SCHEDULER}
    assert main.run([*SHORT, "--lr", rate, "--swap-dir", str(tmp_path), "--resume", "--json"]) == 0
    said = "training goes on with its own learning rate of 0.0003: --lr 0.1 is for a new run"
    assert " ".join(capsys.readouterr().err.split()).count(said) == times


@pytest.mark.parametrize("extra", [{}, {"step": 1}])
def test_a_commit_of_another_program_is_refused_and_closed(
    plain_core: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, extra: dict[str, Any]
) -> None:
    plain_core.committed = extra
    assert main.run([*SHORT, "--swap-dir", str(tmp_path), "--resume"]) == 1
    assert "holds a commit that `tiermem train` has not made: continue it with the program" in error_line(capsys)
    (runtime,) = plain_core.runtimes
    assert runtime.calls == ["close remove=None"]


TEXT = 3200  # bytes
BATCHES = {"seed": 0, "batch": 2, "seq": 32, "accumulate": 1, "text": f"{TEXT} bytes", "tokenizer": "none"}
TOKENIZER = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"x": 0}, "merges": []}})


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--seed", "1", "--seed was 0, is 1"),
        ("--batch", "4", "--batch was 2, is 4"),
        ("--seq", "16", "--seq was 32, is 16"),
        ("--accumulate", "2", "--accumulate was 1, is 2"),
        ("--text", "longer", f"--text was {TEXT} bytes, is {TEXT + 1} bytes"),
        ("--tokenizer", "x.json", f"--tokenizer was none, is {len(TOKENIZER)} bytes"),
        ("--seed", "0", None),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["known", "of an older version"])
def test_other_batches_than_those_of_the_resumed_training_are_said(
    plain_core: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, value: str, said: str, known: bool
) -> None:
    for name, length in (("text", TEXT), ("longer", TEXT + 1)):
        Path(name).write_text("x" * length)
    Path("x.json").write_text(TOKENIZER)
    plain_core.committed = {"step": 1, "scheduler": SCHEDULER} | ({"batches": BATCHES} if known else {})
    texts = [] if option == "--text" else ["--text", "text"]
    assert main.run([*SHORT, *texts, option, value, "--swap-dir", str(tmp_path), "--resume", "--json"]) == 0
    found = " ".join(capsys.readouterr().err.split())
    remarks = [f"training goes on with other batches than its own: {said}"] if said and known else []
    assert found.count("other batches than its own") == len(remarks)
    assert all(remark in found for remark in remarks)


def test_a_commit_holds_what_its_batches_follow_from(plain_core: Any, tmp_path: Path) -> None:
    Path("text").write_text("x" * TEXT)
    assert main.run([*SHORT, "--text", "text", "--swap-dir", str(tmp_path), "--keep"]) == 0
    (runtime,) = plain_core.runtimes
    assert runtime.extras == [BATCHES] * 2


@pytest.mark.parametrize(
    ("options", "seconds", "steps"),
    [
        (["--keep"], 600, [1, 5]),
        (["--keep"], 0, [1, 2, 3, 4, 5]),
        (["--resume"], 600, [1, 5]),
        (["--resume", "committed"], 600, [5]),
        (["--resume", "committed"], 0, [2, 3, 4, 5]),
        (["--keep", "--commit-every", "2"], 0, [2, 4, 5]),
        (["--resume", "--commit-every", "5"], 0, [5]),
        (["--keep", "--commit-every", "0"], 0, [5]),
        (["--commit-every", "0"], 0, []),
        ([], 0, []),
    ],
)
def test_a_run_commits_as_asked_or_so_that_a_kill_costs_minutes(
    plain_core: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: list[str],
    seconds: float,
    steps: list[int],
) -> None:
    if "committed" in options:
        options, plain_core.committed = options[:-1], {"step": 1, "scheduler": SCHEDULER}
    monkeypatch.setattr(train_module, "COMMIT_SECONDS", seconds)
    assert committed_steps(plain_core, tmp_path, *options) == steps


def test_when_to_commit_all_ranks_find_alike(plain_core: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their clocks differ: the mean decides."""
    monkeypatch.setattr(Launch, "mean", lambda _, value: value + train_module.COMMIT_SECONDS)
    assert committed_steps(plain_core, tmp_path, "--keep") == [1, 2, 3, 4, 5]


def committed_steps(plain_core: Any, directory: Path, *options: str) -> list[int]:
    """Train for five steps; which were committed."""
    short = ["train", "--model", "llama-tiny", "--steps", "5", "--batch", "1", "--seq", "8"]
    assert main.run([*short, "--swap-dir", str(directory), *options]) == 0
    (runtime,) = plain_core.runtimes
    return [int(call.removeprefix("commit ")) for call in runtime.calls if call.startswith("commit ")]


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_committed_run_may_be_replaced(plain_core: Any, tmp_path: Path, overwrite: bool) -> None:
    assert main.run([*SHORT, "--swap-dir", str(tmp_path), *(["--overwrite"] if overwrite else [])]) == 0
    (runtime,) = plain_core.runtimes
    assert runtime.config.overwrite is overwrite
    assert plain_core.resumes == [False]


class Interrupting:
    def __set_name__(self, owner: type, name: str) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_while_a_class_is_made_is_one(
    plain_core: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As happens while libraries are being imported: before Python 3.12 it comes out as a RuntimeError."""

    def interrupted(*_: object, **__: object) -> None:
        type("Made", (), {"field": Interrupting()})

    monkeypatch.setattr(tiermem, "offload", interrupted)
    assert main.run(SHORT) == INTERRUPTED
    assert capsys.readouterr().err == "tiermem: interrupted\n"
    plain_core.error = RuntimeError("a bug")
    monkeypatch.setattr(tiermem, "offload", plain_core.offload)
    with pytest.raises(RuntimeError, match="a bug"):
        main.run(SHORT)
