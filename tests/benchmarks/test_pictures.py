"""The pictures of the documentation can be drawn again from the committed results."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from doubles_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]
Draw = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def draw(warm_python: WarmPython) -> Draw:
    return partial(warm_python.run, str(ROOT / "benchmarks" / "pictures.py"))


def test_the_committed_live_view_is_the_one_that_is_drawn(draw: Draw, tmp_path: Path) -> None:
    done = draw("--pictures", str(tmp_path))
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / "live_view.svg").read_text()
    ET.fromstring(drawn)
    (result,) = (ROOT / "benchmarks" / "results").glob("live_view_*.json")
    step = json.loads(result.read_text())["steps"][-1]
    text = "".join(ET.fromstring(drawn).itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert f"{step['loss']:.4f}" in text
    assert "swap->host" in text
    committed = (ROOT / "docs" / "pictures" / "live_view.svg").read_text()
    assert "".join(ET.fromstring(committed).itertext()).replace("\N{NO-BREAK SPACE}", " ") == text
    if importlib.util.find_spec("matplotlib") is not None:
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_becomes_a_picture_or_the_extra_is_named(draw: Draw, tmp_path: Path) -> None:
    one = {
        "backend": "threads", "block_size": 1 << 20, "queue_depth": 8, "direct": True,
        "gigabytes_per_second": 1.0, "latency_ms": {"p99": 2.0},
    }  # fmt: skip
    sweep = {"directories": ["/d"], **{pattern: {"all": [one]} for pattern in ("read", "write", "mixed")}}
    (tmp_path / "bench_x.json").write_text(json.dumps(sweep))
    done = draw("--results", str(tmp_path), "--pictures", str(tmp_path / "pictures"))
    if "skipped" in done.stdout:
        assert done.returncode == 1
        pytest.skip("needs the extra `plots`")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pictures" / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_contenders_beside_each_other_become_a_picture(draw: Draw, tmp_path: Path) -> None:
    one = {"workload": "io-bound", "error": None, "baseline_rss_bytes": 1 << 20, "peak_rss_bytes": 9 << 20}
    runs = [{**one, "contender": name, "seconds": [1.0, 2.0, 4.0]} for name in ("plain", "tiermem x=1", "fio")]
    runs.append({"workload": "io-bound", "contender": "deepspeed nvme", "error": "it died"})
    (tmp_path / "train_step_side_by_side_x.json").write_text(json.dumps({"runs": runs}))
    done = draw("--results", str(tmp_path), "--pictures", str(tmp_path / "pictures"))
    if "skipped" in done.stdout:
        pytest.skip("needs the extra `plots`")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pictures" / "side_by_side.png").read_bytes().startswith(b"\x89PNG")
