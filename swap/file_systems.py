"""Which directories are on one file system, and so share its free bytes and its drive.

Owns the number that tells file systems apart. Does not know what is written on them. Guarantees the same number for
directories whose free bytes are the same bytes, as far as the system tells: `st_dev` alone is another one for each
subvolume of btrfs, and for each dataset of a ZFS pool.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from swap.syscalls import SystemCalls

_PROCESS = Path("/proc/self")


class _Mount(NamedTuple):
    device: int
    kind: str
    source: str


def file_system_of(where: str | os.PathLike[str] | int) -> int:
    """A number for the file system of a path, or of an open file: its `st_dev` wherever that is a drive's.

    Elsewhere the number of what is mounted there; of a ZFS pool the smallest of its datasets. Raises OSError as
    `os.stat` does.
    """
    device = os.stat(where).st_dev
    if os.major(device):
        return device
    try:
        number = _mount_number(where)
        mounts = _mounts((_PROCESS / "mountinfo").read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, IndexError):  # no /proc, or another than Linux has
        return device
    return _shared(mounts, number) if number in mounts else device


def free_together(directories: Sequence[str | os.PathLike[str]]) -> int:
    """The bytes that are free in directories, those of one file system counted once. Raises OSError."""
    free: dict[int, int] = {}
    for directory in directories:
        device, here = file_system_of(directory), SystemCalls().free_bytes(os.fspath(directory))
        free[device] = max(free.get(device, 0), here)  # of those with quotas some have less
    return sum(free.values())


def _mount_number(where: str | os.PathLike[str] | int) -> int:
    """The number that `mountinfo` has for what is mounted there. Raises OSError, and ValueError if it is not told."""
    if not isinstance(where, int):
        fd = os.open(where, os.O_PATH | os.O_CLOEXEC)
        try:
            return _mount_number(fd)
        finally:
            os.close(fd)
    for line in (_PROCESS / "fdinfo" / str(where)).read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "mnt_id":
            return int(value)
    raise ValueError("no mnt_id")


def _mounts(text: str) -> dict[int, _Mount]:
    """What is mounted, by its number; `text`: as proc_pid_mountinfo(5) describes it."""
    found = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, source) = before.split(" "), after.split(" ")[:2]
        major, minor = fields[2].split(":")
        found[int(fields[0])] = _Mount(os.makedev(int(major), int(minor)), kind, source)
    return found


def _shared(mounts: dict[int, _Mount], number: int) -> int:
    mine = mounts[number]
    if mine.kind != "zfs":
        return mine.device
    pool = mine.source.split("/")[0]
    return min(each.device for each in mounts.values() if each.kind == "zfs" and each.source.split("/")[0] == pool)
