"""The benchmark of small units runs, and larger units reserve more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_quick(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "small_units.py"), "--quick"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=True, timeout=200, capture_output=True, text=True
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line][2:]
    assert [row[:2] for row in rows] == [["1,088", "1"], ["1,088", "4"], ["1,088", "8"]]
    assert all(float(row[2]) > 0 for row in rows)
    assert rows[0][3] == "1.00"
    assert list(tmp_path.iterdir()) == []
