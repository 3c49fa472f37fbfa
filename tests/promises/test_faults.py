"""Every fault of a drive, at every phase of training: the caller hears of it, nothing hangs, nothing committed is lost.

A fault is armed where a phase begins and strikes the next transfer of its kind, on a real file under real O_DIRECT.
What a drive may do at any time (short transfers, interrupted calls) must change no number. All else must raise the
documented error, let the runtime be closed, and leave a directory that resumes from the last commit bit for bit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles_combinations import half_of, in_turn, some_of
from doubles_commit import Training, make_config, undisturbed
from doubles_silence import only_what_is_held_is_silent

import swap
from swap.syscalls import SystemCalls

STEPS_BEFORE = 2
HEADER, DATA = 0, 4096
SILENT = (swap.SwapTimeoutError, swap.SwapIOError)  # noticed by the engine, and by who makes a call of his own
TIGHT: dict[str, Any] = {"host_memory": "160KiB"}


class Drive:
    """The system calls of this process, of which one kind can be made to fail once, from a moment on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.struck = 0
        self.holds = threading.Event()
        self.silent = threading.Event()  # set: nobody is held in a call any more
        only_what_is_held_is_silent(monkeypatch, self.holds.is_set)
        self._armed: tuple[str, str | int, int] | None = None
        self._from = 0
        self._lock = threading.Lock()
        for name in ("preadv", "pwritev", "fdatasync", "fsync", "rename", "unlink"):
            self._replace(monkeypatch, name)

    def arm(self, call: str, fault: str | int, times: int = 1, *, offset: int = 0) -> None:
        """The next `times` calls of this name suffer, of transfers those from this offset of a file on."""
        self._from = offset
        self._armed = (call, fault, times)

    def disarm(self) -> None:
        self._armed = None
        self.silent.set()

    def _replace(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real = getattr(SystemCalls, name)

        def call(calls: SystemCalls, first: Any, *arguments: Any) -> Any:
            fault = self._strike(name, arguments[-1] if name in ("preadv", "pwritev") else self._from)
            if isinstance(fault, int):
                raise OSError(fault, os.strerror(fault))
            if fault == "stall":
                self.holds.set()
                assert self.silent.wait(60), "the test forgot to let go of the drive"
            if fault == "short":
                view, offset = arguments
                return real(calls, first, view[:4096], offset) if len(view) > 4096 else real(calls, first, view, offset)
            moved = real(calls, first, *arguments)
            if fault == "flip":
                arguments[0][0] ^= 8
            if fault == "late":  # it has happened, and an error is reported
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return moved

        monkeypatch.setattr(SystemCalls, name, call)

    def _strike(self, name: str, offset: int) -> str | int | None:
        with self._lock:
            if self._armed is None or self._armed[0] != name or offset < self._from:
                return None
            _, fault, times = self._armed
            self._armed = (name, fault, times - 1) if times > 1 else None
            self.struck += 1
            return fault


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    found = Drive(monkeypatch)
    yield found
    found.disarm()


# A phase takes a training and a function that arms the drive, and goes through one step.


def forward_read(training: Training, arm: Callable[[str], None]) -> float:
    handle = training.model.layers[0].register_forward_pre_hook(lambda *_: arm("preadv"))
    try:
        return training.step()
    finally:
        handle.remove()


def backward_read(training: Training, arm: Callable[[str], None]) -> float:
    handle = training.model.outer.register_full_backward_pre_hook(lambda *_: arm("preadv"))
    try:
        return training.step()
    finally:
        handle.remove()


def _in_step(call: str) -> Callable[[Training, Callable[[str], None]], float]:
    def phase(training: Training, arm: Callable[[str], None]) -> float:
        handle = training.optimizer.register_step_pre_hook(lambda *_: arm(call))
        try:
            loss = training.step()
            training.runtime.settle()
            return loss
        finally:
            handle.remove()

    return phase


tile_read, tile_write = _in_step("preadv"), _in_step("pwritev")


def commit_write(training: Training, arm: Callable[[str], None]) -> float:
    loss = training.step()
    arm("pwritev")
    training.commit().wait()
    return loss


def through(phase: Any, training: Training, arm: Callable[[str], None]) -> None:
    """The phase and a step more: what was read or written beside it has been asked for by then."""
    phase(training, arm)
    training.runtime.settle()
    training.step()


READING = [forward_read, backward_read, tile_read]
WRITING = [tile_write, commit_write]


def begin(directory: Path, **settings: Any) -> Training:
    directory.mkdir()
    training = Training(make_config(directory, **TIGHT, **settings))
    for _ in range(STEPS_BEFORE):
        training.step()
    training.commit().wait()
    return training


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of a run that nothing disturbs."""
    return undisturbed(tmp_path_factory.mktemp("plain") / "run", STEPS_BEFORE + 3, **TIGHT)[0]


def when_free(directory: Path, *, resume: bool, **settings: Any) -> Training:
    """Training in a directory that is refused until the drive has answered what was given up, a moment at most here."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return Training(make_config(directory, **TIGHT, **settings), resume=resume)
        except swap.SwapInUseError:
            assert time.monotonic() < deadline, "the directory is never given back"
            time.sleep(0.01)


def check_resumes(directory: Path, losses: list[float], **settings: Any) -> None:
    """Training goes on from the commit, with the numbers of the undisturbed run."""
    training = when_free(directory, resume=True, **settings)
    assert training.done in (STEPS_BEFORE, STEPS_BEFORE + 1)
    assert [training.step() for _ in range(2)] == losses[training.done - 2 : training.done]
    training.close()


@pytest.mark.parametrize(("phase", "fault"), in_turn(READING + WRITING, ["short", errno.EINTR, errno.EAGAIN]))
def test_what_a_drive_may_do_changes_no_number(
    tmp_path: Path, drive: Drive, losses: list[float], phase: Any, fault: str | int
) -> None:
    training = begin(tmp_path / "run")
    assert phase(training, lambda call: drive.arm(call, fault, times=3)) == losses[STEPS_BEFORE]
    assert drive.struck
    assert training.step() == losses[STEPS_BEFORE + 1]
    training.close()


@pytest.mark.parametrize(
    ("phase", "code"),
    [(phase, errno.EIO) for phase in READING + WRITING] + in_turn(WRITING, [errno.ENOSPC, errno.EDQUOT]),
)
def test_an_error_reaches_the_caller_and_the_commit_holds(
    tmp_path: Path, drive: Drive, losses: list[float], phase: Any, code: int
) -> None:
    training = begin(tmp_path / "run")
    with pytest.raises((swap.SwapIOError, swap.SwapFullError)) as raised:
        through(phase, training, lambda call: drive.arm(call, code))
    assert drive.struck
    assert os.strerror(code) in str(raised.value)
    drive.disarm()
    with contextlib.suppress(swap.SwapError):  # closing may say it once more
        training.close()
    check_resumes(tmp_path / "run", losses)


@pytest.mark.parametrize("phase", READING)
def test_a_flipped_bit_is_noticed_where_every_read_is_compared(
    tmp_path: Path, drive: Drive, losses: list[float], phase: Any
) -> None:
    training = begin(tmp_path / "run", verify="always")
    with pytest.raises(swap.ChecksumError):
        through(phase, training, lambda call: drive.arm(call, "flip"))
    with contextlib.suppress(swap.SwapError):
        training.close()
    check_resumes(tmp_path / "run", losses, verify="always")


@pytest.mark.parametrize("phase", READING + WRITING)
def test_a_silent_drive_is_named_and_nothing_hangs(
    tmp_path: Path, drive: Drive, losses: list[float], phase: Any
) -> None:
    training = begin(tmp_path / "run", stall_timeout=0.5)
    with pytest.raises(SILENT, match=r"the device shows no progress.*kernel log") as raised:
        through(phase, training, lambda call: drive.arm(call, "stall", times=1000))
    assert str(tmp_path / "run") in str(raised.value)
    with contextlib.suppress(swap.SwapError):
        training.close()
    drive.disarm()
    check_resumes(tmp_path / "run", losses)


@pytest.mark.parametrize("call", ["fdatasync", "fsync", "rename"])
def test_a_drive_that_is_silent_in_a_commit(tmp_path: Path, drive: Drive, losses: list[float], call: str) -> None:
    training = begin(tmp_path / "run", stall_timeout=0.5)
    assert training.step() == losses[STEPS_BEFORE]
    drive.arm(call, "stall")
    with pytest.raises(swap.SwapIOError, match=r"ETIMEDOUT.*the device shows no progress"):
        training.commit().wait()
    assert training.runtime.committed["step"] == STEPS_BEFORE
    with contextlib.suppress(swap.SwapError):
        training.close()
    with pytest.raises(swap.SwapInUseError):  # the call may yet take effect, and must not meet another run's files
        Training(make_config(tmp_path / "run", **TIGHT), resume=True)
    drive.disarm()
    check_resumes(tmp_path / "run", losses)


@pytest.mark.parametrize(("call", "fault"), half_of(["rename", "unlink"], [errno.EIO, "late"]))
def test_after_a_commit_in_doubt_training_goes_on_and_commits(
    tmp_path: Path, drive: Drive, losses: list[float], call: str, fault: str | int
) -> None:
    training = begin(tmp_path / "run", stall_timeout=30)
    found = [training.step()]
    drive.arm(call, fault)
    with pytest.raises(swap.SwapIOError, match=call):
        training.commit().wait()
    assert drive.struck
    assert training.runtime.committed["step"] == STEPS_BEFORE
    found.append(training.step())  # a third copy has no room: one of the two has been given up
    happened = fault == "late" or call == "unlink"
    assert training.runtime.committed["step"] == STEPS_BEFORE + happened
    training.commit().wait()
    assert training.runtime.committed["step"] == STEPS_BEFORE + 2
    found.append(training.step())
    assert found == losses[STEPS_BEFORE : STEPS_BEFORE + 3]
    assert training.runtime._house.storage.extents.generations.statistics().marks == 1
    training.close()
    training = Training(make_config(tmp_path / "run", **TIGHT), resume=True)
    assert training.done == STEPS_BEFORE + 2
    assert training.step() == losses[training.done - 1]
    training.close()


def test_a_commit_that_could_not_be_prepared_keeps_no_room(tmp_path: Path, drive: Drive, losses: list[float]) -> None:
    training = begin(tmp_path / "run")
    found = [training.step()]
    drive.arm("fsync", errno.ENOSPC)
    with pytest.raises(swap.SwapFullError, match="no room for a manifest"):
        training.commit().wait()
    found.append(training.step())
    training.commit().wait()
    assert found == losses[STEPS_BEFORE : STEPS_BEFORE + 2]
    assert training.runtime._house.storage.extents.generations.statistics().marks == 1
    training.close()


@pytest.mark.parametrize(("fault", "where"), half_of([errno.EIO, errno.ENOSPC, errno.EDQUOT, "stall"], [HEADER, DATA]))
def test_while_a_model_is_materialized(tmp_path: Path, drive: Drive, where: int, fault: str | int) -> None:
    drive.arm("pwritev", fault, times=1000 if fault == "stall" else 1, offset=where)
    with contextlib.ExitStack() as stack:
        raised = stack.enter_context(pytest.raises((swap.SwapIOError, swap.SwapFullError, swap.SwapTimeoutError)))
        training = Training(make_config(tmp_path, **TIGHT, stall_timeout=0.5))
        stack.callback(training.close)
        training.runtime.settle()
        training.step()
    assert drive.struck
    assert not isinstance(raised.value, swap.SwapFullError) or where == HEADER
    drive.disarm()
    training = when_free(tmp_path, resume=False)
    training.step()
    training.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "where", "expected"),
    [
        (errno.EIO, HEADER, swap.SwapIOError),
        (errno.EIO, DATA, swap.SwapIOError),
        ("flip", DATA, swap.ChecksumError),
        ("stall", HEADER, SILENT),
        ("stall", DATA, SILENT),
    ],
)
def test_while_a_run_is_resumed(
    tmp_path: Path, drive: Drive, losses: list[float], fault: str | int, where: int, expected: Any
) -> None:
    begin(tmp_path / "run").close()
    drive.arm("preadv", fault, times=1000 if fault == "stall" else 1, offset=where)
    with pytest.raises(expected):
        Training(make_config(tmp_path / "run", **TIGHT, stall_timeout=0.5), resume=True)
    assert drive.struck
    drive.disarm()
    check_resumes(tmp_path / "run", losses)


@pytest.mark.parametrize("fault", some_of(["short", errno.EINTR], [errno.EAGAIN]))
def test_what_a_drive_may_do_while_a_run_is_resumed(
    tmp_path: Path, drive: Drive, losses: list[float], fault: str | int
) -> None:
    begin(tmp_path / "run").close()
    drive.arm("preadv", fault, times=3)
    check_resumes(tmp_path / "run", losses)
    assert drive.struck == 3
