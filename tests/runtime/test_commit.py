"""Commit and resume: the same bits as an undisturbed run, in every schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doubles_commit import Training, check_equal, make_config, undisturbed

UPDATES = ("step", "forward", "backward")


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("memory", ["72KiB", "2MiB"])
def test_resuming_continues_bit_for_bit(tmp_path: Path, update: str, dtype: str, memory: str) -> None:
    settings: dict[str, Any] = {"update": update, "param_dtype": dtype, "host_memory": memory}
    losses, state = undisturbed(tmp_path / "plain", 6, **settings)
    (tmp_path / "run").mkdir()
    config = make_config(tmp_path / "run", **settings)
    found: list[float] = []
    for life in range(3):
        training = Training(config, resume="auto" if life != 1 else True)
        assert training.done == 2 * life
        for _ in range(2):
            found.append(training.step())
            training.commit()
        if life < 2:
            training.step()  # not committed: forgotten
        else:
            check_equal(training.state(), state)
        training.close()
    assert found == losses


@pytest.mark.parametrize("update", UPDATES)
def test_committing_every_step_changes_no_bit(tmp_path: Path, update: str) -> None:
    losses, state = undisturbed(tmp_path / "plain", 5, update=update, clip=None)
    (tmp_path / "run").mkdir()
    training = Training(make_config(tmp_path / "run", update=update))
    assert training.runtime.committed is None
    found = []
    for number in range(5):
        found.append(training.step())
        pending = training.commit()
        if number % 2:
            pending.wait()
            assert pending.done
            assert training.runtime.committed["step"] == number + 1
    assert found == losses
    check_equal(training.state(), state)
    training.close()
    assert training.runtime.committed["step"] == 5


def test_a_run_in_a_relative_directory_outlives_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a run, naïve ✓").mkdir()
    monkeypatch.chdir(tmp_path)
    config = make_config(Path("a run, naïve ✓"))
    training = Training(config)
    assert training.runtime.config.swap_dirs == ("a run, naïve ✓",)
    monkeypatch.chdir("/")
    training.step()
    training.commit().wait()
    state = training.state()
    training.close()
    monkeypatch.chdir(tmp_path)
    resumed = Training(config, resume=True)
    monkeypatch.chdir("/")
    check_equal(resumed.state(), state)
    resumed.close()
    assert list((tmp_path / "a run, naïve ✓").glob("*.manifest"))
