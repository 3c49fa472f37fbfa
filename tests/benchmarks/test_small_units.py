"""The benchmark of small units runs, and larger units reserve more."""

from __future__ import annotations

from pathlib import Path

from doubles_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]


def test_quick(warm_python: WarmPython, tmp_path: Path) -> None:
    done = warm_python.run(str(ROOT / "benchmarks" / "small_units.py"), "--quick", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line][2:]
    assert [row[:2] for row in rows] == [["1,088", "1"], ["1,088", "4"], ["1,088", "8"]]
    assert all(float(row[2]) > 0 for row in rows)
    assert rows[0][3] == "1.00"
    assert list(tmp_path.iterdir()) == []
