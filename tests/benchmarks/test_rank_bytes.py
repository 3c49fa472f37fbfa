"""The table of bytes per rank: quick, with one rank, it is ZeRO's arithmetic and the padding of a few units."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_one_rank_keeps_everything_in_every_stage(tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    command = [sys.executable, str(ROOT / "benchmarks" / "rank_bytes.py"), "--quick", "--output", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120, capture_output=True)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.read_text().splitlines() if "|" in line]
    assert [row[:2] for row in rows[2:]] == [["1", "1"], ["1", "2"], ["1", "3"]]
    assert all(1.0 <= float(row[-1]) < 1.05 for row in rows[2:])
    assert len(json.loads(out.with_suffix(".json").read_text())) == 3
