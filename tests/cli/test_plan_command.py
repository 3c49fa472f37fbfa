"""`tiermem plan`: the names of the contract, what does not fit, and answers to mistakes."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tiermem.cli import beginning, disk, machines, main, measure
from tiermem.cli import plan as planning
from tiermem.cli.measure import measure_machine
from tiermem.cli.modelwork import model_workload, parse_count
from tiermem.cli.plan import _relief
from tiermem.cli.presets import find_model
from tiermem.config import Config
from tiermem.errors import ConfigError
from tiermem.planner.machine import Machine
from tiermem.planner.predict import Relief
from tiermem.planner.workload import transformer

CONTRACT = {
    "fits",
    "device_bytes",
    "host_bytes",
    "swap_bytes",
    "bytes_read_per_step",
    "bytes_written_per_step",
    "seconds_per_step",
    "bottleneck",
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_measurements: None) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main.run(["plan", *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(found) >= CONTRACT
    return found


def test_a_model_on_a_described_machine(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "llama-5m", "--machine", "laptop", "--host-memory", "24MiB", "--zero-table")
    assert found["fits"] is True
    assert found["host_bytes"] == 24 << 20
    assert found["device_bytes"] == 0
    assert found["parameters"] > 4_800_000
    assert found["swap_bytes"] > 12 * found["parameters"]
    assert 0 < found["bytes_written_per_step"] < 1.1 * found["swap_bytes"]
    assert found["seconds_per_step"] == pytest.approx(sum(found["phases_seconds"].values()))
    assert found["bottleneck"] in found["relief_seconds"]
    assert found["drive_life_days"] > 0
    assert found["machine"]["source"].startswith("described")
    assert found["zero_table"][0]["device_bytes"] == 16 * found["parameters"]


def test_many_ranks_of_a_model_given_by_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    """And what twice as much of each thing would bring, of ranks with devices, too."""
    found = answer(capsys, "--parameters", "100M", "--machine", "dgx-h100", "--ranks", "16", "--batch", "1")
    assert found["fits"]
    assert found["ranks"] == 16
    assert found["tokens_per_second"] == pytest.approx(16 * 256 / found["seconds_per_step"])
    assert set(found["relief_seconds"]) == {
        *("drive", "host memory", "update", "compute", "device wires", "device memory", "link")
    }
    assert found["bottleneck"] == "link", "they are on two nodes"


@pytest.mark.usefixtures("nothing_doubled")
def test_copies_of_a_model_are_divided_over_fewer_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["300M", "--machine", "dgx-h100", "--ranks", "16", "--host-memory", "2GiB", "--device-memory", "2GiB"]
    one, two = (answer(capsys, *arguments, "--copies", str(copies)) for copies in (1, 2))
    assert (one["ranks"], one["copies"], two["ranks"], two["copies"]) == (16, 1, 16, 2)
    assert two["swap_bytes"] == pytest.approx(2 * one["swap_bytes"], rel=0.01)
    assert two["stall_seconds"]["ranks"] < one["stall_seconds"]["ranks"], "units are gathered inside a node"
    small = ["20M", "--machine", "dgx-h100", "--ranks", "16"]  # fits, and so is foreseen at once
    assert main.run(["plan", *small, "--copies", "2"]) == 0
    assert "2 copies" in capsys.readouterr().out


@pytest.mark.usefixtures("nothing_doubled")
def test_units_updated_on_the_device_are_known_of_several_ranks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "settings.toml").write_text('swap_dirs = ["."]\nupdate_on = "auto"\n')
    arguments = ["300M", "--machine", "dgx-h100", "--ranks", "8", "--host-memory", "2GiB", "--device-memory", "4GiB"]
    host, device = answer(capsys, *arguments), answer(capsys, *arguments, "--config", "settings.toml")
    assert (host["units_updated_on_device"], device["units_updated_on_device"]) == (0, 13)
    assert device["edges_bytes"].get("host->device", 0) == 0 < host["edges_bytes"]["host->device"]
    assert device["device_bytes"] == 4 << 30
    (tmp_path / "settings.toml").write_text('swap_dirs = ["."]\nstage = 2\n')
    whole = answer(capsys, *arguments, "--config", "settings.toml")
    parameters = 2 * whole["parameters"]
    assert whole["swap_bytes"] - host["swap_bytes"] == pytest.approx((7 / 8 + 1) * parameters, rel=0.01)
    assert whole["edges_bytes"]["host->device"] > host["edges_bytes"]["host->device"]


@pytest.mark.usefixtures("nothing_doubled")
def test_what_does_not_fit_says_how_many_bytes_lack(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["llama-5m", "--machine", "laptop", "--host-memory"]
    found = answer(capsys, *arguments, "512KiB", code=1)
    assert found["fits"] is False
    assert found["seconds_per_step"] is None
    enough = (1 << 19) + found["missing_bytes"]["host_memory"]
    assert answer(capsys, *arguments, f"{enough + 4095}")["fits"] is True
    assert main.run(["plan", *arguments, "512KiB"]) == 1
    captured = capsys.readouterr()
    assert "missing host_memory" in captured.out
    lacks = f"({enough - (1 << 19)} bytes) more of host_memory; raise --host-memory"
    assert captured.err.startswith("tiermem: llama-5m does not fit: it needs ")
    assert captured.err.endswith(f"MiB {lacks}\n")


@pytest.mark.parametrize(
    ("number", "said"),
    [("1000T", "1,000 T"), ("70B", "70 B"), ("5M", "5 M"), ("125,000", "125,000")],
)
def test_a_number_of_parameters_is_named_as_people_write_it(number: str, said: str) -> None:
    assert transformer(parse_count(number), batch=1, seq=2).name == f"{said} parameters"


@pytest.mark.usefixtures("nothing_doubled")
@pytest.mark.parametrize(("host_memory", "code"), [("8MiB", 0), ("16KiB", 1)])
def test_a_device_that_is_not_there_has_no_bytes(
    capsys: pytest.CaptureFixture[str], host_memory: str, code: int
) -> None:
    plan = ["plan", "llama-tiny", "--machine", "laptop", "--host-memory", host_memory, "--device-memory", "1GiB"]
    assert main.run([*plan, "--json"]) == code
    captured = capsys.readouterr()
    assert json.loads(captured.out)["device_bytes"] == 0
    assert ("device_memory is not used" in captured.err) is (code == 0)


@pytest.mark.usefixtures("nothing_doubled")
def test_one_unit_is_not_called_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", "llama-tiny", "--machine", "laptop", "--host-memory", "1GiB", "--zero-table"]) == 0
    printed = capsys.readouterr().out
    assert "in 1 unit, " in printed
    assert "1 GPU, " in printed


@pytest.mark.usefixtures("nothing_doubled")
def test_a_drive_too_small_and_a_device_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--parameters", "70B", "--machine", "laptop", "--host-memory", "8GiB", "--commits", code=1)
    assert found["missing_bytes"]["swap"] == found["swap_bytes"] - 800 * 10**9
    arguments = ["--parameters", "300M", "--machine", "rtx4090", "--device-memory"]
    found = answer(capsys, *arguments, "20MiB", code=1)
    enough = (20 << 20) + found["missing_bytes"]["device_memory"]
    assert answer(capsys, *arguments, str(enough))["fits"] is True


@pytest.mark.parametrize(("host_memory", "code", "said"), [("1MiB", 0, "yes"), ("16KiB", 1, "no")])
def test_the_table_says_whether_it_fits(
    host_memory: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["plan", "llama-tiny", "--machine", "laptop", "--host-memory", host_memory]) == code
    rows = [line.split("│")[1:3] for line in capsys.readouterr().out.splitlines() if line.count("│") == 3]
    assert ["fits", said] in [[cell.strip() for cell in row] for row in rows]


def test_what_would_hardly_help_is_not_said_to_help_by_less_than_nothing() -> None:
    relief = [Relief(name, seconds) for name, seconds in (("drive", 1.001), ("cores", 0.5))]
    assert list(_relief(relief, 1.0).columns[-1].cells) == ["0 %", "50 %"]


@pytest.mark.usefixtures("nothing_doubled")
def test_hours_and_few_tokens_a_second_are_readable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a processor that has no instructions for the dtype of a large model."""
    laptop = machines.load_profile("laptop")
    slow = dataclasses.replace(laptop, host=dataclasses.replace(laptop.host, flops={"bfloat16": 1e5}))
    monkeypatch.setattr(planning, "load_profile", lambda name: slow)
    monkeypatch.setenv("COLUMNS", "200")
    assert main.run(["plan", "llama-tiny", "--machine", "laptop", "--host-memory", "1MiB"]) == 0
    rows = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
    found = {row[1]: row[2] for row in rows if len(row) == 4}
    seconds, _, rest = found["seconds a step (simulated)"].partition(" = ")
    assert float(seconds.replace(",", "")) > 1000
    assert rest.startswith(("1 h ", "2 h ")), rest
    assert 0 < float(found["tokens a second"]) < 1
    assert not any("e+" in cell for row in rows for cell in row)


def test_the_table_says_everything_in_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main.run(["plan", "llama-tiny", "--machine", "laptop", "--host-memory", "400KiB", "--actions"]) == 0
    out = capsys.readouterr().out
    for words in ("bottleneck", "Twice as much of", "tokens a second", "drive life at this rate", "described"):
        assert words in out
    assert "The plan of a step: 40 of " in out
    actions = [line.split("│")[1].strip() for line in out.splitlines() if line.count("│") == 7]
    assert len(actions) == 40
    assert actions[0] == "0.0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-tiny", "--machine", "rtx409"], "no profile and no file 'rtx409'; profiles: dgx-h100, laptop, rtx4090"),
        (["llama-tiny", "--machine", "dgx-h100", "--ranks", "12"], "expected a multiple of the node's 8 ranks"),
        (["llama-tiny", "--machine", "laptop", "--ranks", "2"], "expected a [link] in the profile"),
        (["no-such-model", "--machine", "laptop"], "or a number of parameters such as 70B"),
        (["7B", "--machine", "rtx4090", "--host-memory", "1TiB"], "at most 56.00 GiB, which one RTX 4090, two Gen4"),
        (["7B", "--machine", "rtx4090", "--device-memory", "21GiB"], "at most 20.00 GiB, which one RTX 4090, two Gen4"),
        (["7B", "--machine", "dgx-h100", "--ranks", "8", "--host-memory", "1TiB"], "has for each rank, found 1.00 TiB"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_figures_are_whole_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    model = ["llama-tiny", "--machine", "laptop", "--host-memory", "1MiB"]
    assert main.run(["plan", *model, "--actions", "--zero-table"]) == 0
    assert "…" not in capsys.readouterr().out


@pytest.mark.parametrize("command", [["plan", "7B"], ["tune", "--model", "llama-tiny"]])
def test_another_machine_is_not_measured(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*command, "--machine", "laptop", "--measure"]) == 2
    assert "expected --measure, which measures this machine, or --machine, not both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-8b", "--plot", "none/plan.png"], "none is not a directory; make it first"),
        (["llama-8b", "--plot", "folder.png"], "found the directory folder.png"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_the_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    (tmp_path / "folder.png").mkdir()
    assert main.run(["plan", *arguments, "--machine", "laptop", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_a_model_without_a_name_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", "--model", "", "--machine", "laptop", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "name of a model" in captured.err


def test_the_least_budget_is_the_one_that_training_asks_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Small layers become one unit only where the budget has room for that."""
    arguments = ["llama-tiny", "--machine", "laptop", "--host-memory", "4KiB"]
    least = answer(capsys, *arguments, code=1)["host_bytes_least"]
    (tmp_path / "text").write_text("a" * 100)
    swap = ["--swap-dir", str(tmp_path), "--text", "text", "--seq", "32"]
    assert main.run(["train", "--model", "llama-tiny", "--host-memory", "4KiB", *swap]) == 1
    assert f"set host_memory to {least} bytes or more" in capsys.readouterr().err


def test_a_profile_with_a_typo_gets_a_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(machines.__file__).parents[1] / "planner/profiles/laptop.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("latency", "latnecy"))
    assert main.run(["plan", "llama-tiny", "--machine", "mine.toml"]) == 1
    assert "unknown key 'latnecy' in [drive]: did you mean 'latency'?" in capsys.readouterr().err
    (tmp_path / "broken.toml").write_text("name = ")
    assert main.run(["plan", "llama-tiny", "--machine", "broken.toml"]) == 1
    assert "is not TOML" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_doubled")
def test_this_machine_is_measured_once_and_again_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[object] = []

    @functools.cache  # what it is measured to be does not matter the second time
    def machine() -> Machine:
        return measure_machine([tmp_path], seconds=0.001, drive_seconds=0.01, nbytes=64 << 20)

    def quick(directories: Any, config: Config) -> Machine:
        calls.append(directories)
        return machine()

    monkeypatch.setattr(machines, "measure_machine", quick)
    arguments = ("llama-tiny", "--host-memory", "8MiB", "--swap-dir", str(tmp_path), "--param-dtype", "float32")
    found = answer(capsys, *arguments)
    assert found["machine"]["source"].startswith("measured 20")
    again = answer(capsys, *arguments)
    assert again["machine"] == found["machine"]
    assert len(calls) == 1
    answer(capsys, *arguments, "--measure")
    assert len(calls) == 2
    assert [path for path in tmp_path.iterdir() if path.name != "cache"] == [], "nothing of the probe is left"
    for kept in (tmp_path / "cache/tiermem").iterdir():
        kept.write_text("{")
    answer(capsys, *arguments)
    assert len(calls) == 3


@pytest.mark.usefixtures("nothing_doubled")
@pytest.mark.parametrize(
    ("more", "times", "said"),
    [
        ((), 9.6, True),
        ((), 1.4, False),
        (("--param-dtype", "float32"), 9.6, False),
        (("--machine", "laptop"), 9.6, False),  # which another processor computes on
        (("--host-memory", "64KiB"), 9.6, False),  # nothing is planned
    ],
)
def test_a_dtype_that_this_processor_has_no_instructions_for_is_remarked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], times: float, said: bool
) -> None:
    laptop = machines.load_profile("laptop")
    monkeypatch.setattr(planning, "machine_for", lambda workload, config, *, seq, again: laptop)
    monkeypatch.setattr(beginning, "times_float32", lambda dtype: times)
    main.run(["plan", "llama-tiny", "--host-memory", "8MiB", *more])
    assert ("bfloat16 takes this processor at least 9 times as long as float32" in capsys.readouterr().err) is said


@pytest.mark.usefixtures("nothing_doubled")
def test_room_is_what_is_free_now_and_a_file_system_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = functools.partial(measure_machine, seconds=0.001, drive_seconds=0.01, nbytes=64 << 20)
    monkeypatch.setattr(machines, "measure_machine", quick)
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    config = Config(swap_dirs=[str(directory) for directory in directories])
    measured = machines.this_machine(directories, config)
    assert measured.drive.capacity <= disk.capacity_bytes(directories[:1])
    monkeypatch.setattr(measure, "free_together", lambda _: 1 << 20)
    monkeypatch.setattr(measure, "available_host_memory", lambda: 8 << 30)
    now = machines.this_machine(directories, config)
    assert (now.drive.capacity, now.host.memory, now.drive.read) == (1 << 20, 6 << 30, measured.drive.read)
    (tmp_path / "run.json").write_text("{}")  # a file that names no directories: the current one is meant
    arguments = ["llama-tiny", "--config", str(tmp_path / "run.json"), "--host-memory", "8MiB"]
    monkeypatch.chdir(directories[0])
    assert answer(capsys, *arguments, "--machine", "laptop")["fits"] is True
    found = answer(capsys, *arguments, "--swap-dir", str(directories[0]), "--swap-dir", str(directories[1]), code=1)
    assert found["missing_bytes"]["swap"] == found["swap_bytes"] - (1 << 20)
    monkeypatch.setattr(measure, "free_together", lambda _: 0)
    full = answer(capsys, *arguments, "--swap-dir", str(directories[0]), "--swap-dir", str(directories[1]), code=1)
    assert full["missing_bytes"]["swap"] == full["swap_bytes"], "a full disk is not one of unknown size"
    assert main.run(["plan", *arguments, "--swap-dir", str(tmp_path / "run.json")]) == 1
    assert "run.json is not a directory" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_doubled")
def test_a_vocabulary_smaller_than_bytes_have_can_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    rest = ("--machine", "laptop", "--host-memory", "8MiB")
    found = answer(capsys, str(tmp_path), *rest)
    assert found["fits"] is True
    for option in ("--model", "-m", "--config-json"):  # as train and tune have it
        assert answer(capsys, option, str(tmp_path), *rest) == found


@pytest.mark.parametrize("home", ["locked", None])
def test_a_home_that_cannot_be_used_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    """As of a user who kept root's HOME, or of a number without a name that a container runs as."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def denied(*arguments: Any, **named: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless if home is None else lambda: tmp_path / home)
    for name in ("exists", "read_text", "mkdir", "unlink"):
        monkeypatch.setattr(Path, name, denied)
    machine = object()
    monkeypatch.setattr(machines, "measure_machine", lambda directories, config: machine)
    monkeypatch.setattr(machines, "machine_to_dict", lambda machine: {})
    assert machines.this_machine([], Config(device="cpu", swap_dirs=["."])) is machine


def test_a_missing_swap_directory_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", "llama-tiny", "--swap-dir", "/no/such/place"]) == 1
    assert "/no/such/place does not exist" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_doubled")
def test_a_number_of_parameters_may_stand_where_the_model_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rest = ("--machine", "laptop", "--host-memory", "1GiB")
    named = answer(capsys, "--parameters", "20M", *rest)
    for count in ("20M", "20000000", "2e7", "20_000_000"):
        found = answer(capsys, count, *rest)
        assert (found["parameters"], found["swap_bytes"]) == (named["parameters"], named["swap_bytes"])
    (tmp_path / "20M").mkdir()  # a folder of that name is meant, if there is one
    assert main.run(["plan", "20M", *rest, "--json"]) == 1
    assert "20M" in capsys.readouterr().err


def test_counts_of_parameters_as_people_write_them() -> None:
    assert [parse_count(text) for text in ("125M", "7.5b", "1T", "1000")] == [125 * 10**6, 75 * 10**8, 10**12, 1000]
    assert [parse_count(text) for text in ("1.5e9", "7E+9", "70,000", "7_000_000")] == [
        15 * 10**8,
        7 * 10**9,
        70000,
        7 * 10**6,
    ]
    for text in ("-3", "1e400", "1e9B", "7,00", "1__000"):
        with pytest.raises(ConfigError, match="expected a number of parameters"):
            parse_count(text)


def test_a_tied_model_is_called_as_it_is_used() -> None:
    work = model_workload(
        find_model("llama-1b"), "llama-1b", batch=1, seq=16, batches=1, settings=Config(swap_dirs=["."])
    )
    units = [access.unit for access in work.order]
    assert units[0] == 0, "the embedding"
    assert units.count(0) == 4, "as embedding, as output, in backward, and for its gradient"
    assert work.order[-1].unit == 0


def test_the_picture_of_a_plan_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    for name, begins in {"plan.png": b"\x89PNG", "plan.svg": b"<?xml"}.items():
        answer(capsys, "llama-tiny", "--machine", "laptop", "--host-memory", "1MiB", "--plot", str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(begins)


def test_without_a_step_to_draw_what_lacks_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    arguments = ["llama-5m", "--machine", "laptop", "--host-memory", "512KiB", "--plot", str(tmp_path / "plan.png")]
    assert main.run(["plan", *arguments]) == 1
    assert "llama-5m does not fit: it needs" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
