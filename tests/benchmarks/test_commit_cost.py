"""The benchmark of commits runs, quickly, and compares two runs that train alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_both_runs_train_alike_and_the_result_says_what_was_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "commit_cost.py"), "--quick"]
    command += ["--directory", str(tmp_path), "--results", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    (markdown,) = (tmp_path / "results").glob("commit_cost_*.md")
    for word in ("cores", "torch", "date: 20", "--quick", "| without commits |", "| a commit every step |"):
        assert word in markdown.read_text()
    without, committing = json.loads(markdown.with_suffix(".json").read_text())["runs"]
    assert without["losses"] == committing["losses"]
    assert len(without["seconds"]) == len(committing["seconds"]) == 5
