"""The benchmark of all goals runs, quickly, and its figures are medians of ratios within a block."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doubles_python import WarmPython

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import common
import goals
import memory_group

ROOT = Path(__file__).resolve().parents[2]


def runs_of(contender: str, blocks: list[list[float]]) -> list[dict[str, Any]]:
    """Records of a contender, as `train_step.py` makes them."""
    return [
        {"workload": "io-bound-eighth", "contender": contender, "round": number, "error": None, "seconds": seconds}
        for number, seconds in enumerate(blocks)
    ]


def test_a_figure_is_the_median_of_ratios_within_a_block() -> None:
    runs = runs_of("vertical", [[1.0, 1.0], [3.0, 3.0], [2.0, 2.0]])
    runs += runs_of("accumulated", [[10.0, 10.0], [6.0, 6.0], [5.0, 5.0]])
    (line,) = [figure.line() for figure in goals.figures({"batches": runs}) if "vertical" in figure.what]
    assert line.endswith("| <= 0.4 | 0.40 (0.10 to 0.50) | yes |")


def test_what_failed_or_was_left_out_is_not_measured() -> None:
    failed = [{"workload": "io-bound-eighth", "contender": "vertical", "round": 0, "error": "exit code 1"}]
    found = goals.figures({"batches": failed + runs_of("accumulated", [[1.0]])})
    assert all(figure.line().endswith("| not measured | |") for figure in found)


@pytest.mark.parametrize(("value", "said"), [(1.05, "yes"), (1.054, "yes"), (1.056, "no")])
def test_a_goal_is_judged_by_the_figure_that_is_shown(value: float, said: str) -> None:
    figure = goals.Figure("a step / plain", "<= 1.05", least=False, bound=1.05, values=[value])
    assert figure.line().endswith(f"| {said} |")


def test_parts_that_are_run_one_by_one_join_in_one_result(warm_python: WarmPython, tmp_path: Path) -> None:
    where = ["--quick", "--directory", str(tmp_path), "--results", str(tmp_path / "results")]
    for part in ("batches", "memory"):
        done = warm_python.run(str(ROOT / "benchmarks" / "goals.py"), "--part", part, *where)
        assert done.returncode == 0, done.stderr + done.stdout
    (markdown,) = (tmp_path / "results").glob("goals_*.md")
    text = markdown.read_text()
    raw = json.loads(markdown.with_suffix(".json").read_text())
    assert {run["contender"] for run in raw["batches"]} == {"accumulated", "vertical"}
    for name in ("accumulated", "vertical"):
        runs = [run for run in raw["batches"] if run["contender"] == name]
        assert [len(run["seconds"]) for run in runs] == [2] * 5, "in turns there are five blocks of two steps"
        assert len(runs[0]["losses"]) == 1 + 5 * 3
    assert "ZeRO-Infinity / `auto` | >= 2.0 | not measured | |" in text
    assert [command.split()[3] for command in raw["commands"]] == ["batches", "memory"]
    reason = memory_group.why_not()
    if reason is None:
        assert raw["memory"]["state_bytes"] / raw["memory"]["limit"] < 16
        assert raw["memory"]["steps"][2]["loss"] < raw["memory"]["steps"][0]["loss"]
    else:
        assert reason in text


def test_why_no_limit_can_be_set_is_said_in_the_same_words_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user who is not root; the reason is compared with another process's."""

    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(memory_group, "groups_root", lambda: Path("/sys/fs/cgroup"))
    monkeypatch.setattr(Path, "mkdir", refuse)
    reasons = {memory_group.why_not() for _ in range(2)}
    assert reasons == {"no memory limit can be set here: Permission denied in /sys/fs/cgroup"}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_changed_result_is_not_another_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the second part would not join the first, whose result it finds changed."""
    here = tmp_path / "benchmarks"
    (here / "results").mkdir(parents=True)
    monkeypatch.setattr(common, "HERE", here)
    for name in ("results/goals.json", "goals.py"):
        (here / name).write_text("one")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    committed = common.revision()
    assert committed != "unknown"
    (here / "results" / "goals.json").write_text("two")
    assert common.revision() == committed
    (here / "goals.py").write_text("two")
    assert common.revision() == f"{committed} with changes"
