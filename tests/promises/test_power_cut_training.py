"""The power goes at any instant of a training: what was committed is there afterwards, and training goes on from it."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from doubles import PowerCut
from doubles_combinations import in_turn, number_of
from doubles_commit import Training, check_equal, make_config, undisturbed

import swap
import tiermem

STEPS = 5
# Every module that makes system calls of its own accord, by the name under which it finds them.
CALLERS = ("swap.patience", "swap.opening", "swap.recovery", "swap.backends.threads", "swap.backends.inline")


def live(drive: Path, *, update: str) -> tuple[int, bool]:
    """Train, and commit every step, until all is done or the power goes: the last commit that was acknowledged."""
    acknowledged = 0
    training: Training | None = None
    try:
        training = Training(make_config(drive, update=update, host_memory="160KiB"), resume="auto")
        acknowledged = training.done
        while training.done < STEPS:
            training.step()
            training.commit().wait()
            acknowledged = training.done
        training.runtime.settle()
    except (swap.SwapError, tiermem.TiermemError):
        return acknowledged, False
    else:
        return acknowledged, True
    finally:
        if training is not None:
            with contextlib.suppress(swap.SwapError, tiermem.TiermemError):
                training.runtime.close(remove=False)


@pytest.mark.parametrize(("seed", "update"), in_turn(range(number_of(3, 5)), ["step", "forward", "backward"]))
def test_training_survives_power_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: str, seed: int) -> None:
    chance = random.Random(f"{update} {seed}")
    _, expected = undisturbed(tmp_path / "plain", STEPS, host_memory="160KiB")
    drive = tmp_path / "0"
    drive.mkdir()
    acknowledged, finished, cuts = 0, False, 0
    while not finished:
        power = PowerCut(drive)
        for name in CALLERS:
            monkeypatch.setattr(f"{name}.SystemCalls", lambda power=power: power)
        if cuts < 3:
            power.cut_after(chance.randrange(5, 90))
        reached, finished = live(drive, update=update)
        assert reached >= acknowledged, "an acknowledged commit is gone"
        acknowledged = reached
        if finished:
            break
        assert power.dead, "an error without a cut"
        cuts += 1
        after = tmp_path / str(cuts)
        after.mkdir()
        power.reboot(str(drive), str(after), lambda n: chance.randrange(n))
        drive = after
    monkeypatch.undo()
    assert cuts
    training = Training(make_config(drive, update=update, host_memory="160KiB"), resume=True)
    assert training.done == STEPS
    check_equal(training.state(), expected)
    training.runtime.close(remove=True)
