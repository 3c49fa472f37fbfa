"""`tiermem bench`: the contract of its JSON, its refusals, its manners."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
from pathlib import Path

import pytest
from doubles_python import WarmPython
from rich.console import Console

from tiermem.cli import main
from tiermem.cli.bench import BenchProgress
from tiermem.cli.bench_plot import draw, lines
from tiermem.cli.copies import measure_copies
from tiermem.cli.disk import require_drawable
from tiermem.errors import ConfigError

QUICK = ["--size", "8MiB", "--seconds", "0.05", "--block-size", "1MiB", "--queue-depth", "2"]
FIGURES = {"gigabytes_per_second", "cpu_cores", "backend", "block_size", "queue_depth", "latency_ms"}


def test_the_json_is_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    swap_dir = tmp_path / "drive"
    swap_dir.mkdir()
    assert main.run(["bench", "--dir", str(swap_dir), *QUICK, "--json", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    for pattern in ("read", "write", "mixed"):
        assert found[pattern]["best"].keys() >= FIGURES
        assert found[pattern]["best"]["latency_ms"].keys() >= {"p50", "p99"}
        assert {one["backend"] for one in found[pattern]["all"]} == {"threads", "aiofiles", "inline"}
    assert found == json.loads(out.read_text())
    assert found["copy"].keys() in ({"skipped"}, {"device", "bytes", "gigabytes_per_second"})
    assert printed.err.startswith("about ")
    assert list(swap_dir.iterdir()) == []


@pytest.mark.parametrize("columns", [80, 40])
def test_the_table_fits_a_narrow_terminal_or_is_whole(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main.run(["bench", "--dir", str(tmp_path), *QUICK, "--quick"]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if " threads " in line]
    assert len(rows) == 3
    assert "…" not in printed
    assert "overwrite" in printed


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--dir", "{}/none"], 1, "create the directory first"),
        (["--dir", "{}", "--size", "1024TiB"], 1, "bytes, "),
        (["--dir", "{}", "--backend", "uring"], 2, "expected one of threads, aiofiles, inline"),
        (["--dir", "{}", "--size", "1MiB", "--block-size", "8MiB"], 2, "at least one block"),
        (["--dir", "{}", "--size", "100"], 2, "expected at least 4096 bytes, found '100'"),
        (["--dir", "{}", "--size", "20G"], 2, "expected one of the units"),
        (["--size", "1MiB"], 2, "--dir"),
        (["--dir", "{}", "--size", "8MiB", "--plot", "{}/picture.txt"], 2, "--plot"),
        (["--dir", "{}", "--size", "8MiB", "--out", "{}/none/out.json"], 1, "none is not a directory; make it first"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert main.run(["bench", *(argument.format(tmp_path) for argument in arguments)]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert message in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_what_was_measured_is_printed_though_it_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = ["--json", "--out", "/dev/full"]
    assert main.run(["bench", "--dir", str(tmp_path), *QUICK, "--quick", *full]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out).keys() >= {"read", "write", "mixed"}
    assert printed.err.splitlines()[-1].startswith("tiermem: ")
    assert "No space left" in printed.err


def test_ctrl_c_in_the_command_leaves_no_file(warm_python: WarmPython, tmp_path: Path) -> None:
    words = ["bench", "--dir", str(tmp_path), "--size", "16MiB", "--seconds", "600"]
    command = [warm_python.path, "-m", "tiermem", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if line.strip() == "read":
                break
        child.send_signal(signal.SIGINT)
        rest = child.stderr.read()
        assert child.wait(60) == 130
    assert rest.splitlines()[-1] == "tiermem: interrupted"
    assert list(tmp_path.iterdir()) == []


def test_the_bar_advances_by_what_was_announced() -> None:
    console = Console(record=True, force_terminal=True, width=100)
    with BenchProgress(console, 10.0) as progress:
        progress.begins("first write in /d[a]", 4.0)
        progress.begins("read, threads", 6.0)
        assert progress.bar.tasks[0].completed == 4.0
    drawn = console.export_text()
    assert "first write in /d[a]" in drawn
    assert "read, threads" in drawn


def test_copies_say_why_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert measure_copies() == {"skipped": "torch finds no CUDA device"}


def _measurement(depth: int, *, direct: bool = True) -> dict[str, object]:
    return {
        "backend": "threads", "block_size": 1 << 20, "queue_depth": depth, "direct": direct,
        "gigabytes_per_second": 1.0, "latency_ms": {"p99": 2.0},
    }  # fmt: skip


def test_a_picture_has_a_line_for_each_block_size_and_way() -> None:
    found = lines([_measurement(8), _measurement(4), _measurement(8, direct=False)])
    assert {name: [one["queue_depth"] for one in points] for name, points in found.items()} == {
        "threads 1 MiB": [4, 8],
        "threads 1 MiB, buffered": [8],
    }


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tiermem\[plots\]'"):
        require_drawable(tmp_path / "a.png")


def test_a_place_for_the_picture_that_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"ending in \.png, \.svg, \.pdf"):
        require_drawable(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match="not a directory"):
        require_drawable(tmp_path / "none" / "a.png")
    (tmp_path / "a.png").mkdir()
    with pytest.raises(ConfigError, match="found the directory"):
        require_drawable(tmp_path / "a.png")


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    sweep = {"all": [_measurement(4), _measurement(8), _measurement(8, direct=False)]}
    draw({"directories": ["/d"], "read": sweep, "write": sweep, "mixed": sweep}, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
