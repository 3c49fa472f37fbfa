"""Swap files on real file systems: permissions, locks, full disks, foreign files, O_DIRECT and its absence."""

import errno
import os
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles import FaultySystemCalls, Short, start_write

import swap
from swap import AlignedBuffer, EngineSettings, FormatError, SwapFile, SwapFullError, SwapIOError, SwapSpace
from swap.file_systems import free_together
from swap.syscalls import SystemCalls
from tiermem.cli.disk import capacity_bytes

MIB = 1 << 20


def open_file(directory: Path, nbytes: int = MIB, **options: object) -> SwapFile:
    return SwapFile.open(directory, name="r0", nbytes=nbytes, **options)  # type: ignore[arg-type]


def write_stamp(file: SwapFile, stamp: bytes) -> None:
    with swap.Engine(swap.EngineSettings(backend="inline")) as engine, AlignedBuffer(4096) as buffer:
        buffer.view[:] = stamp * 4096
        start_write(engine, file, swap.DATA_OFFSET, buffer.view).wait()


def test_a_swap_file_is_private_preallocated_and_removed(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    found = os.stat(file.path)
    assert {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {
        ".swapfile": 0o600,
        ".lock": 0o600,
    }
    assert found.st_size == MIB + swap.DATA_OFFSET
    assert found.st_blocks * 512 >= found.st_size
    assert file.reserved
    file.close(remove=True)
    file.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_in_the_directory_is_refused(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    with pytest.raises(swap.SwapInUseError, match=f"in use by process {os.getpid()}"):
        open_file(tmp_path)
    code = (
        "import sys, pathlib, swap\n"
        "try: swap.SwapFile.open(pathlib.Path(sys.argv[1]), name='r0', nbytes=4096)\n"
        "except swap.SwapInUseError as error: sys.exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=os.getcwd(), check=False).returncode == 7
    other = SwapFile.open(tmp_path, name="r1", nbytes=4096)  # another rank of the same run
    other.close()
    file.close()
    open_file(tmp_path).close()


def test_a_run_whose_lock_file_somebody_has_removed_is_not_disturbed(tmp_path: Path) -> None:
    """What clears directories of old files (systemd-tmpfiles) begins with it: it is never written again."""
    file = open_file(tmp_path)
    write_stamp(file, b"k")
    Path(tmp_path / "r0.lock").unlink()
    assert swap.find_leftovers([tmp_path], name="r0").in_use
    for keep in (False, True):
        with pytest.raises(swap.SwapInUseError, match="in use by process unknown"):
            open_file(tmp_path, keep=keep)
    assert Path(file.path).read_bytes()[swap.DATA_OFFSET :][:4096] == b"k" * 4096
    file.close()
    open_file(tmp_path, keep=True).close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_forked_child_does_not_keep_the_directory_and_does_not_give_it_back(tmp_path: Path, direct: bool) -> None:
    """Such as workers of a data loader that live on: they have the descriptors."""
    code = (
        "import os, pathlib, sys, swap\n"
        "from swap.syscalls import SystemCalls\n"
        "if sys.argv[2] == 'False': os.O_DIRECT = 0\n"
        "take = lambda: swap.SwapFile.open(pathlib.Path(sys.argv[1]), name='r0', nbytes=4096)\n"
        "file = take()\n"
        "read, write = os.pipe()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os.close(write)\n"
        "    file.close()\n"
        "    os.read(read, 1)\n"
        "    os._exit(0)\n"
        "other = os.fork()\n"
        "if not other:\n"
        "    os.close(write)\n"
        "    os.read(read, 1)\n"
        "    os._exit(0)\n"
        "try: take(); sys.exit(8)\n"
        "except swap.SwapInUseError: pass\n"
        "file.close()\n"
        "take().close()\n"
        "os.close(write)\n"
        "os.waitpid(child, 0); os.waitpid(other, 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(direct)],
        cwd=os.getcwd(),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("replaced", ["", "another", "a link to where it is now"])
def test_what_is_in_a_file_that_somebody_has_removed_is_not_called_durable(tmp_path: Path, replaced: str) -> None:
    file = open_file(tmp_path)
    file.sync()
    moved = Path(file.path).rename(tmp_path / "moved")
    if replaced == "another":
        Path(file.path).write_bytes(b"another")
    elif replaced:
        Path(file.path).symlink_to(moved)
    for _ in range(2):
        with pytest.raises(SwapIOError, match="somebody has removed this file, or put another in its place"):
            file.sync()
    file.close(remove=True)
    assert os.path.lexists(file.path) == bool(replaced)


def test_what_is_in_a_file_that_somebody_has_cut_short_is_not_called_durable(tmp_path: Path) -> None:
    """Also where a write has made it as long as it was: what was between reads as zeros."""
    file = open_file(tmp_path)
    if not file.reserved:
        file.close()
        pytest.skip("this file system reserves nothing")
    file.sync()
    os.truncate(file.path, 4096)
    os.truncate(file.path, 4096 + file.nbytes)
    for _ in range(2):
        with pytest.raises(SwapIOError, match=r"somebody has cut this file short.*go on from a snapshot"):
            file.sync()
    file.close()


def test_what_is_in_a_file_whose_beginning_somebody_has_written_over_is_not_called_durable(tmp_path: Path) -> None:
    """The next run would refuse it."""
    file = open_file(tmp_path)
    file.sync()
    with open(file.path, "r+b") as other:
        header = other.read(4096)
        other.seek(20)
        other.write(b"x")
    for _ in range(2):
        with pytest.raises(SwapIOError, match="somebody has written over the beginning of this file"):
            file.sync()
    with open(file.path, "r+b") as other:
        other.write(header)
    file.sync()
    file.close()


def test_a_killed_run_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys, os, pathlib, swap\n"
        "file = swap.SwapFile.open(pathlib.Path(sys.argv[1]), name='r0', nbytes=4096)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=os.getcwd(), check=False).returncode == -9
    open_file(tmp_path, nbytes=4096, keep=True).close()


def test_data_are_kept_only_when_asked(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    write_stamp(file, b"k")
    file.close()
    file = open_file(tmp_path, keep=True)
    assert Path(file.path).read_bytes()[swap.DATA_OFFSET :][:4096] == b"k" * 4096
    file.close()
    file = open_file(tmp_path, nbytes=4 * MIB)
    assert os.stat(file.path).st_size == 4 * MIB + swap.DATA_OFFSET
    file.close()
    file = open_file(tmp_path, nbytes=MIB)
    assert os.stat(file.path).st_size == MIB + swap.DATA_OFFSET
    file.close()
    with pytest.raises(FormatError, match=f"at least {2 * MIB} bytes of data, found {MIB}"):
        open_file(tmp_path, nbytes=2 * MIB, keep=True)


def test_keeping_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="found none"):
        open_file(tmp_path, keep=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"my thesis", b"x" * 100_000, b"tiermem-swap", b"tiermem-swapfile"])
def test_a_foreign_or_damaged_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r0.swapfile"
    path.write_bytes(content)
    for keep in (False, True):
        with pytest.raises(FormatError, match="left alone"):
            open_file(tmp_path, keep=keep)
    assert path.read_bytes() == content


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    file.close()
    whole = bytearray(Path(file.path).read_bytes())
    whole[24] ^= 1
    Path(file.path).write_bytes(whole)
    with pytest.raises(FormatError, match="damaged"):
        open_file(tmp_path)
    assert Path(file.path).read_bytes() == whole


def test_an_empty_file_is_what_a_run_that_died_at_once_leaves(tmp_path: Path) -> None:
    (tmp_path / "r0.swapfile").touch()
    open_file(tmp_path).close()


def test_a_foreign_lock_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "r0.lock").write_text("poetry")
    with pytest.raises(FormatError, match="lock file"):
        open_file(tmp_path)
    assert (tmp_path / "r0.lock").read_text() == "poetry"


def test_a_lock_file_that_its_holder_removes_meanwhile_is_made_anew(tmp_path: Path) -> None:
    class Late(SystemCalls):
        def lock(self, fd: int) -> None:
            while other:
                other.pop().close(remove=True)
            super().lock(fd)

    other = [open_file(tmp_path)]
    before = len(os.listdir("/proc/self/fd"))
    file = open_file(tmp_path, system=Late())
    assert not other
    with pytest.raises(swap.SwapInUseError, match=f"in use by process {os.getpid()}"):
        open_file(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    file.close(remove=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_lock_that_cannot_be_signed_leaves_no_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    descriptors = len(os.listdir("/proc/self/fd"))
    for there in ([], ["r0.lock"]):  # which an earlier run has left
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", refuse)
            with pytest.raises(SwapIOError, match=f"lock.*r0.lock.*{errno.errorcode[code]}"):
                open_file(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == there
        file = open_file(tmp_path)  # nobody holds it
        file.close()
        (tmp_path / "r0.swapfile").unlink()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_lock_file_that_a_power_cut_has_emptied_is_ours_still(tmp_path: Path) -> None:
    open_file(tmp_path).close()
    lock = tmp_path / "r0.lock"
    whole = lock.read_bytes()
    lock.write_bytes(bytes(len(whole) + 5))
    file = open_file(tmp_path)
    assert lock.read_bytes() == whole
    file.close(remove=True)


def test_links_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for name in ("r0.swapfile", "r0.lock"):
        (tmp_path / name).symlink_to(victim)
        with pytest.raises(SwapIOError, match="links are not followed"):
            open_file(tmp_path)
        (tmp_path / name).unlink()
    assert victim.read_bytes() == b"precious"


def test_a_directory_or_fifo_in_the_way_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "r0.swapfile").mkdir()
    with pytest.raises(swap.SwapError, match=r"r0.swapfile"):
        open_file(tmp_path)
    (tmp_path / "r0.swapfile").rmdir()
    os.mkfifo(tmp_path / "r0.swapfile")
    with pytest.raises(FormatError, match="something else"):
        open_file(tmp_path)


def test_a_missing_directory_and_a_file_instead_of_one(tmp_path: Path) -> None:
    with pytest.raises(SwapIOError, match=r"absent.*ENOENT.*create the directory") as caught:
        open_file(tmp_path / "absent")
    assert caught.value.errno == errno.ENOENT
    (tmp_path / "plain").touch()
    with pytest.raises(SwapIOError, match="ENOTDIR"):
        open_file(tmp_path / "plain")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EMFILE])
def test_a_directory_that_cannot_be_written(tmp_path: Path, code: int) -> None:
    system = FaultySystemCalls()
    system.always("open", code)
    with pytest.raises(SwapIOError, match=errno.errorcode[code]):
        open_file(tmp_path, system=system)


@pytest.mark.parametrize("name", ["", "a/b", "a\0b"])
def test_odd_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="file name"):
        SwapFile.open(tmp_path, name=name, nbytes=4096)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_found_at_the_start(tmp_path: Path, code: int) -> None:
    system = FaultySystemCalls()
    system.always("fallocate", code)
    with pytest.raises(SwapFullError, match=rf"cannot reserve {MIB + 4096} bytes .* \d+ bytes are free"):
        open_file(tmp_path, system=system)
    assert list(tmp_path.iterdir()) == []


def test_what_is_free_is_said_without_what_was_reserved_in_vain(tmp_path: Path) -> None:
    class SmallDisk(swap.SystemCalls):
        """As ext4 does: what there is is reserved, and then the call fails."""

        def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
            super().fallocate(fd, offset, 5 * MIB)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def free_bytes(self, path: str) -> int:
            return 5 * MIB - sum(entry.stat().st_size for entry in os.scandir(path))

    with pytest.raises(SwapFullError, match=r"cannot reserve .*: (52\d{5}|5242880) bytes are free"):
        open_file(tmp_path, nbytes=8 * MIB, system=SmallDisk())
    (tmp_path / "r0.swapfile").touch()  # of a run that died at once
    with pytest.raises(SwapFullError):
        open_file(tmp_path, nbytes=8 * MIB, system=SmallDisk())
    assert os.stat(tmp_path / "r0.swapfile").st_size == 0


def test_what_does_not_fit_takes_nothing_of_what_there_is(tmp_path: Path) -> None:
    """Piece after piece it would be taken until the disk is full; of tmpfs, which may be larger than memory, that."""
    system = FaultySystemCalls()
    system.free_bytes = lambda _: 600 * MIB  # type: ignore[method-assign]
    reserved = []
    system.fallocate = lambda fd, offset, nbytes: reserved.append(nbytes)  # type: ignore[method-assign]
    with pytest.raises(SwapFullError, match=f"cannot reserve .*: {600 * MIB} bytes are free"):
        SwapSpace.open([tmp_path], name="r0", nbytes=1 << 40, system=system)
    assert reserved == []
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_does_not_cost_an_earlier_file(tmp_path: Path) -> None:
    open_file(tmp_path).close()
    system = FaultySystemCalls()
    system.always("fallocate", errno.ENOSPC)
    with pytest.raises(SwapFullError):
        open_file(tmp_path, nbytes=8 * MIB, system=system)
    assert os.stat(tmp_path / "r0.swapfile").st_size == MIB + swap.DATA_OFFSET


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EPERM])
def test_where_space_cannot_be_reserved_the_free_space_is_looked_at(tmp_path: Path, code: int) -> None:
    """The file system cannot, or a sandbox does not let it."""
    system = FaultySystemCalls()
    system.always("fallocate", code)
    file = open_file(tmp_path, system=system)
    assert not file.reserved
    assert os.stat(file.path).st_size == MIB + swap.DATA_OFFSET
    file.close()
    file = open_file(tmp_path, keep=True)
    assert not file.reserved, "a file with holes is known as such by the next run, too"
    file.close(remove=True)
    system.free_bytes = lambda path: 1000  # type: ignore[method-assign]
    with pytest.raises(SwapFullError, match="1000 bytes are free"):
        open_file(tmp_path, system=system)


@pytest.mark.parametrize(
    ("call", "passes", "fault", "match"),
    [
        ("pwritev", 0, errno.EIO, "write.*EIO"),
        ("pwritev", 0, errno.ENOSPC, "cannot reserve"),
        ("pwritev", 0, Short(512), "only 512 bytes"),
        ("preadv", 0, errno.EIO, "read.*EIO"),
        ("fallocate", 0, errno.EIO, "reserve.*EIO"),
        ("lock", 0, errno.ENOLCK, "lock.*r0.lock.*ENOLCK"),
        ("lock", 1, errno.ENOLCK, "lock.*r0.swapfile.*ENOLCK"),
        ("lock", 2, errno.ENOLCK, "lock.*r0.swapfile.*ENOLCK"),
        ("open", 3, errno.EMFILE, "open.*r0.swapfile.*EMFILE"),
    ],
)
def test_a_fault_while_opening_leaves_nothing(
    tmp_path: Path, call: str, passes: int, fault: int | Short, match: str
) -> None:
    """`passes`: how many calls succeed before. The swap file is locked, and opened, a second time for O_DIRECT."""
    before = len(os.listdir("/proc/self/fd"))
    system = FaultySystemCalls()
    system.inject(call, *[None] * passes)
    system.always(call, fault)
    with pytest.raises(swap.SwapError, match=match):
        open_file(tmp_path, system=system)
    assert not (tmp_path / "r0.swapfile").exists()
    assert len(os.listdir("/proc/self/fd")) == before
    open_file(tmp_path).close()


def test_a_descriptor_that_cannot_be_closed_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    """As over a network: it is closed all the same."""

    def lived(system: SystemCalls | None) -> None:
        swap.find_leftovers([tmp_path], name="r0", system=system)
        SwapSpace.open([tmp_path], name="r0", nbytes=MIB, system=system).close()

    class Failing(SystemCalls):
        closed = 0

        def close(self, fd: int) -> None:
            super().close(fd)
            self.closed += 1
            if self.closed == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    lived(None)
    before, number = len(os.listdir("/proc/self/fd")), 0
    lived(counting := Failing())
    assert counting.closed > 5
    for number in range(1, counting.closed + 1):  # noqa: B007 - who closes looks at it
        with pytest.raises(SwapIOError, match=rf"{tmp_path.name}.*EIO"):
            lived(Failing())
        assert len(os.listdir("/proc/self/fd")) == before
        lived(None)


@pytest.mark.parametrize("call", ["open", "preadv", "pwritev", "fsync", "fallocate"])
def test_an_interrupt_while_opening_is_raised_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Wherever a call is interrupted, its frame still has a view of what was to be moved."""
    before = len(os.listdir("/proc/self/fd"))
    system = SystemCalls()

    def interrupted(*arguments: object) -> None:
        kept = [argument[:1] for argument in arguments if isinstance(argument, memoryview)]
        raise KeyboardInterrupt(kept)

    monkeypatch.setattr(system, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_file(tmp_path, system=system)
    assert not (tmp_path / "r0.swapfile").exists()
    assert len(os.listdir("/proc/self/fd")) == before
    open_file(tmp_path).close()


def test_sync_reports_what_the_drive_says(tmp_path: Path) -> None:
    system = FaultySystemCalls()
    file = open_file(tmp_path, system=system)
    file.sync()
    system.inject("fdatasync", errno.EIO)
    with pytest.raises(SwapIOError, match=r"sync.*EIO"):
        file.sync()
    file.close()
    with pytest.raises(swap.SwapClosedError):
        file.sync()


def test_a_file_put_in_our_place_is_not_removed(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    os.unlink(file.path)
    Path(file.path).write_text("someone else's")
    file.close(remove=True)
    assert Path(file.path).read_text() == "someone else's"


def use(space: SwapSpace) -> None:
    with AlignedBuffer(64 << 10) as source, AlignedBuffer(64 << 10) as target:
        source.view[:] = os.urandom(64 << 10)
        extent = space.allocate(64 << 10)
        space.start_write(extent, source.view).wait(30)
        space.make_durable()
        space.start_read(extent, target.view).wait(30)
        assert source.view == target.view


def test_refused_direct_io_falls_back_with_one_warning(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    system = FaultySystemCalls()
    system.refuse_direct = True
    with pytest.warns(swap.DirectIOWarning) as caught:
        space = SwapSpace.open(directories, name="r0", nbytes=MIB, system=system)
    assert len(caught) == 1
    assert not space.direct
    system.inject("preadv", Short(1001), errno.EINTR)  # odd places are fine in a buffered file
    use(space)
    space.close(remove=True)


def test_direct_io_that_only_reads_refuse_is_not_used(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    system = FaultySystemCalls()
    system.inject("preadv", errno.EINVAL)
    file = open_file(tmp_path, system=system)
    assert not file.direct
    write_stamp(file, b"k")
    with pytest.raises(swap.SwapInUseError):
        open_file(tmp_path)
    file.close()
    assert Path(file.path).read_bytes()[swap.DATA_OFFSET :][:4096] == b"k" * 4096
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("keep", [False, True])
def test_direct_io_that_only_writes_refuse_is_not_used(tmp_path: Path, keep: bool) -> None:
    """As mergerfs 2.33 does, which Debian 12 and Ubuntu 24.04 have."""
    if keep:
        file = open_file(tmp_path)
        write_stamp(file, b"k")
        file.close()
    system = FaultySystemCalls()
    system.inject("pwritev", *([] if keep else [None]), errno.EINVAL)
    file = open_file(tmp_path, system=system, keep=keep)
    assert not file.direct
    assert keep == (Path(file.path).read_bytes()[swap.DATA_OFFSET :][:4096] == b"k" * 4096)
    write_stamp(file, b"l")
    file.close()


def test_the_try_of_direct_io_changes_nothing(tmp_path: Path) -> None:
    """Neither where the header is not read whole, or not as it is; nor where the disk has no room left."""

    class Misreading(SystemCalls):
        def preadv(self, fd: int, view: memoryview, offset: int) -> int:
            moved = super().preadv(fd, view, offset)
            view[0] ^= 8
            return moved

    open_file(tmp_path).close()
    before = Path(tmp_path / "r0.swapfile").read_bytes()
    short, full = FaultySystemCalls(), FaultySystemCalls()
    short.inject("preadv", Short(512))
    full.inject("pwritev", errno.ENOSPC)
    for system in (SystemCalls(), short, full, Misreading()):
        file = open_file(tmp_path, keep=True, system=system)
        assert file.direct
        file.close()
        assert Path(file.path).read_bytes() == before


@pytest.mark.filterwarnings("error::swap.DirectIOWarning")
def test_where_that_warning_is_an_error_nothing_stays_open(tmp_path: Path) -> None:
    system = FaultySystemCalls()
    system.refuse_direct = True
    before = threading.enumerate()
    with pytest.raises(swap.DirectIOWarning):
        SwapSpace.open([tmp_path], name="r0", nbytes=MIB, settings=EngineSettings(backend="aiofiles"), system=system)
    assert list(tmp_path.iterdir()) == []
    assert threading.enumerate() == before
    SwapSpace.open([tmp_path], name="r0", nbytes=MIB).close(remove=True)


@pytest.fixture
def memory_directory() -> Iterator[Path]:
    root = Path("/dev/shm")
    if not root.is_dir() or not os.access(root, os.W_OK):
        pytest.skip("no writable /dev/shm on this machine")
    directory = root / f"swap-test-{os.getpid()}"
    directory.mkdir()
    yield directory
    for leftover in directory.iterdir():
        leftover.unlink()
    directory.rmdir()


def test_tmpfs_works_whether_or_not_it_takes_direct_io(memory_directory: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        space = SwapSpace.open([memory_directory], name="r0", nbytes=MIB)
    assert [warning.category for warning in caught] == ([] if space.direct else [swap.DirectIOWarning])
    use(space)
    space.close(remove=True)


def test_a_real_size_limit(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, resource, swap\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try: swap.SwapFile.open(pathlib.Path(sys.argv[1]), name='r0', nbytes=8 << 20)\n"
        "except swap.SwapFullError as error: print(error); sys.exit(7)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=os.getcwd(), check=False, capture_output=True, text=True
    )
    assert found.returncode == 7, found.stderr
    assert f"cannot reserve {(8 << 20) + 4096} bytes" in found.stdout
    assert list(tmp_path.iterdir()) == []


def mounted(directory: Path, mkfs: list[str], nbytes: int) -> Iterator[Path]:
    """A real file system, where the machine lets us have one."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    image, point = directory / "image", directory / "mounted"
    point.mkdir()
    image.write_bytes(b"")
    os.truncate(image, nbytes)
    for command in ([*mkfs, str(image)], ["mount", "-o", "loop", str(image), str(point)]):
        try:
            made = subprocess.run(command, check=False, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip(f"{command[0]} is not installed")
        if made.returncode:
            pytest.skip(f"{command[0]} is not possible here: {made.stderr.strip()}")
    yield point
    subprocess.run(["umount", str(point)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real ext4 file system of 16 MiB."""
    yield from mounted(tmp_path, ["mkfs.ext4", "-q", "-F"], 16 * MIB)


@pytest.fixture
def copying_disk(tmp_path: Path) -> Iterator[Path]:
    """A real btrfs file system of 128 MiB."""
    yield from mounted(tmp_path, ["mkfs.btrfs", "-q"], 128 * MIB)


def check_reserved(disk: Path, nbytes: int) -> None:
    """Others may fill what is left of a small disk: the room was reserved."""
    with SwapSpace.open([disk], name="r0", nbytes=nbytes) as space:
        use(space)
        with open(disk / "other", "wb", buffering=0) as other:
            with pytest.raises(OSError, match="No space"):
                other.writelines(bytes(MIB) for _ in range(256))
        use(space)


def first_block(path: str) -> str:
    """Where on the disk a file's data begin, as `filefrag` tells it."""
    found = subprocess.run(["filefrag", "-v", path], check=True, capture_output=True, text=True)
    return next(line.split()[3] for line in found.stdout.splitlines() if line.split()[:1] == ["1:"])


def test_a_swap_file_on_btrfs_is_overwritten_in_place(copying_disk: Path) -> None:
    file = open_file(copying_disk, nbytes=8 * MIB)
    places = []
    for stamp in (b"a", b"b", b"c"):
        write_stamp(file, stamp)
        file.sync()
        places.append(first_block(file.path))
    file.close()
    assert len(set(places)) == 1, places


def test_room_reserved_on_btrfs_is_there_when_others_fill_the_disk(copying_disk: Path) -> None:
    check_reserved(copying_disk, 32 * MIB)


def test_a_file_is_to_be_overwritten_in_place_before_anything_is_in_it(tmp_path: Path) -> None:
    asked = []

    class Copying(SystemCalls):
        def overwrite_in_place(self, fd: int) -> None:
            asked.append(os.fstat(fd).st_size)

    open_file(tmp_path, system=Copying()).close()
    open_file(tmp_path, system=Copying()).close()  # takes over what is there
    assert asked == [0]


def test_a_file_system_that_counts_no_blocks_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255)))
    assert SystemCalls().free_bytes(str(tmp_path)) > 1 << 60
    with SwapSpace.open([tmp_path], name="r0", nbytes=8 * MIB) as space:
        use(space)


def test_a_real_full_disk(small_disk: Path) -> None:
    with pytest.raises(SwapFullError, match=r"cannot reserve .* bytes are free"):
        open_file(small_disk, nbytes=64 * MIB)
    check_reserved(small_disk, 8 * MIB)


def test_a_real_read_only_disk(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(SwapIOError, match="read-only"):
        open_file(small_disk)


def test_a_commit_on_a_real_full_disk(small_disk: Path) -> None:
    store = swap.CommitStore([small_disk], name="r0")
    with SwapSpace.open([small_disk], name="r0", nbytes=8 * MIB) as space:
        store.write(0, [], {"step": 0}, space=space)
        with open(small_disk / "other", "wb", buffering=0) as other:
            for nbytes in (MIB, 512):
                with pytest.raises(OSError, match="No space"):
                    other.writelines(bytes(nbytes) for _ in range(1 << 20))
        large = {"step": 1, "text": "x" * 100_000}
        with pytest.raises(SwapFullError, match="the commit before holds"):
            store.write(1, [], large, space=space)
        latest = swap.CommitStore([small_disk], name="r0").read_latest()
        assert latest is not None
        assert latest.user == {"step": 0}
        (small_disk / "other").unlink()
        store.write(2, [], large, space=space)
    latest = store.read_latest()
    assert latest is not None
    assert latest.user == large


def test_a_name_whose_sync_failed_is_never_called_durable(tmp_path: Path) -> None:
    """The kernel tells of a loss once: the next fsync of the directory would succeed."""
    system = FaultySystemCalls()
    file = open_file(tmp_path, system=system)
    system.inject("fsync", errno.EAGAIN)  # there was no thread to ask by, so nothing has been asked
    with pytest.raises(SwapIOError, match="EAGAIN"):
        file.sync_name()
    file.sync_name()
    system.inject("fsync", errno.EIO)
    for _ in range(3):
        with pytest.raises(SwapIOError, match="EIO"):
            file.sync_name()
    with pytest.raises(SwapIOError, match="EIO"):
        file.sync()
    file.close()


def test_where_space_cannot_be_reserved_that_of_the_file_counts_as_free(tmp_path: Path) -> None:
    open_file(tmp_path).close()
    system = FaultySystemCalls()
    system.always("fallocate", errno.EOPNOTSUPP)
    system.free_bytes = lambda path: 0  # type: ignore[method-assign]
    open_file(tmp_path, system=system).close()
    with pytest.raises(SwapFullError, match=f"cannot reserve {2 * MIB + swap.DATA_OFFSET} bytes .* 0 bytes are free"):
        open_file(tmp_path, nbytes=2 * MIB, system=system)


def test_what_is_free_cannot_be_found_out(tmp_path: Path) -> None:
    system = FaultySystemCalls()
    system.always("fallocate", errno.ENOSPC)

    def fails(path: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    system.free_bytes = fails  # type: ignore[method-assign]
    with pytest.raises(SwapFullError, match="how many bytes are free there cannot be found out"):
        open_file(tmp_path, system=system)
    system.always("fallocate", errno.EOPNOTSUPP)
    file = open_file(tmp_path, system=system)  # nor reserved: writing will tell
    assert not file.reserved
    file.close()


@pytest.mark.parametrize(("code", "error"), [(errno.EIO, SwapIOError), (errno.EFBIG, SwapFullError)])
def test_a_file_that_cannot_get_its_size_is_given_back(tmp_path: Path, code: int, error: type[Exception]) -> None:
    system = FaultySystemCalls()
    system.always("fallocate", errno.EOPNOTSUPP)
    system.always("truncate", code)
    with pytest.raises(error, match=r"truncate|cannot reserve"):
        open_file(tmp_path, system=system)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spared", [".swapfile", ".lock"])
def test_a_name_that_cannot_be_removed_is_an_error_and_the_directory_is_free_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spared: str
) -> None:
    unlink, file = os.unlink, open_file(tmp_path)

    def refused(path: str) -> None:
        if path.endswith(spared):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        with pytest.raises(SwapIOError, match=r"unlink .*EROFS"):
            file.close(remove=True)
    assert [path.suffix for path in tmp_path.iterdir()] == [spared]
    open_file(tmp_path).close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_reserving_is_refused_where_it_cannot_be_done() -> None:
    """And is not made up for by writing into every block, which takes days on a file system that is slow."""
    fd = os.open("/dev/null", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="No such device") as caught:
            SystemCalls().fallocate(fd, 0, MIB)
        assert caught.value.errno == errno.ENODEV
    finally:
        os.close(fd)


def test_a_start_that_is_interrupted_leaves_files_to_the_run_they_were_of(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    SwapSpace.open(directories, name="r0", nbytes=MIB).close()
    before = [(directory / "r0.swapfile").read_bytes()[:4096] for directory in directories]

    class Interrupted(SystemCalls):
        def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
            super().fallocate(fd, offset, nbytes)
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(directories[1])):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SwapSpace.open(directories, name="r0", nbytes=2 * MIB, system=Interrupted())
    assert [(directory / "r0.swapfile").read_bytes()[:4096] for directory in directories] == before
    SwapSpace.open(directories, name="r0", nbytes=2 * MIB).close(remove=True)


@pytest.mark.parametrize("there", [b"somebody's notes", None])
def test_closing_leaves_what_has_the_name_of_the_lock_alone(tmp_path: Path, there: bytes | None) -> None:
    file, lock = open_file(tmp_path), tmp_path / "r0.lock"
    lock.unlink()
    if there is not None:
        lock.write_bytes(there)
    file.close(remove=True)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if there is None else [there])


def test_subvolumes_of_one_btrfs_have_its_room_once(copying_disk: Path) -> None:
    directories = [copying_disk / name for name in ("one", "two")]
    for directory in directories:
        subprocess.run(["btrfs", "subvolume", "create", str(directory)], check=True, capture_output=True)
    assert len({directory.stat().st_dev for directory in directories}) == 2
    free = SystemCalls().free_bytes(str(copying_disk))
    assert free_together(directories) == free
    assert capacity_bytes(directories) == 128 * MIB
    with pytest.raises(SwapFullError, match="r0"):
        SwapSpace.open(directories, name="r0", nbytes=free * 3 // 2)
    with SwapSpace.open(directories, name="r0", nbytes=2 * MIB) as space:
        assert len({drive.device for drive in space.statistics().directories}) == 1
