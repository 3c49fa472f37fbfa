"""Exit codes of all commands: 2 for what the command line alone shows to be wrong, 1 for what is found otherwise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from swap.bench.__main__ import main as measure
from tiermem.cli import main

TRAIN, TUNE, PLAN = ["train"], ["tune"], ["plan", "llama-tiny", "--machine", "laptop"]
BENCH, DOCTOR = ["bench", "--dir", "."], ["doctor"]
LIST, VERIFY = ["snapshot", "list", "."], ["snapshot", "verify", "."]
EXPORT, RESHARD = (
    ["snapshot", "export", ".", "--to", "out"],
    ["snapshot", "reshard", ".", "--to", "out", "--ranks", "2"],
)


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("command", [TRAIN, TUNE, PLAN, BENCH, DOCTOR, LIST, VERIFY, EXPORT, RESHARD], ids=" ".join)
def test_an_unknown_option_is_wrong_usage(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*command, "--no-such-option"]) == 2
    line = capsys.readouterr().err
    assert re.search("No such option:? '?--no-such-option", line), "in typer's words, or those of an older one's click"
    words = command[: 2 if command[0] == "snapshot" else 1]
    assert line.endswith(f"(see tiermem {' '.join(words)} --help)\n")


SETTINGS = {
    "--host-memory": ("lots", "expected a size like '20GiB'"),
    "--device-memory": ("20G", "expected one of the units"),
    "--update": ("sideways", "expected one of 'backward', 'forward', 'step', 'auto', found 'sideways'"),
    "--param-dtype": ("int4", "expected one of 'float32', 'bfloat16', 'float16', found 'int4'"),
    "--moments": ("int4", "expected one of 'float32', 'int8', found 'int4'"),
    "--config": ("run.yaml", "expected a settings file ending in .toml or .json, found run.yaml"),
    "--batch": ("0", "Invalid value for --batch: expected a whole number from 1 to 1000000000, found '0' (see"),
    "--seq": ("1", "expected a whole number from 2 to 1000000000, found '1'"),
    "--accumulate": ("1.5", "expected a whole number from 1 to 1000000000, found '1.5'"),
}
NEVER = [
    *((command, option, *case) for command in (TRAIN, TUNE, PLAN) for option, case in SETTINGS.items()),
    *(
        (TRAIN, "--lr", value, f"expected a number from 0 to 1e+30, found {value!r}")
        for value in ("inf", "nan", "1e300")
    ),
    (TRAIN, "--lr", "-1", "expected a number from 0 to 1e+30, found '-1'"),
    (TRAIN, "--lr", "", "expected a number from 0 to 1e+30, found ''"),
    (PLAN, "--batch", "9" * 400, "expected a whole number from 1 to 1000000000, found '999"),
    (PLAN, "--ranks", "1000000001", "expected a whole number from 1 to 1000000000"),
    (TRAIN, "--steps", "9" * 5000, "expected a whole number from 1 to 1000000000, found '999"),
    (
        TRAIN,
        "--seed",
        str(2**64),
        "expected a whole number from 0 to 18446744073709551615, found '18446744073709551616'",
    ),
    (TRAIN, "--commit-every", "often", "expected a whole number from 0 to 1000000000, found 'often'"),
    (TUNE, "--steps", "-1", "expected a whole number from 0 to 1000000000, found '-1'"),
    (TUNE, "--best", "0", "expected a whole number from 1 to 1000000000, found '0'"),
    (PLAN, "--ranks", "0", "expected a whole number from 1 to 1000000000, found '0'"),
    (PLAN, "--copies", "nan", "expected a whole number from 1 to 1000000000, found 'nan'"),
    (TRAIN, "--lr", "fast", "expected a number from 0 to 1e+30, found 'fast'"),
    (TRAIN, "--endurance", "much", "expected an endurance like '600TB'"),
    (TUNE, "--output", "best.yaml", "expected a settings file ending in .toml or .json, found best.yaml"),
    (PLAN, "--plot", "plan.jpg", "expected a file ending in .png, .svg, .pdf, found 'plan.jpg'"),
    (PLAN, "--copies", "3", "keep 3 copies of the model"),
    (BENCH, "--plot", "sweep.gif", "expected a file ending in .png, .svg, .pdf"),
    (BENCH, "--size", "20G", "expected one of the units"),
    (BENCH, "--size", "100", "expected at least 4096 bytes, found '100'"),
    (BENCH, "--block-size", "big", "expected a size"),
    (BENCH, "--block-size", "0", "--block-size: expected a positive multiple of 4096 bytes, found '0'"),
    (BENCH, "--steady-bytes", "-1", "expected a size"),
    (BENCH, "--steady-seconds", "nan", "expected a number of seconds, 0 or more, found 'nan'"),
    (BENCH, "--seconds", "inf", "expected a positive number of seconds, found 'inf'"),
    (BENCH, "--backend", "rocket", "expected one of threads"),
    (BENCH, "--queue-depth", "0", "expected a whole number from 1 to 256, found '0'"),
    (EXPORT, "--max-shard-size", "0", "expected a positive size, found '0'"),
    (EXPORT, "--max-shard-size", "5X", "expected one of the units"),
    (RESHARD, "--ranks", "0", "expected a whole number from 1 to 65536, found '0'"),
]


@pytest.mark.parametrize(("command", "option", "value", "said"), NEVER)
def test_a_value_that_an_option_never_takes_is_wrong_usage(
    plain_core: Any, command: list[str], option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*command, option, value]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert option.strip("-").partition("-")[0] in captured.err
    assert captured.err.count("\n") == 1
    assert plain_core.runtimes == []
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("endurance", ["0.001DWPD/1y", "0.0001DWPD", "0.0001DWPD@2TB", "1B@1B"])
def test_an_endurance_that_some_drive_has_is_taken_however_little_it_is(plain_core: Any, endurance: str) -> None:
    """The number of bytes depends on the drives, which the command line does not know."""
    Path("text").write_text("a text to learn " * 100)
    arguments = ["--model", "llama-tiny", "--steps", "1", "--batch", "1", "--seq", "16", "--text", "text"]
    assert main.run([*TRAIN, *arguments, "--endurance", endurance]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan"], "expected one of MODEL, --model and --parameters"),
        (["plan", "llama-tiny", "--model", "llama-tiny"], "expected one of MODEL, --model and --parameters"),
        (["plan", "llama-tiny", "--parameters", "1B"], "expected one of MODEL, --model and --parameters"),
        (["plan", "--parameters", "lots"], "expected a number of parameters"),
        (["plan", "--parameters", "9" * 400], "expected a number of parameters"),
        (["plan", "99999"], "expected a model of 100,000 to 1,000T parameters, found 99999"),
        (["plan", "--model", "1e16"], "expected a model of 100,000 to 1,000T parameters"),
        (["train", "--resume"], "--resume needs the --swap-dir"),
        (["bench", "--dir", ".", "--dir", "."], "expected different ones"),
        *(
            (
                [command, "--swap-dir", ".", "--swap-dir", "./"],
                "expected different directories, found ., .; name each once",
            )
            for command in ("train", "tune", "plan", "doctor")
        ),
        (["bench", "--dir", ".", "--out", "a.png", "--plot", "./a.png"], "different files for --out and --plot"),
        (["bench"], "Missing option '--dir'"),
        (["snapshot", "export", "."], "Missing option '--to'"),
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 2
    assert said in capsys.readouterr().err


MISSING = ["--swap-dir", "/no/such/place"]


@pytest.mark.parametrize(
    "arguments",
    [
        *([*command, *MISSING] for command in (TRAIN, TUNE, ["plan", "llama-tiny"], DOCTOR)),
        *([*command, "--config", "missing.toml"] for command in (TRAIN, TUNE, PLAN)),
        *([command, "--model", "no-such-model"] for command in ("train", "tune", "plan")),
        [*PLAN, "--ranks", "12"],
        ["plan", "llama-tiny", "--machine", "no-such-profile"],
        ["bench", "--dir", "/no/such/place"],
        *([*command[:2], "/no/such/place", *command[3:]] for command in (LIST, VERIFY, EXPORT, RESHARD)),
    ],
    ids=" ".join,
)
def test_what_is_found_elsewhere_is_a_failure(
    plain_core: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("tiermem: ")


def test_the_instrument_without_torch_has_the_same_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--mebibytes", "0"], ["--mebibytes", "nan"], ["--seconds", "-1"]):
        assert measure([".", *more]) == 2
    with pytest.raises(SystemExit, match="2"):
        measure([".", "--no-such-option"])
    capsys.readouterr()
    assert measure(["/no/such/place", "--quick", "--mebibytes", "8"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("swap.bench: ")
