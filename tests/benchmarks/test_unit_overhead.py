"""The benchmark of the cost of a unit runs, quickly, trains as plain PyTorch does, and says where the time went."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_runs_and_every_case_trains_alike(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "unit_overhead.py"), "--quick"]
    command += ["--directory", str(tmp_path), "--results", str(tmp_path / "results")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    (markdown,) = (tmp_path / "results").glob("unit_overhead_*.md")
    for word in ("cores", "torch", "date: 20", "--quick", "| cached | 4 |", "| paged | 12 |", "pager CPU"):
        assert word in markdown.read_text()
    runs = json.loads(markdown.with_suffix(".json").read_text())["runs"]
    assert {(run["case"], run["units"]) for run in runs} == {
        (case, units) for case in ("plain", "cached", "paged") for units in (4, 12)
    }
    for run in runs:
        assert len(run["seconds"]) == 3
        assert run["losses"] == next(other["losses"] for other in runs if other["units"] == run["units"])
        assert run["threads"].keys() >= ({"compute"} if run["case"] == "plain" else {"compute", "pager", "update"})
        assert run["threads"]["compute"]["cpu_seconds"] > 0
