"""The table of bytes per rank is ZeRO's arithmetic and the padding of small units."""

from __future__ import annotations

import json
from pathlib import Path

from doubles_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]


def test_what_ranks_keep_in_each_stage(warm_python: WarmPython, tmp_path: Path) -> None:
    results, script = tmp_path / "results", str(ROOT / "benchmarks" / "rank_bytes.py")
    done = warm_python.run(script, "--quick", "--results", str(results), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (out,) = results.glob("rank_bytes_*.md")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.read_text().splitlines() if "|" in line]
    assert [row[:2] for row in rows[2:]] == [[ranks, stage] for ranks in "12" for stage in "123"]
    assert all(0.999 <= float(row[-1]) < 1.05 for row in rows[2:])
    together = [int(row[5].replace(",", "")) for row in rows[2:]]
    assert together[0] == together[1] == together[2] > together[3] > together[4] > together[5]
    assert len(json.loads(out.with_suffix(".json").read_text())["worlds"]) == 6
