"""The throttled search and the calibration both benchmarks rest on: what is pure, and the reason for skipping."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.planner.lines import Cores

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _benchmarks_are_found() -> Iterator[None]:
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_without_the_control_group_it_says_why_it_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = module("tune_throttled")
    monkeypatch.setattr(script, "GROUPS", tmp_path / "none")
    assert script.main(["--quick", "--directory", str(tmp_path)]) == 0
    assert "skipped: " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_settings_of_a_plan_are_those_of_a_configuration(tmp_path: Path) -> None:
    from tiermem import Config
    from tiermem.planner.design import PlanSettings

    settings = PlanSettings(host_memory=64 << 20, update="backward", tile_nbytes=2 << 20, queue_depth=4)
    config = Config(swap_dirs=[tmp_path], **module("tune_throttled").configured(settings, "bfloat16"))
    assert (config.update, config.queue_depth, config.tile_nbytes) == ("backward", 4, 2 << 20)
    assert config.look_ahead_nbytes is None


@given(
    alone=st.tuples(st.floats(0.1, 9.0), st.floats(0.1, 9.0)),
    slower=st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 3.0)),
)
def test_how_much_two_works_slow_each_other_is_found_again(
    alone: tuple[float, float], slower: tuple[float, float]
) -> None:
    # The model of `planner.lines.Cores` run forwards, both from the start; then what was measured of it, backwards.
    cores, moment, ended = Cores((*slower, 0.0), lambda: False), 0.0, [0.0, 0.0]
    cores.compute(alone[0], lambda: ended.__setitem__(0, moment))
    cores.update(alone[1], lambda: ended.__setitem__(1, moment))
    while cores.computing or cores.updating:
        seconds = cores.next_end()
        moment += seconds
        cores.advance(seconds)
    shared = min(ended)
    beside = module("calibration").beside
    assert beside(alone[0], ended[0], shared) == pytest.approx(slower[0], abs=1e-3)
    assert beside(alone[1], ended[1], shared) == pytest.approx(slower[1], abs=1e-3)
