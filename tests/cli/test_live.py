"""The live view shows what the report holds, and gives way where there is no terminal."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tiermem.cli import main, progress
from tiermem.cli.live import WIDTH, render, spark
from tiermem.cli.progress import TrainProgress
from tiermem.cli.report import StepReport
from tiermem.cli.scalars import add_step, open_scalars
from tiermem.errors import ConfigError
from tiermem.stats import EdgeStatistics, TierStatistics

GIB = 1 << 30


def step(number: int, loss: float = 2.5) -> StepReport:
    edges = (
        EdgeStatistics("swap->host", 3 * 10**9, 12, 1.5),
        EdgeStatistics("host->device", 10**9, 4, 0.5),
    )
    return StepReport(
        loss=loss, seconds=2.0, stall_seconds=0.5, bytes_read=3 * 10**9, bytes_written=0, tokens=4096, number=number,
        edges=edges,
    )  # fmt: skip


TIERS = (TierStatistics("SWAP", 8 * GIB, 6 * GIB, 7 * GIB), TierStatistics("HOST", GIB, GIB // 4, GIB))


def picture(steps: list[StepReport], tiers: tuple[TierStatistics, ...] = TIERS) -> str:
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(render(steps, total=20, tiers=tiers, memory="memory 1.00 GiB"))
    return console.export_text()


def test_the_view_has_every_figure() -> None:
    text = picture([step(7, 3.0), step(8, 2.5)])
    for expected in (
        "step 8/20", "0:00:24 left", "2.5000", "2,048", "25 %", "swap->host", "1.50 GB/s", "host->device", "0.50 GB/s",
        "busy 75 %", "SWAP", "75 %", "HOST", "at most 1.00 GiB", "memory 1.00 GiB",
    ):  # fmt: skip
        assert expected in text
    assert "25 %" in next(line for line in text.splitlines() if "HOST" in line)
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_minute_has_sixty_seconds() -> None:
    almost = dataclasses.replace(step(19), seconds=59.7)
    assert "0:01:00 left" in picture([almost])
    assert "2:46:40 left" in picture([dataclasses.replace(step(19), seconds=10_000.0)])


def test_what_is_left_takes_what_most_steps_took() -> None:
    assert "0:00:22 left" in picture([step(7), step(8), dataclasses.replace(step(9), seconds=500.0)])


def test_no_bar_is_longer_than_full_and_no_curve_than_the_last_steps() -> None:
    busy = (EdgeStatistics("swap->host", 1, 1, 2.5),)  # one transfer began in the step before
    steps = [dataclasses.replace(step(number), edges=busy, loss=float(number)) for number in range(40)]
    text = picture(steps, (TierStatistics("HOST", GIB, 2 * GIB, GIB), TierStatistics("DEVICE", 0, 0, 0)))
    assert "busy 100 %" in text
    bars = {line.split()[1]: line.count("━") for line in text.splitlines() if "━" in line}
    assert bars["HOST"] == bars["swap->host"] == 24
    assert "0 %" in next(line for line in text.splitlines() if "DEVICE" in line)
    curves = [sum(map(line.count, "▁▂▃▄▅▆▇█")) for line in text.splitlines()]
    assert [count for count in curves if count] == [30, 30, 30]


def test_before_the_first_step_there_is_a_view_too() -> None:
    text = picture([], ())
    assert "20 steps" in text, "how many of them are committed already nobody has said"
    assert "first step" in text
    assert "━" not in text, "a bar that is empty"
    assert "loss" not in text


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([0.0, 7.0, 3.0], "▁█▄"),
        ([float("nan"), 1.0, float("inf"), 2.0], " ▁ █"),
    ],
)
def test_a_curve_in_one_line(values: list[float], drawn: str) -> None:
    assert spark(values) == drawn


def test_a_terminal_gets_the_view_and_a_file_gets_lines() -> None:
    for terminal in (True, False):
        written = io.StringIO()
        console = Console(file=written, force_terminal=terminal, width=120)
        with TrainProgress(console, steps=2, host_memory=GIB, baseline=0, state_bytes=16 * GIB) as shown:
            assert ("first step" in written.getvalue()) == terminal
            shown.step_done(step(1), TIERS)
            shown.step_done(step(2), TIERS)
        assert ("─ tiermem" in written.getvalue()) == terminal
        assert ("tok/s" in written.getvalue()) != terminal
        assert ("step 2/2" in written.getvalue()) or terminal
        assert shown.live is None or not shown.live.is_started


def test_lines_come_now_and_then_and_behind_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 9.0, 10.0, 12.0, 13.0])
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: next(seconds)))
    written = io.StringIO()
    console = Console(file=written, width=120)
    with TrainProgress(console, steps=5, host_memory=GIB, baseline=1 << 60, state_bytes=16 * GIB) as shown:
        for number in range(1, 6):
            shown.step_done(step(number))
    lines = written.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/5", "3/5", "5/5"]
    assert all("memory 0 B (budget 1.00 GiB, plain 16.00 GiB)" in line for line in lines), "not less than nothing"


class Curves:
    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.points: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.points.append((tag, scalar_value, global_step))

    def close(self) -> None:
        self.closed = True


def test_scalars_are_named_points_over_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Curves  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    with open_scalars(tmp_path) as writer:
        assert isinstance(writer, Curves)
        add_step(writer, step(3))
    assert writer.directory == str(tmp_path)
    assert writer.closed
    assert ("loss", 2.5, 3) in writer.points
    assert ("gigabytes per second/host->device", 0.5, 3) in writer.points
    with open_scalars(None) as none:
        assert none is None


def test_without_tensorboard_the_extra_is_named_before_training(
    plain_core: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    arguments = ["train", "--tensorboard", str(tmp_path), "--swap-dir", str(tmp_path), "--steps", "1"]
    assert main.run(arguments) == 1
    assert "pip install 'tiermem[tensorboard]'" in capsys.readouterr().err
    assert plain_core.runtimes == []
    with pytest.raises(ConfigError), open_scalars(tmp_path):
        pass


def _train(tmp_path: Path, *more: str) -> int:
    quick = ["--model", "llama-tiny", "--steps", "2", "--batch", "1", "--seq", "16", "--host-memory", "64MiB"]
    return main.run(["train", *quick, "--swap-dir", str(tmp_path), *more])


def test_wear_tiers_and_overlap_are_in_the_json(
    plain_core: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(tmp_path, "--json", "--endurance", "1DWPD@1TB") == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["number"] for one in report["steps"]] == [1, 2]
    assert report["steps"][0]["edges"][0]["name"] == "swap->host"
    seconds = sum(one["seconds"] for one in report["steps"])
    assert report["wear"]["bytes_per_day"] == pytest.approx(40 / seconds * 86_400)
    assert report["wear"]["life_days"] == pytest.approx(1e12 * 365 * 5 / report["wear"]["bytes_per_day"])
    assert report["tiers"][0]["name"] == "HOST"
    assert report["overlap"]["steps"] == 0


def test_wear_and_report_are_said_at_the_end(
    plain_core: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert _train(tmp_path, "--report", "--endurance", "600TB") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "wear of the drives" in printed
    assert "drive writes per day; the drives last" in printed
    assert "the timeline holds no whole step" in printed


def test_an_endurance_that_means_nothing_is_refused_first(
    plain_core: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(tmp_path, "--endurance", "forever") == 2
    assert "forever" in capsys.readouterr().err
    assert plain_core.runtimes == []
