"""The benchmark of small units runs, and coalesced ones are fewer."""

from __future__ import annotations

from pathlib import Path

from doubles_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]


def test_quick(warm_python: WarmPython, tmp_path: Path) -> None:
    done = warm_python.run(str(ROOT / "benchmarks" / "small_units.py"), "--quick", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line][2:]
    assert [row[1:3] for row in rows] == [["none", "8"], ["auto", "1"]] * 2
    assert [row[0] for row in rows[::2]] == ["tower 8x16, 1 rank, cached", "tower 8x16, 2 ranks, cached"]
    assert all(float(row[3]) > 0 for row in rows)
    assert [row[4] for row in rows[::2]] == ["1.00", "1.00"]
    assert list(tmp_path.iterdir()) == []
