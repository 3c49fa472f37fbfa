"""The throttled search and the calibration both benchmarks rest on: what is pure, and the reason for skipping."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

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
