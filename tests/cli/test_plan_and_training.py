"""What `tiermem plan` says beside what `tiermem train` does with the same model, budget and options."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tiermem.cli import machines
from tiermem.cli.measure import measure_machine
from tiermem.cli.modelwork import model_workload
from tiermem.cli.presets import find_model
from tiermem.config import Config

BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "is_decoder": True,
}


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    quick = functools.partial(measure_machine, seconds=0.001, drive_seconds=0.01, nbytes=64 << 20)
    monkeypatch.setattr(machines, "measure_machine", quick)
    (tmp_path / "text").write_text("a text to learn " * 100)
    (tmp_path / "swap").mkdir()


def a_model(**values: Any) -> str:
    Path("config.json").write_text(json.dumps(values))
    return "."


@pytest.mark.parametrize("kind", ["bert", "roberta", "bert-generation"])
def test_units_inside_the_module_of_another_are_used(kind: str) -> None:
    """The output layer of these, where it is not tied, is below a module that has parameters of its own."""
    model = find_model(a_model(model_type=kind, tie_word_embeddings=False, **BERT), vocabulary=0)
    work = model_workload(
        model, kind, batch=2, seq=16, batches=1, settings=Config(host_memory="64KiB", swap_dirs=["."])
    )
    used = {access.unit for access in work.order}
    assert [unit.name for number, unit in enumerate(work.units) if number not in used] == []
