"""Which directories share their free bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swap import file_systems
from swap.file_systems import file_system_of

MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
43 27 0:39 / /mnt/butter rw,relatime shared:7 master:1 - btrfs /dev/vdb rw,subvolid=5,subvol=/
44 27 0:39 /home /home rw,relatime - btrfs /dev/vdb rw,subvolid=256,subvol=/home
50 27 0:51 / /tank/one rw - zfs tank/one rw,xattr
51 27 0:50 / /tank rw - zfs tank rw,xattr
52 27 0:52 / /tank2 rw - zfs tank2/one rw,xattr
53 27 0:60 / /with\\040blank rw - tmpfs none rw
"""


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory that seems to be of no drive, in a process with the mounts above."""
    (tmp_path / "fdinfo").mkdir()
    (tmp_path / "mountinfo").write_text(MOUNTS)
    monkeypatch.setattr(file_systems, "_PROCESS", tmp_path)
    monkeypatch.setattr(os, "major", lambda device: 0)
    return tmp_path


@pytest.mark.parametrize(
    ("number", "minor"), [(43, 39), (44, 39), (50, 50), (51, 50), (52, 52), (53, 60)], ids=lambda number: str(number)
)
def test_subvolumes_and_datasets_of_a_pool_are_one(mounted: Path, number: int, minor: int) -> None:
    (mounted / "fdinfo" / "7").write_text(f"pos:\t0\nflags:\t02\nmnt_id:\t{number}\nino:\t256\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "stat", lambda where: os.stat_result((0, 0, 41, *[0] * 7)))
        assert file_system_of(7) == os.makedev(0, minor)


@pytest.mark.parametrize("told", ["pos:\t0\n", "mnt_id:\tnone\n", "mnt_id:\t99\n", None])
def test_where_the_system_does_not_say_what_is_mounted_st_dev_counts(mounted: Path, told: str | None) -> None:
    if told is not None:
        (mounted / "fdinfo" / "7").write_text(told)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "stat", lambda where: os.stat_result((0, 0, 41, *[0] * 7)))
        assert file_system_of(7) == 41


@pytest.mark.parametrize("text", ["", "nonsense\n", "43 27 0:39\n"])
def test_mounts_that_cannot_be_read_change_nothing(mounted: Path, text: str) -> None:
    (mounted / "mountinfo").write_text(text)
    assert file_system_of(mounted) == mounted.stat().st_dev


def test_directories_of_one_drive_and_its_files_are_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with open(tmp_path / "a" / "file", "wb") as file:
        assert file_system_of(tmp_path) == file_system_of(tmp_path / "a") == file_system_of(file.fileno())


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_system_of(tmp_path / "missing")
