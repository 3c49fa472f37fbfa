"""Random number generators: what a commit keeps of them comes back, or is refused before anything is opened."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles_commit import Training, make_config

import tiermem
from swap.manifest import pack, parse
from tiermem.runtime import randomness


@pytest.fixture(params=["MT19937", "PCG64", "Philox", "SFC64"])
def generator(request: pytest.FixtureRequest) -> Iterator[str]:
    """A generator of numpy's behind its global functions."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(getattr(np.random, request.param)(7))
    yield request.param
    np.random.set_bit_generator(before)


def drawn() -> list[Any]:
    return [random.random(), *np.random.rand(3), np.random.randint(9), np.random.randn(), *torch.rand(3).tolist()]


@pytest.mark.usefixtures("generator")
def test_all_go_on_where_they_were() -> None:
    random.gauss(0.0, 1.0), np.random.randn()  # each keeps a second one
    states = json.loads(json.dumps(randomness.capture()))
    expected = drawn()
    assert drawn() != expected
    randomness.restore(states)
    assert drawn() == expected


@pytest.mark.parametrize(
    "damage",
    [
        {"torch": "00"},
        {"python": [3, [1], None]},
        {"python": [9, [], None]},
        {"numpy": ["PCG64", "", 0, 0, 0.0]},
        {"numpy": {"bit_generator": "PCG64"}},
        {"numpy": None},
        {"python": [3, [1 << 70] * 625, None]},
        {"torch": None},
    ],
)
def test_states_that_do_not_fit_change_nothing(damage: dict[str, Any]) -> None:
    other = randomness.capture()
    drawn()
    before = randomness.capture()
    for use in (randomness.restore, randomness.require_restorable):
        with pytest.raises(tiermem.ResumeError, match="random number generators cannot be restored"):
            use(other | damage)
        assert randomness.capture() == before
    randomness.require_restorable(other)
    randomness.require_restorable(None)
    assert randomness.capture() == before


def test_a_run_whose_generators_cannot_go_on_is_refused_before_anything_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(make_config(tmp_path))
    training.commit().wait()
    training.close()
    (path,) = tmp_path.glob("*.manifest")
    manifest = parse(path.read_bytes(), "x")
    manifest.user["random"]["torch"] = "00"  # type: ignore[index]
    path.write_bytes(pack(manifest))

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("something was opened")

    monkeypatch.setattr("tiermem.runtime.offloading.build", opened)
    with pytest.raises(tiermem.ResumeError, match="random number generators cannot be restored"):
        Training(make_config(tmp_path), resume=True)
