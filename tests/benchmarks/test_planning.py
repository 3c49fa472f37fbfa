"""The benchmarks of the planner run, quickly, and say what they counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doubles_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]
# The script as a program, in a process where what is measured for a plan is little (`tests/cli/conftest.py`): steps,
# layers and tiles, and how finely the cost of moving bytes is looked for.
LITTLE = """
import runpy, sys
from tiermem.cli import measure, measure_training, measure_workload
measure._TILES, measure_training._HALVINGS = 1, 1
measure_workload._ALONE, measure_workload._PAGED, measure_workload._MOST_LAYERS = 1, 2, 8
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("script", "words", "rows"),
    [
        ("prediction", ("configurations within 10 %", "| measured s | predicted s | error |"), 2),
        ("cache_by_plan", ("least possible", "| read / LRU |"), 2),
        ("auto_rules", ("simulated cases paged", "| rule |"), 2),
        ("planning", ("64 GPUs", "| processor s |"), 6),
    ],
)
def test_quick(script: str, words: tuple[str, ...], rows: int, warm_python: WarmPython, tmp_path: Path) -> None:
    program = str(ROOT / "benchmarks" / f"{script}.py")
    done = warm_python.run("-c", LITTLE, program, "--quick", "--results", str(tmp_path / "results"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (markdown,) = (tmp_path / "results").glob(f"{script}_*.md")
    for word in (*words, "cores", "torch", "date: 20"):
        assert word in markdown.read_text()
    assert len(json.loads(markdown.with_suffix(".json").read_text())["rows"]) == rows
    assert [path.name for path in tmp_path.iterdir()] == ["results"], "nothing else is left"
