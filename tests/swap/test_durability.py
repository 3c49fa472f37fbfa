"""Files are made durable on all devices at once; what fails, and what is silent, is named."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from doubles import FaultySystemCalls, Stall
from doubles_silence import only_what_is_held_is_silent

from swap import EngineSettings, SwapIOError, SwapSpace
from swap.durability import sync_files

MIB = 1 << 20


@dataclass
class Device:
    """A file on a device of its own, which tells what is asked of it."""

    device: int
    action: Callable[[], None] = lambda: None
    asked: list[str] = field(default_factory=list)

    def sync(self) -> None:
        self.asked.append("data")
        self.action()

    def sync_name(self) -> None:
        self.asked.append("name")


def failing(path: str, code: int) -> Callable[[], None]:
    def fail() -> None:
        raise SwapIOError("sync", path, errno=code)

    return fail


def test_no_device_waits_for_another() -> None:
    all_have_begun = threading.Barrier(3)
    files = [Device(number, lambda: (all_have_begun.wait(60), None)[1]) for number in range(3)]
    sync_files(files, names=False)  # one after another none would ever return
    assert [file.asked for file in files] == [["data"]] * 3


def test_files_on_one_device_follow_each_other_and_names_are_synced_too() -> None:
    order: list[int] = []
    files = [Device(7, lambda number=number: order.append(number)) for number in range(3)]
    sync_files(files, names=True)
    assert order == [0, 1, 2]
    assert [file.asked for file in files] == [["data", "name"]] * 3


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_on_one_device_is_raised_when_all_have_ended(bad: int) -> None:
    ended = threading.Event()
    files = [Device(0, ended.set), Device(1, ended.set)]
    files[bad].action = failing(f"/drive{bad}/r0.swapfile", errno.EIO)
    after = Device(bad)
    with pytest.raises(SwapIOError, match=rf"sync in '/drive{bad}/r0.swapfile' failed: .*\[EIO\]"):
        sync_files([*files, after], names=False)
    assert ended.is_set()
    assert after.asked == []  # nothing more is asked of a device that has failed


def test_errors_on_two_devices_are_both_named() -> None:
    files = [
        Device(0, failing("/drive0/r0.swapfile", errno.EIO)),
        Device(1, failing("/drive1/r0.swapfile", errno.ENXIO)),
    ]
    with pytest.raises(SwapIOError) as raised:
        sync_files(files, names=False)
    assert (raised.value.path, raised.value.errno) == ("/drive0/r0.swapfile", errno.EIO)
    for expected in ("/drive0/r0.swapfile", "EIO", "/drive1/r0.swapfile", "ENXIO"):
        assert expected in str(raised.value)


def test_an_error_that_is_no_ones_drive_is_raised_as_it_is() -> None:
    def fail() -> None:
        raise MemoryError("no thread can be started")

    with pytest.raises(MemoryError, match="no thread"):
        sync_files([Device(0), Device(1, fail)], names=False)


def two_drives(tmp_path: Path, *, stall_seconds: float) -> tuple[SwapSpace, FaultySystemCalls]:
    """A space over two directories, which counts as one over two devices."""
    system = FaultySystemCalls()
    directories = [tmp_path / "drive0", tmp_path / "drive1"]
    for directory in directories:
        directory.mkdir()
    settings = EngineSettings(stall_seconds=stall_seconds)
    space = SwapSpace.open(directories, name="r0", nbytes=MIB, settings=settings, system=system)
    space._files[1].device += 1
    return space, system


def test_a_space_syncs_its_devices_at_once(tmp_path: Path) -> None:
    space, system = two_drives(tmp_path, stall_seconds=60)
    space.make_durable()
    stalls = [Stall(), Stall()]
    system.inject("fdatasync", *stalls)
    thread = threading.Thread(target=space.make_durable)
    thread.start()
    for stall in stalls:
        assert stall.entered.wait(60)  # neither has been answered
    for stall in stalls:
        stall.release()
    thread.join(60)
    assert not thread.is_alive()
    space.close(remove=True)


def test_one_silent_drive_is_named_and_no_sync_succeeds_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall = Stall()
    only_what_is_held_is_silent(monkeypatch, stall.entered.is_set)
    space, system = two_drives(tmp_path, stall_seconds=1.0)
    real = system.fdatasync

    def fdatasync(fd: int) -> None:
        if fd == space._files[1].fileno():
            stall.hold()
        real(fd)

    system.fdatasync = fdatasync  # type: ignore[method-assign]
    with pytest.raises(SwapIOError, match=r"drive1.*ETIMEDOUT"):
        space.make_durable()
    assert stall.entered.is_set()
    stall.release()
    with pytest.raises(SwapIOError, match=r"drive1.*ETIMEDOUT"):
        space.make_durable()
    space.close(remove=True)


def test_where_no_thread_can_be_started_devices_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    files = [Device(number) for number in range(2)] + [Device(2, failing("/c", errno.EIO))]
    with pytest.raises(SwapIOError, match="/c"):
        sync_files(files, names=False)
    assert [file.asked for file in files] == [["data"]] * 3
