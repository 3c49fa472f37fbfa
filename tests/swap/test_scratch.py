"""Room on disk that grows, has no name and ends with the process."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doubles import FaultySystemCalls

from swap import (
    AlignedBuffer,
    ScratchSpace,
    SwapClosedError,
    SwapFile,
    SwapFullError,
    SwapIOError,
    SwapSpace,
    SystemCalls,
)

MIB = 1 << 20


def test_nothing_is_opened_before_room_is_asked_for_and_nothing_is_left(tmp_path: Path) -> None:
    with SwapSpace.open([tmp_path], name="r0", nbytes=MIB) as space:
        before = sorted(tmp_path.iterdir())
        scratch = ScratchSpace(space, first=MIB)
        assert (scratch.nbytes, scratch.high_water) == (0, 0)
        holder, extent = scratch.allocate(5000)
        assert sorted(tmp_path.iterdir()) == before, "scratch files have no names"
        assert (scratch.nbytes, scratch.allocated, scratch.high_water) == (MIB, 8192, 8192)
        with AlignedBuffer(8192) as source, AlignedBuffer(8192) as target:
            source.view[:] = os.urandom(8192)
            holder.start_write(extent, source.view).wait(30)
            holder.start_read(extent, target.view).wait(30)
            assert source.view == target.view
        scratch.free(holder, extent)
        assert (scratch.allocated, scratch.high_water) == (0, 8192)
        scratch.close()
        scratch.close()
        assert (scratch.nbytes, scratch.allocated, scratch.high_water) == (MIB, 0, 8192)
        extent = space.allocate(4096)  # the engine is the other space's and goes on
        with AlignedBuffer(4096) as source:
            space.start_write(extent, source.view).wait(30)


def test_each_further_set_of_files_has_as_much_as_there_is(tmp_path: Path) -> None:
    with SwapSpace.open([tmp_path], name="r0", nbytes=MIB) as space:
        scratch, sizes = ScratchSpace(space, first=MIB), list[int]()
        for _ in range(6):
            scratch.allocate(MIB)
            sizes.append(scratch.nbytes // MIB)
        assert sizes == [1, 2, 4, 4, 8, 8]
        scratch.close()


@pytest.mark.parametrize("directories", [1, 3])
def test_it_grows_as_asked_and_what_is_free_is_used_again(tmp_path: Path, directories: int) -> None:
    paths = [tmp_path / str(index) for index in range(directories)]
    for path in paths:
        path.mkdir()
    with SwapSpace.open(paths, name="r0", nbytes=MIB) as space:
        scratch = ScratchSpace(space, first=MIB)
        held = [scratch.allocate(MIB // 2) for _ in range(9)]
        assert scratch.allocated == 9 * MIB // 2
        grown = scratch.nbytes
        assert grown >= scratch.allocated
        for holder, extent in held:
            scratch.free(holder, extent)
        held = [scratch.allocate(MIB // 2) for _ in range(9)]
        assert scratch.nbytes == grown
        large = scratch.allocate(20 * MIB)
        assert large[1].nbytes == 20 * MIB
        scratch.close()


def test_a_full_disk_leaves_what_is_there(tmp_path: Path) -> None:
    system = FaultySystemCalls()
    with SwapSpace.open([tmp_path], name="r0", nbytes=MIB) as space:
        scratch = ScratchSpace(space, first=MIB, system=system)
        held = scratch.allocate(MIB)
        system.inject("fallocate", errno.ENOSPC)
        with pytest.raises(SwapFullError, match="bytes are free there"):
            scratch.allocate(MIB)
        assert (scratch.nbytes, scratch.allocated) == (MIB, MIB)
        assert not list(tmp_path.glob("*scratch*"))
        scratch.free(*held)
        scratch.allocate(MIB)
        scratch.close()


def test_a_disk_that_is_nearly_full_is_used_to_the_end(tmp_path: Path) -> None:
    class SmallDisk(SystemCalls):
        room = 11 * MIB

        def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
            if nbytes > self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= nbytes

    with SwapSpace.open([tmp_path], name="r0", nbytes=MIB) as space:
        scratch = ScratchSpace(space, first=16 * MIB, system=SmallDisk())
        held = [scratch.allocate(MIB)]
        assert scratch.nbytes == 4 * MIB, "a quarter of what there was no room for"
        held += [scratch.allocate(MIB) for _ in range(9)]  # and the headers of the files
        with pytest.raises(SwapFullError, match=f"cannot reserve {MIB + 4096} bytes"):
            scratch.allocate(MIB)
        assert scratch.allocated == 10 * MIB
        scratch.free(*held.pop())
        scratch.allocate(MIB)
        scratch.close()


def test_files_that_cannot_lose_their_names_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(file: SwapFile) -> None:
        raise SwapIOError("unlink", file.path, errno=errno.EROFS)

    with SwapSpace.open([tmp_path], name="r0", nbytes=MIB) as space:
        before, scratch = sorted(tmp_path.iterdir()), ScratchSpace(space, first=MIB)
        with monkeypatch.context() as patch:
            patch.setattr(SwapFile, "forget_name", refused)
            with pytest.raises(SwapIOError, match="EROFS"):
                scratch.allocate(4096)
        assert sorted(tmp_path.iterdir()) == before
        assert scratch.allocate(4096)[1].nbytes == 4096
        scratch.close()
        with pytest.raises(SwapClosedError):
            scratch.allocate(4096)


def test_an_error_in_closing_leaves_no_file_open(tmp_path: Path) -> None:
    class BadClose(SystemCalls):
        failing = False

        def close(self, fd: int) -> None:
            super().close(fd)
            if self.failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    system = BadClose()
    with SwapSpace.open([tmp_path], name="r0", nbytes=MIB) as space:
        scratch = ScratchSpace(space, first=MIB, system=system)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            scratch.allocate(MIB)
        system.failing = True
        with pytest.raises(SwapIOError, match="close in"):
            scratch.close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_killed_process_leaves_no_scratch_file(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, swap\n"
        "from pathlib import Path\n"
        "space = swap.SwapSpace.open([Path(sys.argv[1])], name='r0', nbytes=1 << 20)\n"
        "swap.ScratchSpace(space).allocate(1 << 20)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert child.returncode == -9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r0.lock", "r0.swapfile"]
