"""Calls outside the engine are made again, or given up, but never waited for without end."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from doubles import FaultySystemCalls, Short, Stall
from doubles_silence import only_what_is_held_is_silent

import swap
from swap.patience import PatientSystemCalls
from swap.probe import measure


def test_the_answer_or_the_error_of_the_real_call(tmp_path: Path) -> None:
    calls = PatientSystemCalls(None, 30.0)
    fd = calls.open(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT)
    assert calls.pwritev(fd, memoryview(b"hello"), 0) == 5
    calls.fdatasync(fd)
    calls.fsync(fd)
    found = bytearray(5)
    assert calls.preadv(fd, memoryview(found), 0) == 5
    assert found == b"hello"
    calls.close(fd)
    calls.rename(str(tmp_path / "file"), str(tmp_path / "other"))
    calls.unlink(str(tmp_path / "other"))
    with pytest.raises(FileNotFoundError):
        calls.unlink(str(tmp_path / "other"))


def test_an_error_keeps_nothing_of_whoever_called_once_it_is_handled(tmp_path: Path) -> None:
    """No circle of it and a frame, which with all above it would wait for the cycle collector."""

    class Held:
        pass

    def ask() -> weakref.ref[Held]:
        held = Held()
        try:
            PatientSystemCalls(None, 30.0).unlink(str(tmp_path / "nothing"))
        except FileNotFoundError:
            return weakref.ref(held)
        raise AssertionError("there was a file")

    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_a_call_that_was_interrupted_is_made_again(tmp_path: Path, code: int) -> None:
    system = FaultySystemCalls()
    system.inject("unlink", code, code)
    (tmp_path / "file").touch()
    PatientSystemCalls(system, 30.0).unlink(str(tmp_path / "file"))
    assert system.calls["unlink"] == 3
    assert len(system.slept) == 2


def test_but_not_for_ever(tmp_path: Path) -> None:
    system = FaultySystemCalls()
    system.always("unlink", errno.EAGAIN)
    with pytest.raises(BlockingIOError):
        PatientSystemCalls(system, 30.0).unlink(str(tmp_path / "file"))


def test_a_silent_drive_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, stall = FaultySystemCalls(), Stall()
    only_what_is_held_is_silent(monkeypatch, stall.entered.is_set)
    system.inject("unlink", stall)
    with pytest.raises(TimeoutError) as raised:
        PatientSystemCalls(system, 0.05).unlink(str(tmp_path / "file"))
    assert raised.value.errno == errno.ETIMEDOUT
    assert stall.entered.is_set()
    stall.release()


@pytest.mark.parametrize("interrupted", [False, True])
def test_opening_on_a_silent_drive_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """Or somebody has enough of waiting before that."""
    system, stall = FaultySystemCalls(), Stall()
    system.inject("fsync", stall)
    settings = swap.EngineSettings(stall_seconds=30.0 if interrupted else 1.0)

    def interrupt() -> None:
        stall.entered.wait(30)
        time.sleep(0.1)  # a signal that comes just before a thread waits does not wake it
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    if interrupted:
        threading.Thread(target=interrupt, daemon=True).start()
    else:
        only_what_is_held_is_silent(monkeypatch, stall.entered.is_set)
    with pytest.raises(
        KeyboardInterrupt if interrupted else swap.SwapIOError,
        match=None if interrupted else r"name\.swapfile.*ETIMEDOUT.*no progress",
    ):
        swap.SwapSpace.open([tmp_path], name="name", nbytes=1 << 16, settings=settings, system=system)
    with pytest.raises(swap.SwapInUseError):  # as long as the call may still happen
        swap.SwapSpace.open([tmp_path], name="name", nbytes=1 << 16)
    stall.release()
    until = time.monotonic() + 60.0
    while True:
        try:
            swap.SwapSpace.open([tmp_path], name="name", nbytes=1 << 16).close(remove=True)
            break
        except swap.SwapInUseError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def test_room_is_reserved_a_piece_after_the_other_each_within_the_time_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large file may take long, and a drive that is silent is given up."""
    monkeypatch.setattr(swap.patience, "_PIECE", 1 << 16)
    pieces: list[tuple[int, int]] = []

    class Noting(swap.SystemCalls):
        def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
            pieces.append((offset, nbytes))
            super().fallocate(fd, offset, nbytes)

    settings = swap.EngineSettings(stall_seconds=1.0)
    swap.SwapSpace.open([tmp_path], name="name", nbytes=150_000, system=Noting()).close()
    assert pieces == [(0, 1 << 16), (1 << 16, 1 << 16), (2 << 16, 155_648 - (2 << 16))]
    assert os.stat(tmp_path / "name.swapfile").st_size == 155_648
    system, stall = FaultySystemCalls(), Stall()
    only_what_is_held_is_silent(monkeypatch, stall.entered.is_set)
    system.inject("fallocate", None, errno.EINTR, stall)
    with pytest.raises(swap.SwapIOError, match=r"reserve.*name\.swapfile.*ETIMEDOUT.*no progress"):
        swap.SwapSpace.open([tmp_path], name="name", nbytes=1 << 18, settings=settings, system=system)
    assert stall.entered.is_set()
    with pytest.raises(swap.SwapInUseError):  # as long as the call may still happen
        swap.SwapSpace.open([tmp_path], name="name", nbytes=1 << 16)
    stall.release()


def test_a_commit_that_a_silent_drive_may_yet_remove_keeps_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new run forgets it, and is told that the drive does not answer."""
    with swap.SwapSpace.open([tmp_path], name="name", nbytes=1 << 16) as space:
        swap.CommitStore([tmp_path], name="name").write(0, [], {}, space=space)
    system, stall = FaultySystemCalls(), Stall()
    system.inject("unlink", stall)
    only_what_is_held_is_silent(monkeypatch, stall.entered.is_set)
    settings = swap.EngineSettings(stall_seconds=1.0)
    with pytest.raises(swap.SwapIOError, match=r"unlink.*manifest.*ETIMEDOUT"):
        swap.SwapSpace.open([tmp_path], name="name", nbytes=1 << 16, settings=settings, system=system)
    with pytest.raises(swap.SwapInUseError):
        swap.SwapSpace.open([tmp_path], name="name", nbytes=1 << 16, keep=True)
    stall.release()
    until = time.monotonic() + 60.0
    while True:
        try:
            swap.SwapSpace.open([tmp_path], name="name", nbytes=1 << 16).close(remove=True)
            break
        except swap.SwapInUseError:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


def lived(directory: Path, system: swap.SystemCalls | None = None) -> None:
    """All that a run does to a directory outside the engine, short of a commit."""
    seconds = 0.1 if system else 30.0
    settings = swap.EngineSettings(stall_seconds=seconds)
    swap.find_leftovers([directory], name="name", system=system, stall_seconds=seconds)
    space = swap.SwapSpace.open([directory], name="name", nbytes=1 << 16, settings=settings, system=system)
    space.close(remove=True)


@pytest.mark.parametrize("call", ["ask", "truncate"])
def test_whichever_call_a_drive_does_not_answer_a_run_begins_and_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """And whatever that call does in the end, it does before anybody else is let in."""

    def prepare(directory: Path) -> Path:
        """What a run that was killed has left: a lock file, and a file longer than the next one's."""
        directory.mkdir()
        swap.SwapSpace.open([directory], name="name", nbytes=1 << 17).close()
        return directory

    counting, stall = FaultySystemCalls(), Stall()
    only_what_is_held_is_silent(monkeypatch, lambda: stall.entered.is_set())
    lived(prepare(tmp_path / "undisturbed"), counting)
    assert counting.calls[call] > 0
    for number in range(counting.calls[call]):
        directory = prepare(tmp_path / f"{number}")
        system, stall = FaultySystemCalls(), Stall()
        system.inject(call, *[None] * number, stall)
        with pytest.raises(swap.SwapIOError, match=rf"{number}.*ETIMEDOUT.*no progress"):
            lived(directory, system)
        assert stall.entered.is_set()
        stall.release()
        until = time.monotonic() + 60.0
        while True:
            try:
                lived(directory)
                break
            except swap.SwapInUseError:
                assert time.monotonic() < until
                time.sleep(0.01)
        assert list(directory.iterdir()) == []


@pytest.mark.parametrize("weights", [None, "measure"])
def test_what_is_free_is_not_waited_for_on_a_silent_drive(
    tmp_path: Path, weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, answered = threading.Event(), list[str]()

    class Silent(swap.SystemCalls):
        def free_bytes(self, path: str) -> int:
            gate.wait(30)
            answered.append(path)
            raise OSError(errno.EIO, "too late")

    monkeypatch.setattr(swap.probe, "PROBE_BYTES", 1 << 16)
    settings = swap.EngineSettings(stall_seconds=1.0)
    with pytest.raises(swap.SwapIOError, match=rf"{tmp_path.name}.*ETIMEDOUT.*no progress"):
        swap.SwapSpace.open(
            [tmp_path], name="name", nbytes=1 << 16, weights=weights, settings=settings, system=Silent()
        )
    assert answered == []
    gate.set()


def test_looking_for_who_holds_a_directory_on_a_silent_drive_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with swap.SwapSpace.open([tmp_path], name="name", nbytes=1 << 16):
        system, stall = FaultySystemCalls(), Stall()
        only_what_is_held_is_silent(monkeypatch, stall.entered.is_set)
        system.inject("ask", stall)
        with pytest.raises(swap.SwapIOError, match=r"name\.lock.*ETIMEDOUT.*no progress"):
            swap.find_leftovers([tmp_path], name="name", system=system, stall_seconds=0.05)
        stall.release()


@pytest.mark.parametrize("out", ["removal", "transfer"])
def test_closing_what_a_call_is_out_on_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    """A file system in user space, or over a network, closes a file when that call has ended."""
    system, call, closing = FaultySystemCalls(), Stall(), Stall()
    only_what_is_held_is_silent(monkeypatch, call.entered.is_set)
    settings = swap.EngineSettings(stall_seconds=1.0)
    space = swap.SwapSpace.open([tmp_path], name="name", nbytes=4096, settings=settings, system=system)
    system.inject("close", closing)
    if out == "transfer":
        system.inject("pwritev", call)
        space.start_write(space.allocate(4096), swap.AlignedBuffer(4096).view)
        assert call.entered.wait(30)
    else:
        system.inject("ask", call)
    with pytest.raises(swap.SwapError, match="did not answer" if out == "transfer" else "ETIMEDOUT"):
        space.close(remove=True)
    assert call.entered.is_set()
    assert closing.entered.is_set()
    with pytest.raises(swap.SwapInUseError):
        swap.SwapSpace.open([tmp_path], name="name", nbytes=4096)
    call.release()
    closing.release()


def test_where_no_thread_can_be_started_what_was_made_is_removed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads(monkeypatch)
    space = swap.SwapSpace.open([tmp_path], name="name", nbytes=4096)
    threads.refused = float("inf")
    space.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_measuring_a_silent_drive_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, stall = FaultySystemCalls(), Stall()
    only_what_is_held_is_silent(monkeypatch, stall.entered.is_set)
    system.inject("open", stall)
    with pytest.raises(swap.SwapIOError, match=r"name\.probe\.lock.*ETIMEDOUT"):
        measure(tmp_path, name="name", settings=swap.EngineSettings(stall_seconds=1.0), system=system)
    stall.release()


def test_a_short_answer_is_passed_on(tmp_path: Path) -> None:
    system = FaultySystemCalls()
    calls = PatientSystemCalls(system, 30.0)
    fd = calls.open(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT)
    system.inject("pwritev", Short(4096))
    assert calls.pwritev(fd, memoryview(bytes(8192)), 0) == 4096
    calls.close(fd)


class Threads:
    """A system that starts no thread, for as many attempts as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused = 0.0
        start = threading.Thread.start

        def limited(thread: threading.Thread) -> None:
            if self.refused > 0:
                self.refused -= 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)


def test_a_limit_on_threads_is_waited_for_and_is_no_answer_of_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads(monkeypatch)
    with swap.SwapSpace.open([tmp_path], name="r0", nbytes=4096) as space:
        store = swap.CommitStore([tmp_path], name="r0")
        threads.refused = 3
        store.write(1, [], {}, space=space)
        threads.refused = float("inf")
        with pytest.raises(swap.SwapIOError, match=r"EAGAIN.*short of threads.*ulimit -u"):
            store.write(2, [], {}, space=space)
        threads.refused = 0
        store.write(2, [], {}, space=space)
        latest = store.read_latest()
        assert latest is not None
        assert latest.generation == 2
