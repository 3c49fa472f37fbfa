"""What `tiermem plan` says beside what `tiermem train` does with the same model, budget and options."""

from __future__ import annotations

import io
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from doubles_combinations import half_of, some_of
from rich.console import Console

from swap import SystemCalls
from tiermem.cli import machines, main, train
from tiermem.cli.machines import load_profile
from tiermem.cli.measure import measure_machine, with_room_now
from tiermem.cli.modelwork import model_workload
from tiermem.cli.presets import count_parameters, find_model
from tiermem.cli.tune import run
from tiermem.config import Config
from tiermem.planner.machine import Machine

BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "is_decoder": True,
}


@pytest.fixture(autouse=True)
def _own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_measurements: None, nothing_doubled: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machines, "measure_machine", measured)
    (tmp_path / "text").write_text("a text to learn " * 100)
    (tmp_path / "swap").mkdir()


RATES: dict[str, Machine] = {}


def measured(directories: list[Path], config: Config) -> Machine:
    """This machine, of which each kind of device is measured once, and not for long: what it takes is no question."""
    if config.device not in RATES:
        RATES[config.device] = measure_machine(directories, config, seconds=0.001, drive_seconds=0.01, nbytes=64 << 20)
    return with_room_now(RATES[config.device], directories, config)


def a_model(**values: Any) -> str:
    Path("config.json").write_text(json.dumps(values))
    return "."


@pytest.mark.parametrize("kind", ["bert", "roberta", "bert-generation"])
def test_units_inside_the_module_of_another_are_used(kind: str) -> None:
    """The output layer of these, where it is not tied, is below a module that has parameters of its own."""
    model = find_model(a_model(model_type=kind, tie_word_embeddings=False, **BERT), vocabulary=0)
    work = model_workload(
        model, kind, batch=2, seq=16, batches=1, settings=Config(host_memory="64KiB", swap_dirs=["."])
    )
    used = {access.unit for access in work.order}
    assert [unit.name for number, unit in enumerate(work.units) if number not in used] == []


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main.run(["plan", *arguments, "--json", "--seq", "16", "--batch", "2", "--swap-dir", "swap"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def trained(capsys: pytest.CaptureFixture[str], model: str, *arguments: str) -> dict[str, Any]:
    rest = ["--seq", "16", "--batch", "2", "--swap-dir", "swap", "--text", "text", "--json"]
    assert main.run(["train", "--model", model, *rest, *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def reserved(report: dict[str, Any]) -> int:
    (swap,) = [tier["budget"] for tier in report["tiers"] if tier["name"] == "SWAP"]
    return int(swap)


@pytest.mark.parametrize(("commits", "update"), half_of([False, True], ["forward", "backward", "auto"]))
def test_the_plan_has_as_many_copies_on_disk_as_training_reserves(
    capsys: pytest.CaptureFixture[str], update: str, commits: bool
) -> None:
    arguments = ("--update", update, "--host-memory", "1MiB")
    found = planned(capsys, "llama-tiny", *arguments, *(["--commits"] if commits else []))
    report = trained(capsys, "llama-tiny", *arguments, "--steps", "1", *(["--keep"] if commits else []))
    assert found["swap_bytes"] == pytest.approx(reserved(report), rel=0.01)


@pytest.mark.parametrize(("copies", "fits"), [(1.4, False), (2.2, True)])
def test_training_that_has_no_room_for_its_copies_is_refused_as_the_plan_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, copies: float, fits: bool
) -> None:
    planned(capsys, "llama-tiny", "--host-memory", "1MiB")  # measured while there is room
    room = round(copies * 12 * count_parameters(find_model("llama-tiny")))
    monkeypatch.setattr(SystemCalls, "free_bytes", lambda self, path: room)
    arguments = ("--update", "backward", "--host-memory", "1MiB", "--seq", "16", "--swap-dir", "swap")
    assert main.run(["plan", "llama-tiny", *arguments]) == (0 if fits else 1)
    capsys.readouterr()
    assert main.run(["train", "--model", "llama-tiny", *arguments, "--steps", "1", "--text", "text"]) == (1 - fits)
    assert fits or "swapping needs" in capsys.readouterr().err, "before anything is opened"


@pytest.mark.parametrize("commits", ["true", "false"])
def test_without_the_option_nothing_is_updated_early(capsys: pytest.CaptureFixture[str], commits: str) -> None:
    """`train` commits if an option says so, whatever the configuration has."""
    Path("settings.toml").write_text(f"commits = {commits}\n")
    arguments = ("llama-tiny", "--config", "settings.toml", "--host-memory", "400KiB")
    auto, forward = planned(capsys, *arguments), planned(capsys, *arguments, "--update", "forward")
    assert auto["update"] == "forward"
    assert auto["bytes_written_per_step"] == forward["bytes_written_per_step"] > 0
    assert planned(capsys, *arguments, "--commits")["update"] == "auto"


def test_what_is_tuned_is_what_its_trials_measure() -> None:
    config = Config(host_memory="400KiB", swap_dirs=["swap"], device="cpu")
    work = model_workload(find_model("llama-tiny"), "llama-tiny", batch=1, seq=16, batches=1, settings=config)
    found = run(
        work, load_profile("laptop"), config, measure=None, best=1, output=None, console=Console(file=io.StringIO())
    )
    assert found.tuning.default.settings.update == "forward"


NEOX = {
    "model_type": "gpt_neox",
    "tie_word_embeddings": False,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 2000,
    "max_position_embeddings": 64,
}


def test_moments_that_stay_float32_beside_8_bit_ones_are_reckoned_with(capsys: pytest.CaptureFixture[str]) -> None:
    model = a_model(**NEOX)
    least = planned(capsys, model, "--moments", "int8", "--host-memory", "4KiB")["host_bytes_least"]
    arguments = ("--moments", "int8", "--update", "forward", "--host-memory", str(least))
    found, report = planned(capsys, model, *arguments), trained(capsys, model, *arguments, "--steps", "3")
    assert found["fits"] is True
    assert found["swap_bytes"] == pytest.approx(reserved(report), rel=0.01)
    assert found["bytes_read_per_step"] == pytest.approx(report["steps"][-1]["bytes_read"], rel=0.1)
    rest = ["--seq", "16", "--batch", "2", "--swap-dir", "swap", "--text", "text", "--steps", "1"]
    less = ["--moments", "int8", "--host-memory", str(least - 4096)]
    assert main.run(["train", "--model", model, *rest, *less]) == 1
    assert f"set host_memory to {least} bytes or more" in capsys.readouterr().err


@pytest.mark.parametrize("rest", [(), ("--commits",), ("--update", "backward"), ("--moments", "int8")])
def test_what_does_not_fit_needs_as_much_disk_as_what_does(
    capsys: pytest.CaptureFixture[str], rest: tuple[str, ...]
) -> None:
    little, enough = (planned(capsys, "llama-5m", "--host-memory", host, *rest) for host in ("64KiB", "64MiB"))
    assert (little["fits"], enough["fits"]) == (False, True)
    assert little["swap_bytes"] == pytest.approx(enough["swap_bytes"], rel=0.001)


def test_what_is_committed_in_the_end_counts_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    report = trained(capsys, "llama-tiny", "--host-memory", "64MiB", "--steps", "1", "--keep")
    assert [step["bytes_written"] for step in report["steps"]] == [0], "all of it fits"
    assert report["wear"]["bytes_written"] >= 12 * report["parameters"]


def test_a_committed_run_is_refused_with_the_option_that_replaces_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--host-memory", "1MiB", "--steps", "1")
    trained(capsys, "llama-tiny", *arguments, "--keep")
    rest = ["--seq", "16", "--batch", "2", "--swap-dir", "swap", "--text", "text"]
    assert main.run(["train", "--model", "llama-tiny", *rest, *arguments]) == 1
    assert "(tiermem train --overwrite)" in capsys.readouterr().err
    report = trained(capsys, "llama-tiny", *arguments, "--overwrite")
    assert [step["number"] for step in report["steps"]] == [1]
    assert list(Path("swap").iterdir()) == [], "nothing is committed any more"


@pytest.mark.parametrize("share", some_of([0.5], [0.7]))
def test_updates_under_backward_are_planned_with_the_clipping_that_training_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """They may have to be undone, so that what they change is written before; here no step is."""
    monkeypatch.setattr(train, "MAX_GRAD_NORM", 1e9)
    model = a_model(**NEOX)
    host = round(14 * share * count_parameters(find_model(model)))
    Path("settings.toml").write_text('tile_size = "64KiB"\nio_backend = "inline"\n')
    arguments = ("--update", "backward", "--host-memory", str(host), "--config", "settings.toml")
    found, report = planned(capsys, model, *arguments), trained(capsys, model, *arguments, "--steps", "6")
    for name in ("bytes_read", "bytes_written"):
        moved = statistics.median(step[name] for step in report["steps"][3:])
        assert found[f"{name}_per_step"] == pytest.approx(moved, rel=0.25), name


def test_parameters_are_counted_without_what_aligns_them(capsys: pytest.CaptureFixture[str]) -> None:
    model = a_model(model_type="bert", **(BERT | {"vocab_size": 301}))
    count = count_parameters(find_model(model))
    found = planned(capsys, model, "--machine", "laptop", "--host-memory", "4MiB")
    assert found["parameters"] == count
    assert main.run(["plan", model, "--machine", "laptop", "--host-memory", "4MiB", "--seq", "16"]) == 0
    assert f"{count:,} in " in capsys.readouterr().out
