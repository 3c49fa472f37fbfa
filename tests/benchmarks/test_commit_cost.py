"""The benchmark of commits runs, quickly, and compares two runs that train alike."""

from __future__ import annotations

import json
from pathlib import Path

from doubles_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]


def test_both_runs_train_alike_and_the_result_says_what_was_measured(warm_python: WarmPython, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.json"  # a round measured before, which counts too
    moved = {"drive_bytes_read": [1] * 5, "drive_bytes_written": [1] * 5}
    before = [
        {"round": 0, "contender": name, "error": None, "seconds": [seconds] * 5, **moved}
        for name, seconds in (("without commits", 4.0), ("a commit every step", 4.1))
    ]
    earlier.write_text(json.dumps({"runs": before}))
    command = [str(ROOT / "benchmarks" / "commit_cost.py"), "--quick", "--add", str(earlier)]
    done = warm_python.run(*command, "--directory", str(tmp_path), "--results", str(tmp_path / "results"))
    assert done.returncode == 0, done.stderr + done.stdout
    (markdown,) = (tmp_path / "results").glob("commit_cost_*.md")
    for word in ("cores", "torch", "date: 20", "--quick", "| without commits |", "| a commit every step |"):
        assert word in markdown.read_text()
    runs = json.loads(markdown.with_suffix(".json").read_text())["runs"]
    assert runs[:2] == before
    assert [run["round"] for run in runs[2:]] == [1, 1]
    committing, without = runs[2:]  # the order of the second round
    assert (without["contender"], committing["contender"]) == ("without commits", "a commit every step")
    assert without["losses"] == committing["losses"]
    assert len(without["seconds"]) == len(committing["seconds"]) == 5
