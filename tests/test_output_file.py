"""Result files are there whole or as they were, and errors say path and bytes."""

import errno
import os
import stat
from pathlib import Path

import pytest

from tiermem.output_file import write_whole


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that has no room for what is written."""

    def fails(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fails)


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("before", [None, "the result of yesterday"])
def test_a_full_disk_leaves_what_was_there_and_the_error_says_where_and_how_much(
    tmp_path: Path, before: str | None
) -> None:
    path = tmp_path / "result.json"
    if before is not None:
        path.write_text(before)
    with pytest.raises(
        OSError, match=r"No space left on device, writing 5 bytes where \d+ bytes and \d+ inodes"
    ) as error:
        write_whole(path, "wörd")
    assert error.value.errno == errno.ENOSPC
    assert str(path) in str(error.value)
    assert [found.read_text() for found in tmp_path.iterdir()] == ([] if before is None else [before])


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_whole(link, "new")
    assert link.is_symlink()
    assert (real.read_text(), stat.S_IMODE(real.stat().st_mode)) == ("new", 0o640)
    write_whole(tmp_path / "fresh.json", b"bytes")
    (tmp_path / "plain").touch()
    assert (tmp_path / "fresh.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_is_no_regular_file_is_written_in_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "through a pipe")
        assert os.read(reader, 100) == b"through a pipe"
    finally:
        os.close(reader)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_errors_of_paths_are_os_errors_that_name_them(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, kind in ((tmp_path / "none" / "x", FileNotFoundError), (tmp_path, IsADirectoryError), (loop, OSError)):
        with pytest.raises(kind, match=str(path)):
            write_whole(path, "x")


@pytest.mark.parametrize("path", ["none/trace.json", "file/trace.json"])
def test_where_there_is_no_folder_the_error_says_what_to_do(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="its folder has to be there first; create it, or correct the path"):
        write_whole(tmp_path / path, "text")
