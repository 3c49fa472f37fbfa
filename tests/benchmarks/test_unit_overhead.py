"""The benchmark of the cost of a unit runs, quickly, trains as plain PyTorch does, and says where the time went."""

from __future__ import annotations

import json
from pathlib import Path

from doubles_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]


def test_it_runs_and_every_case_trains_alike(warm_python: WarmPython, tmp_path: Path) -> None:
    where = ["--directory", str(tmp_path), "--results", str(tmp_path / "results")]
    done = warm_python.run(str(ROOT / "benchmarks" / "unit_overhead.py"), "--quick", *where)
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
