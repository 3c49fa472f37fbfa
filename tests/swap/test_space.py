"""The swap space: placement, extents, sync, closing."""

import errno
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from doubles import FaultySystemCalls, Stall, StepBackend
from doubles_silence import only_what_is_held_is_silent

import swap
from swap import AlignedBuffer, EngineSettings, SwapFullError, SwapSpace
from swap.backends import threads
from swap.extents import Extent, Piece
from swap.manifest import Manifest, pack

MIB = 1 << 20


def test_allocation_is_rounded_up_and_spread_over_directories(tmp_path: Path) -> None:
    directories = [tmp_path / str(index) for index in range(3)]
    for directory in directories:
        directory.mkdir()
    with SwapSpace.open(directories, name="r0", nbytes=3 * MIB) as space:
        extents = [space.allocate(5000) for _ in range(6)]
        assert all(extent.nbytes == 8192 for extent in extents)
        assert [extent.pieces[0].directory for extent in extents] == [0, 1, 2, 0, 1, 2]
        assert [d.allocated for d in space.statistics().directories] == [16384] * 3
        for extent in extents:
            space.free(extent)
        statistics = space.statistics()
        assert (statistics.allocated, statistics.high_water, statistics.nbytes) == (0, 6 * 8192, 3 * MIB)
        assert [directory.weight for directory in statistics.directories] == [1 / 3] * 3
        assert space.allocate(1).nbytes == 4096


def test_a_space_can_be_driven_by_hand(tmp_path: Path) -> None:
    backend = StepBackend()
    with SwapSpace.open([tmp_path], name="r0", nbytes=MIB, backend=backend) as space:
        source, target = AlignedBuffer(8192), AlignedBuffer(8192)
        source.view[:] = b"ab" * 4096
        extent = space.allocate(8192)
        written = space.start_write(extent, source.view)
        assert not written.done
        backend.run()
        space.start_read(extent, target.view)
        backend.run()
        assert source.view == target.view
        statistics = space.statistics()
        (device,) = statistics.engine.devices
        assert (device.device, device.bytes_read, device.bytes_written) == (
            statistics.directories[0].device,
            8192,
            8192,
        )
        assert 0 < device.seconds_busy < 60


def test_kept_data_can_be_claimed_and_read(tmp_path: Path) -> None:
    with AlignedBuffer(8192) as source, AlignedBuffer(8192) as target:
        source.view[:] = os.urandom(8192)
        with SwapSpace.open([tmp_path], name="r0", nbytes=MIB) as space:
            space.allocate(4096)
            extent = space.allocate(8192)
            space.start_write(extent, source.view).wait(30)
        with SwapSpace.open([tmp_path], name="r0", nbytes=MIB, keep=True) as space:
            space.claim(extent)
            with pytest.raises(swap.SwapError, match="cannot be claimed"):
                space.claim(extent)
            assert space.statistics().high_water == 8192
            read = space.start_read(extent, target.view, checksum=True)
            read.wait(30)
            assert read.checksum == swap.checksum(source.view)
            space.free(extent)
            assert space.statistics().directories[0].largest_hole == MIB
        assert source.view == target.view


def test_of_an_extent_that_is_in_use_in_part_nothing_is_claimed(tmp_path: Path) -> None:
    directories = [tmp_path / str(index) for index in range(2)]
    for directory in directories:
        directory.mkdir()
    with SwapSpace.open(directories, name="r0", nbytes=8 * MIB) as space:
        whole = space.allocate(4 * MIB)
        assert [piece.directory for piece in whole.pieces] == [0, 1]
        space.free(whole)
        second = Extent(whole.pieces[1:])
        space.claim(second)
        with pytest.raises(swap.SwapError, match="cannot be claimed"):
            space.claim(whole)
        assert space.statistics().allocated == second.nbytes
        space.free(second)
        space.claim(whole)


def test_a_full_space_says_how_full(tmp_path: Path) -> None:
    with SwapSpace.open([tmp_path], name="r0", nbytes=16384) as space:
        first, middle, _last = (space.allocate(4096) for _ in range(3))
        space.free(first)
        with pytest.raises(SwapFullError, match="extent of 8192 bytes: 8192 bytes are free, 4096 of them in one"):
            space.allocate(8192)
        space.free(middle)
        assert space.allocate(8192).nbytes == 8192


def test_a_stale_extent_is_refused(tmp_path: Path) -> None:
    with SwapSpace.open([tmp_path], name="r0", nbytes=MIB) as space, AlignedBuffer(4096) as buffer:
        extent = space.allocate(4096)
        space.free(extent)
        with pytest.raises(swap.SwapError, match="not allocated"):
            space.start_read(extent, buffer.view)
        with pytest.raises(swap.SwapError, match="not allocated"):
            space.free(extent)


@pytest.mark.parametrize("directory", [1, -1])
def test_an_extent_of_a_space_with_more_directories_is_refused(tmp_path: Path, directory: int) -> None:
    """And nothing of it is freed, read or taken."""
    with SwapSpace.open([tmp_path], name="r0", nbytes=MIB) as space, AlignedBuffer(8192) as buffer:
        own = space.allocate(4096)
        foreign = Extent((*own.pieces, Piece(directory, own.pieces[0].offset, 4096)))
        for use in (space.free, lambda extent: space.start_read(extent, buffer.view)):
            with pytest.raises(swap.SwapError, match="belongs to another"):
                use(foreign)
        with pytest.raises(swap.SwapError, match="outside this space"):
            space.claim(Extent((Piece(0, 8192, 4096), Piece(directory, 16384, 4096))))
        assert space.statistics().allocated == 4096
        space.free(own)


def test_a_buffer_of_another_length_is_refused(tmp_path: Path) -> None:
    with SwapSpace.open([tmp_path], name="r0", nbytes=MIB) as space, AlignedBuffer(8192) as buffer:
        with pytest.raises(ValueError, match="expected a buffer of 4096 bytes"):
            space.start_write(space.allocate(4096), buffer.view)


@pytest.mark.parametrize("name", ["with space", "ümlaut-日本", "new\nline", "quote'\"", "percent%s{}", "-dash"])
def test_paths_with_odd_characters(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    directory.mkdir()
    for backend in ("threads", "aiofiles"):
        settings = EngineSettings(backend=backend)
        with SwapSpace.open([directory], name=name, nbytes=MIB, settings=settings) as space:
            with AlignedBuffer(4096) as buffer:
                space.start_write(space.allocate(4096), buffer.view).wait(30)
                space.close(remove=True)
    assert list(directory.iterdir()) == []


def test_a_path_that_is_not_text(tmp_path: Path) -> None:
    directory = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    try:
        directory.mkdir()
    except OSError:
        pytest.skip("this file system wants text for names")
    with SwapSpace.open([directory], name="r0", nbytes=MIB) as space:
        with pytest.raises(SwapFullError):
            space.allocate(2 * MIB)
        with pytest.raises(swap.SwapInUseError):
            SwapSpace.open([directory], name="r0", nbytes=MIB)


def test_a_failure_in_the_last_directory_gives_the_first_back(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(swap.SwapIOError, match="ENOENT"):
        SwapSpace.open([tmp_path / "a", tmp_path / "absent"], name="r0", nbytes=MIB)
    assert list((tmp_path / "a").iterdir()) == []
    with pytest.raises(ValueError, match="twice"):
        SwapSpace.open([tmp_path / "a", tmp_path / "." / "a"], name="r0", nbytes=MIB)
    with pytest.raises(ValueError, match="one or more"):
        SwapSpace.open([], name="r0", nbytes=MIB)
    with pytest.raises(ValueError, match="positive"):
        SwapSpace.open([tmp_path], name="r0", nbytes=0)


@pytest.mark.parametrize("reserves", [True, False])
@pytest.mark.parametrize("nbytes", [MIB // 2, 2 * MIB])
def test_before_a_space_begins_what_an_earlier_run_left_is_there(tmp_path: Path, reserves: bool, nbytes: int) -> None:
    """Whether its file is to become shorter or longer, and the file system reserves room or not."""
    SwapSpace.open([tmp_path], name="r0", nbytes=MIB).close()
    manifest = tmp_path / f"r0.{0:020d}.manifest"
    before = Path(tmp_path / "r0.swapfile").read_bytes()
    system = FaultySystemCalls()
    if not reserves:
        system.always("fallocate", errno.EOPNOTSUPP)
    for begins in (False, True):
        manifest.write_bytes(packed())
        space = SwapSpace.open([tmp_path], name="r0", nbytes=nbytes, system=system, begin=False)
        with pytest.raises(swap.SwapError, match="has not begun: what an earlier run left would be written over"):
            space.allocate(4096)
        assert Path(tmp_path / "r0.swapfile").read_bytes()[: len(before)] == before
        assert manifest.exists()
        if begins:
            space.begin()
            space.begin()
            space.allocate(4096)
        space.close(remove=begins)
        assert manifest.exists() != begins
        if not begins:
            assert Path(tmp_path / "r0.swapfile").read_bytes() == before, "and as long as it was"
            SwapSpace.open([tmp_path], name="r0", nbytes=MIB, keep=True).close()
    assert list(tmp_path.iterdir()) == []


def packed() -> bytes:
    return pack(Manifest(0, bytes(16), (MIB,), (), {}, 0.0))


def test_a_space_that_has_not_begun_leaves_no_file_that_it_made(tmp_path: Path) -> None:
    SwapSpace.open([tmp_path], name="r0", nbytes=MIB, begin=False).close()
    assert list(tmp_path.iterdir()) == []


def test_a_space_that_cannot_begin_is_closed(tmp_path: Path) -> None:
    (tmp_path / f"r0.{0:020d}.manifest").write_bytes(b"a thesis")
    with pytest.raises(swap.FormatError, match="left alone"):
        SwapSpace.open([tmp_path], name="r0", nbytes=MIB)
    assert [path.suffix for path in tmp_path.iterdir()] == [".manifest"]
    (tmp_path / f"r0.{0:020d}.manifest").unlink()
    SwapSpace.open([tmp_path], name="r0", nbytes=MIB).close(remove=True)


def test_everything_after_close_is_a_clear_error(tmp_path: Path) -> None:
    space = SwapSpace.open([tmp_path], name="r0", nbytes=MIB)
    extent = space.allocate(4096)
    space.close()
    space.close(remove=True)
    with AlignedBuffer(4096) as buffer:
        for use in (
            lambda: space.allocate(4096),
            lambda: space.start_read(extent, buffer.view),
            lambda: space.start_write(extent, buffer.view),
            lambda: space.claim(extent),
            space.make_durable,
        ):
            with pytest.raises(swap.SwapClosedError):
                use()
    space.free(extent)
    assert space.statistics().allocated == 0


def test_closing_reports_an_error_and_still_closes_every_file(tmp_path: Path) -> None:
    space = SwapSpace.open([tmp_path], name="r0", nbytes=MIB, settings=EngineSettings(backend="inline"))

    def broken(_: swap.Request) -> None:
        raise RuntimeError("mine")

    with AlignedBuffer(4096) as buffer:
        space.start_write(space.allocate(4096), buffer.view, on_done=broken)
        with pytest.raises(swap.SwapError, match="mine"):
            space.close(remove=True)
    assert list(tmp_path.iterdir()) == []


class _BadClose(swap.SystemCalls):
    """Descriptors are closed, and an error is reported, as a file system over a network may do."""

    def __init__(self) -> None:
        self.path = "none"
        self.error: BaseException = OSError(errno.EIO, os.strerror(errno.EIO))

    def close(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
        super().close(fd)
        if path.endswith(self.path):
            raise self.error


@pytest.mark.parametrize("path", ["a/r0.swapfile", "a/r0.lock"])
@pytest.mark.parametrize("remove", [False, True])
def test_an_error_in_closing_a_file_leaves_no_other_open_and_no_lock(
    tmp_path: Path, path: str, *, remove: bool
) -> None:
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    system = _BadClose()
    space = SwapSpace.open(directories, name="r0", nbytes=MIB, system=system)
    system.path = path
    with pytest.raises(swap.SwapIOError, match=r"close in .*r0.* failed: .* \[EIO\]"):
        space.close(remove=remove)
    assert any((tmp_path / "b").iterdir()) != remove
    SwapSpace.open(directories, name="r0", nbytes=MIB, keep=not remove).close()


def test_an_interrupt_in_closing_a_file_leaves_no_other_open_and_no_lock(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    system = _BadClose()
    space = SwapSpace.open(directories, name="r0", nbytes=MIB, system=system)
    system.path, system.error = "a/r0.swapfile", KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        space.close()
    space.close()
    SwapSpace.open(directories, name="r0", nbytes=MIB, keep=True).close()


def test_where_no_thread_waits_for_a_late_call_its_locks_stay_and_closing_says_what_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    system, stall = FaultySystemCalls(), Stall()
    settings = EngineSettings(stall_seconds=1)
    only_what_is_held_is_silent(monkeypatch, stall.entered.is_set)
    space = SwapSpace.open(directories, name="r0", nbytes=MIB, settings=settings, system=system)
    system.inject("preadv", stall)
    space.start_read(space.allocate(4096), AlignedBuffer(4096).view)
    assert stall.entered.wait(30)

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(swap.SwapTimeoutError, match="still in flight"):
        space.close()
    monkeypatch.undo()
    for directory in directories:
        with pytest.raises(swap.SwapInUseError):
            SwapSpace.open([directory], name="r0", nbytes=MIB)
    stall.release()


def test_an_interrupt_while_a_silent_drive_is_waited_for_lets_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that was waited for counted as ended: `threading.Thread.join` of Python 3.11 and 3.12."""
    system, stall = FaultySystemCalls(), Stall()
    space = SwapSpace.open([tmp_path], name="r0", nbytes=MIB, system=system)
    system.inject("pwritev", stall)
    space.start_write(space.allocate(4096), AlignedBuffer(4096).view)
    assert stall.entered.wait(30)
    interrupt = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    join = threads.join

    def interrupted(those: Sequence[threading.Thread], seconds: float) -> None:
        interrupt.start()
        join(those, seconds)

    monkeypatch.setattr(threads, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        space.close()
    interrupt.join()
    with pytest.raises(swap.SwapInUseError):
        SwapSpace.open([tmp_path], name="r0", nbytes=MIB)
    stall.release()


def test_files_are_given_back_whatever_closing_one_of_them_raises(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in "abc"]
    for directory in directories[:2]:
        directory.mkdir()
    system = _BadClose()
    system.path = "a/r0.lock"
    with pytest.raises(swap.SwapIOError, match=r"open in .*c' failed"):
        SwapSpace.open(directories, name="r0", nbytes=MIB, system=system)
    SwapSpace.open(directories[:2], name="r0", nbytes=MIB).close()


@pytest.mark.parametrize("path", ["none", "r0.lock"])
def test_an_interrupt_while_closing_gives_the_directories_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    system = _BadClose()
    space = SwapSpace.open([tmp_path], name="r0", nbytes=MIB, system=system)
    system.path = path
    backend = space.engine.backend

    def interrupted(timeout: float) -> None:
        type(backend).close(backend, timeout)
        raise KeyboardInterrupt

    monkeypatch.setattr(backend, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        space.close()
    space.close()
    SwapSpace.open([tmp_path], name="r0", nbytes=MIB, keep=True).close()
