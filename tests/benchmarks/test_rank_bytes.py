"""The table of bytes per rank is ZeRO's arithmetic and the padding of small units."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_what_ranks_keep_in_each_stage(tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    command = [sys.executable, str(ROOT / "benchmarks" / "rank_bytes.py"), "--quick", "--output", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120, capture_output=True)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.read_text().splitlines() if "|" in line]
    assert [row[:2] for row in rows[2:]] == [[ranks, stage] for ranks in "12" for stage in "123"]
    assert all(0.999 <= float(row[-1]) < 1.05 for row in rows[2:])
    together = [int(row[5].replace(",", "")) for row in rows[2:]]
    assert together[0] == together[1] == together[2] > together[3] > together[4] > together[5]
    assert len(json.loads(out.with_suffix(".json").read_text())) == 6
