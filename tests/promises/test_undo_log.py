"""Beside a device, where everything fits: updates under backward that may be undone, with their old bytes in memory."""

from __future__ import annotations

import contextlib
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_commit import Training, check_equal, make_config, undisturbed
from doubles_models import Stack
from doubles_scenarios import tokens_batch
from doubles_training import config_for

import tiermem
from tiermem.optim import kernels, stream
from tiermem.optim.undolog import UndoLog

STEPS = 6
CLIP = 0.9  # some of the first steps are clipped, some are not: see test_speculation_faults.py
SETTINGS: dict[str, Any] = {"update": "auto", "host_memory": "8MiB", "device": "simulated", "device_memory": "8MiB"}


def logged_units(runtime: tiermem.Runtime) -> set[int]:
    """Units that are updated under backward."""
    coordinator = runtime._house.coordinator
    return coordinator._units.keys() - set(coordinator._patient)


def log_of(runtime: tiermem.Runtime) -> UndoLog:
    log: UndoLog = runtime._house.coordinator._speculation._undo.protection()._log
    return log


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_it_takes_nothing_but_memory_of_the_budget(dtype, moments, tmp_path):
    torch.manual_seed(0)
    model = Stack(depth=8)
    beside = {"device": "simulated", "device_memory": "8MiB", "param_dtype": dtype, "moments": moments}
    with tiermem.offload(model, config_for(tmp_path, "8MiB", "auto", **beside)) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
        assert logged_units(runtime)
        early = 0
        for _ in range(5):
            tokens_batch(model).backward()
            early += runtime._house.ledger.is_mid_step
            optimizer.step()
            optimizer.zero_grad()
        found = runtime.statistics()
        assert early == 4, "nothing is known of the first step"
        assert (found.total.speculated, found.total.confirmed, found.total.redone) == (4, 4, 0)
        assert (found.total.bytes_read, found.total.bytes_written) == (0, 0)
        host = next(tier for tier in found.tiers if tier.name == "HOST")
        assert host.budget == 8 << 20
        assert 0 < log_of(runtime).nbytes <= host.budget - host.high_water


@pytest.mark.parametrize("every", [1, 2, 3])
def test_commits_beside_it_change_no_bit(every: int, tmp_path: Path) -> None:
    losses, state = undisturbed(tmp_path / "plain", 2 * STEPS, update="forward", clip=CLIP)
    (tmp_path / "run").mkdir()
    found: list[float] = []
    for _ in range(2):
        training = Training(make_config(tmp_path / "run", **SETTINGS), resume="auto", clip=CLIP)
        assert training.done == len(found)
        for number in range(STEPS):
            found.append(training.step())
            if (number + 1) % every == 0:
                training.commit().wait()
        assert training.runtime.statistics().total.speculated > 0
        state_now = training.state()
        training.close()
    assert found == losses
    check_equal(state_now, state)


def test_while_a_commit_is_made_nothing_begins_early_and_nobody_waits_for_it(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path, **SETTINGS))
    for _ in range(3):
        training.step()
    undo = training.runtime._house.coordinator._speculation._undo
    assert undo.has_room()
    snapshots = training.runtime._house.snapshots
    pending = training.commit()
    assert undo.has_room() == (not snapshots.under_way) or pending.done
    pending.wait()
    assert not snapshots.under_way
    assert undo.has_room()
    training.close()


@pytest.mark.timeout(60)
def test_a_kernel_that_fails_in_an_early_update_is_raised_and_the_commit_holds(
    tmp_path: Path, monkeypatch: Any
) -> None:
    losses, state = undisturbed(tmp_path / "plain", STEPS, clip=CLIP)
    (tmp_path / "run").mkdir()
    training = Training(make_config(tmp_path / "run", **SETTINGS), clip=CLIP)
    training.step()
    training.step()
    training.commit().wait()
    calls = itertools.count()

    def failing(*arguments: Any, **named: Any) -> None:
        if next(calls) == 1:
            raise ValueError("the kernel has failed")
        kernels.adamw_tile(*arguments, **named)

    monkeypatch.setattr(stream, "adamw_tile", failing)

    def train() -> None:
        for _ in range(STEPS):
            training.step()

    with pytest.raises(ValueError, match="the kernel has failed"):
        train()
    monkeypatch.undo()
    with contextlib.suppress(ValueError):
        training.close()
    training = Training(make_config(tmp_path / "run", **SETTINGS), resume=True, clip=CLIP)
    assert training.done == 2
    assert [training.step() for _ in range(STEPS - 2)] == losses[2:]
    check_equal(training.state(), state)
    training.close()


def test_what_has_not_begun_by_the_step_is_an_update_like_any_other(tmp_path: Path) -> None:
    """The worker is held up from backward to the step: nothing is copied, and the bits are the same."""
    losses, state = undisturbed(tmp_path / "plain", STEPS)
    (tmp_path / "run").mkdir()
    training = Training(make_config(tmp_path / "run", **SETTINGS))
    found = [training.step(), training.step()]
    training.runtime.settle()
    memory = log_of(training.runtime)._memory
    before, pager, gate = memory.clone(), training.runtime._house.storage.pager, threading.Event()

    def hold_up(*_: Any) -> None:
        gate.clear()
        pager.start_task(pager.run_worker(gate.wait, 30))

    training.model.outer.register_full_backward_pre_hook(hold_up)
    training.optimizer.register_step_post_hook(lambda *_: gate.set())
    found += [training.step() for _ in range(STEPS - 2)]
    assert found == losses
    check_equal(training.state(), state)
    assert training.runtime.statistics().total.confirmed == STEPS - 1
    assert torch.equal(memory, before)
    training.close()
