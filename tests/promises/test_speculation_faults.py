"""Kills and faults while a step may still be undone: a commit covers what counts, and nothing hangs.

A child kills itself with SIGKILL at a given place: after updates under backward have reached the disk, in the middle of
undoing them, or when they have been done again but not committed. Faults of the drive strike the same places.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_combinations import half_of, in_turn
from doubles_commit import Training, check_equal, make_config, undisturbed
from doubles_pager import save_all
from doubles_python import WarmPython

import swap
from swap.generations import Generations
from swap.syscalls import SystemCalls

TESTS = Path(__file__).resolve().parents[1]
STEPS = 6
CLIP = 0.9  # some of the first steps are clipped, some are not: see `test_these_steps_are_clipped_now_and_then`
# Updates run beside the computation, and not everything fits.
SETTINGS: dict[str, Any] = {"update": "backward", "host_memory": "360KiB"}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(cls: type, name: str, *, call: int) -> None:
    """Kill this process at the `call`th call of a method from now on."""
    real, left = getattr(cls, name), [call]

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            die()
        return real(self, *arguments, **named)

    setattr(cls, name, method)


def child(directory: str, place: str, committed: int, rarely: bool) -> None:
    """Train, commit after `committed` steps, and die in a later one."""
    training = Training(make_config(Path(directory), **SETTINGS), clip=CLIP)
    for _ in range(committed):
        training.step()
    training.commit().wait()
    for _ in range(2 if rarely else 0):
        training.step()  # not committed: three copies of each page from here on
    pager = training.runtime._house.storage.pager
    if place == "updated":

        def updated(*_: Any) -> None:
            training.runtime.settle()
            save_all(pager)  # the new bytes are on the disk, as far as this process can tell
            die()

        training.optimizer.register_step_pre_hook(updated)
    elif place == "undoing":
        die_in(Generations, "restore", call=3)
    elif place == "redone":

        def redone(*_: Any) -> None:
            training.runtime.settle()
            if training.runtime.statistics().total.redone > before:
                save_all(pager)
                die()

        training.optimizer.register_step_post_hook(redone)
    before = training.runtime.statistics().total.redone
    for _ in range(STEPS):
        training.step()
    raise AssertionError(f"never came to {place}")


@pytest.mark.parametrize(
    ("place", "rarely"), [("updated", False), ("updated", True), ("undoing", True), ("redone", True)]
)
def test_a_kill_while_a_step_may_be_undone(place: str, rarely: bool, warm_python: WarmPython, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    code = f"import sys; sys.path[:0] = {[str(TESTS), str(TESTS.parent), str(TESTS / 'promises')]!r}\n"
    code += f"import test_speculation_faults as t; t.child({str(run)!r}, {place!r}, 2, {rarely})"
    done = warm_python.run("-c", code)
    assert done.returncode == -signal.SIGKILL, done.stderr
    losses, state = undisturbed(tmp_path / "plain", STEPS, clip=CLIP)
    training = Training(make_config(run, **SETTINGS), resume=True, clip=CLIP)
    assert training.done == 2
    assert [training.step() for _ in range(STEPS - 2)] == losses[2:]
    check_equal(training.state(), state)
    training.close()


@pytest.mark.parametrize(
    ("memory", "every", "update"), in_turn(["72KiB", "360KiB", "2MiB"], [1, 2, 3], ["backward", "auto"])
)
def test_commits_beside_speculation_change_no_bit(memory: str, update: str, every: int, tmp_path: Path) -> None:
    losses, state = undisturbed(tmp_path / "plain", 2 * STEPS, update="forward", clip=CLIP)
    (tmp_path / "run").mkdir()
    config = make_config(tmp_path / "run", update=update, host_memory=memory)
    found: list[float] = []
    for life in range(2):
        training = Training(config, resume="auto", clip=CLIP)
        assert training.done == len(found)
        for number in range(STEPS):
            found.append(training.step())
            if (number + 1) % every == 0:
                training.commit()
        total = training.runtime.statistics().total
        assert total.speculated <= STEPS - 1
        if update == "backward":
            assert total.speculated == STEPS - 1
            assert total.redone > 0 or life
        else:  # where it is worth it, as often as two copies are enough, and not often after a few redone steps
            assert (0 < total.speculated <= (STEPS - 1 if every == 1 else 3)) == (memory == "360KiB")
        if life:
            check_equal(training.state(), state)
        training.close()
    assert found == losses


def test_these_steps_are_clipped_now_and_then(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path, **SETTINGS), clip=CLIP)
    norms = []
    for _ in range(2 * STEPS):
        training.step()
        norms.append(float(training.optimizer.grad_norm))
    training.close()
    assert any(norm < CLIP for norm in norms[2:]), norms
    assert any(norm > CLIP for norm in norms[2:5]), norms


def test_in_these_settings_updates_run_beside_the_computation_and_not_everything_fits(tmp_path: Path) -> None:
    """What the tests above rest on: elsewhere there would be little to undo, or "auto" would not begin anything."""
    training = Training(make_config(tmp_path, **SETTINGS | {"update": "auto"}))
    assert training.runtime._house.steps.plans._schedule.name == "auto"  # not worthwhile: it would be "forward"
    training.close()


def test_auto_takes_no_more_disk_and_backward_room_for_a_copy(tmp_path: Path) -> None:
    nbytes = {}
    for update in ("forward", "auto", "backward"):
        for commits in (False, True):
            directory = tmp_path / f"{update}{commits}"
            directory.mkdir()
            training = Training(make_config(directory, update=update, commits=commits))
            nbytes[update, commits] = training.runtime.statistics().tiers[0].budget
            training.close()
    assert nbytes["auto", True] == nbytes["forward", True] == nbytes["backward", False]
    assert nbytes["auto", False] == nbytes["forward", False]
    assert nbytes["backward", True] - nbytes["forward", True] >= 0.3 * nbytes["forward", True]


def test_a_run_made_without_the_room_goes_on_without_it(tmp_path: Path) -> None:
    """Resumed with update="backward": early where two copies do, which is right after a commit."""
    losses, state = undisturbed(tmp_path / "plain", STEPS, clip=CLIP)
    (tmp_path / "run").mkdir()
    training = Training(make_config(tmp_path / "run", update="forward"), clip=CLIP)
    found = [training.step(), training.step()]
    training.commit()
    training.close()
    training = Training(make_config(tmp_path / "run", **SETTINGS), resume=True, clip=CLIP)
    for number in range(2, STEPS):
        found.append(training.step())
        if number == STEPS - 2:
            training.commit()
    assert training.runtime.statistics().total.speculated == 1  # the last: before that, three copies would be needed
    assert found == losses
    check_equal(training.state(), state)
    training.close()


# Faults of the drive


class Drive:
    """Transfers of one kind fail, or end early, from a moment on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fault: tuple[str, int | str] | None = None
        for name in ("preadv", "pwritev"):
            self._replace(monkeypatch, name)

    def _replace(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real = getattr(SystemCalls, name)

        def call(calls: SystemCalls, fd: int, view: Any, offset: int) -> Any:
            if self.fault is not None and self.fault[0] == name:
                if isinstance(self.fault[1], int):
                    raise OSError(self.fault[1], os.strerror(self.fault[1]))
                view = view[:4096]
            return real(calls, fd, view, offset)

        monkeypatch.setattr(SystemCalls, name, call)


def arm(training: Training, drive: Drive, place: str, fault: tuple[str, int | str]) -> None:
    """Have the fault strike from this place of the next step on."""

    def now(*_: Any) -> None:
        drive.fault = fault

    if place == "backward":
        training.model.outer.register_full_backward_pre_hook(now)
    else:
        training.optimizer.register_step_pre_hook(now)


@pytest.mark.parametrize(
    ("fault", "place"),
    half_of([("preadv", errno.EIO), ("pwritev", errno.EIO), ("pwritev", errno.ENOSPC)], ["backward", "step"]),
)
@pytest.mark.timeout(200)
def test_a_drive_that_fails(place: str, fault: tuple[str, int], tmp_path: Path, monkeypatch: Any) -> None:
    """The caller hears of it, and the directory resumes from the commit."""
    losses, state = undisturbed(tmp_path / "plain", STEPS, clip=CLIP)
    (tmp_path / "run").mkdir()
    drive = Drive(monkeypatch)
    training = Training(make_config(tmp_path / "run", **SETTINGS | {"host_memory": "128KiB"}), clip=CLIP)
    training.step()
    training.step()
    training.commit().wait()
    arm(training, drive, place, fault)

    def train() -> None:
        for _ in range(STEPS):
            training.step()
        training.runtime.settle()

    with pytest.raises(swap.SwapIOError):
        train()
    with contextlib.suppress(swap.SwapError):
        training.runtime.close()
    drive.fault = None
    training = Training(make_config(tmp_path / "run", **SETTINGS), resume=True, clip=CLIP)
    assert training.done == 2
    assert [training.step() for _ in range(STEPS - 2)] == losses[2:]
    check_equal(training.state(), state)
    training.close()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_short_transfers_change_no_bit(call: str, tmp_path: Path, monkeypatch: Any) -> None:
    losses, state = undisturbed(tmp_path / "plain", STEPS, clip=CLIP)
    (tmp_path / "run").mkdir()
    drive = Drive(monkeypatch)
    training = Training(make_config(tmp_path / "run", **SETTINGS), clip=CLIP)
    found = [training.step()]
    drive.fault = (call, "short")
    found += [training.step() for _ in range(STEPS - 1)]
    assert found == losses
    check_equal(training.state(), state)
    assert training.runtime.statistics().total.redone > 0
    training.close()


def test_nothing_is_left_of_what_was_undone(tmp_path: Path) -> None:
    """Pages, copies and marks are after a skipped step what they were before it."""
    training = Training(make_config(tmp_path, **SETTINGS), clip=CLIP)
    for _ in range(3):
        training.step()
    before = training.state()
    extents = training.runtime._house.storage.extents
    training.model(torch.randn(5, 8)).square().mean().backward()
    assert extents.generations.statistics().marks == 1
    training.optimizer.zero_grad()
    assert extents.generations.statistics().marks == 0
    training.runtime._house.storage.pager.check_invariants()
    after = training.state()
    after.pop("norm.running_mean"), after.pop("norm.running_var"), after.pop("norm.num_batches_tracked")
    check_equal(after, {name: values for name, values in before.items() if name in after})
    training.close()
