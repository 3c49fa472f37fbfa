"""The convergence benchmark runs, quickly, and its result holds both curves."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from doubles_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]


def test_the_result_holds_both_curves(warm_python: WarmPython, tmp_path: Path) -> None:
    done = warm_python.run(str(ROOT / "benchmarks" / "int8_convergence.py"), "--quick", "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (raw,) = tmp_path.glob("int8_convergence_*.json")
    losses = json.loads(raw.read_text())["losses"]
    assert [len(losses[name]) for name in ("float32", "int8")] == [6, 6]
    assert losses["float32"][0] == losses["int8"][0]
    assert losses["float32"][1:] != losses["int8"][1:]
    assert all(abs(a - b) < 0.05 for a, b in zip(losses["float32"], losses["int8"], strict=True))
    text = raw.with_suffix(".md").read_text()
    for word in ("cores", "torch", "int8_convergence.py --quick", "mean of the last"):
        assert word in text
    assert raw.with_suffix(".svg").exists() == (importlib.util.find_spec("matplotlib") is not None)
