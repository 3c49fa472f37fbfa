"""The pictures of the documentation can be drawn again from the committed results."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from doubles_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]
Drawn = Callable[[str], Path]
RESULTS = ROOT / "benchmarks" / "results"
WITH_PLOTS = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture(scope="module")
def drawn(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """All pictures, drawn by one process from the committed results and one made up; gives the one of a name.

    Importing matplotlib takes longer than drawing.
    """
    results = tmp_path_factory.mktemp("results")
    for pattern in ("live_view_*.json", "goals_*.json"):
        for result in RESULTS.glob(pattern):
            (results / result.name).symlink_to(result)
    one = {"workload": "io-bound", "error": None, "baseline_rss_bytes": 1 << 20, "peak_rss_bytes": 9 << 20}
    runs = [{**one, "contender": name, "seconds": [1.0, 2.0, 4.0]} for name in ("plain", "auto", "fio")]
    runs.append({"workload": "io-bound", "contender": "deepspeed nvme", "error": "it died"})
    (results / "goals_made_up_2999-01-01.json").write_text(
        json.dumps(dict.fromkeys(("compute", "drive", "batches"), runs))
    )
    (results / "goals_unfinished_2999-01-02.json").write_text(json.dumps({"drive": runs}))
    program = str(ROOT / "benchmarks" / "pictures.py")
    places = ("--results", str(results), "--pictures", str(results / "pictures"))
    done = warm_python.run(program, *places, "--parameters", "300M")  # a small model's plan is soon foreseen
    assert done.returncode == 0, done.stderr

    def picture(name: str) -> Path:
        if not WITH_PLOTS and name != "live_view.svg":
            assert "the others: skipped" in done.stdout
            pytest.skip("needs the extra `plots`")
        assert "skipped" not in done.stdout
        assert f"{name} from " in done.stdout
        assert name != "side_by_side.png" or f"{name} from goals_made_up_2999-01-01.json" in done.stdout
        return results / "pictures" / name

    return picture


def test_the_committed_live_view_is_the_one_that_is_drawn(drawn: Drawn) -> None:
    text_of = lambda path: "".join(ET.fromstring(path.read_text()).itertext())
    text = text_of(drawn("live_view.svg")).replace("\N{NO-BREAK SPACE}", " ")
    (result,) = RESULTS.glob("live_view_*.json")
    step = json.loads(result.read_text())["steps"][-1]
    assert f"{step['loss']:.4f}" in text
    assert "swap->host" in text
    committed = text_of(ROOT / "docs" / "pictures" / "live_view.svg")
    assert committed.replace("\N{NO-BREAK SPACE}", " ") == text


@pytest.mark.parametrize("name", ["plan.png", "side_by_side.png"])
def test_plans_and_contenders_become_pictures_or_the_extra_is_named(drawn: Drawn, name: str) -> None:
    assert drawn(name).read_bytes().startswith(b"\x89PNG")
