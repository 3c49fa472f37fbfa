"""Names in directories: whether a file is still the one that has its name, and making names durable.

Owns nothing. Does not know what the files hold. Guarantees that a name which somebody has given to another file is left
alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from swap.errors import SwapIOError, reporting
from swap.syscalls import SystemCalls


def sync_directory(directory: str, system: SystemCalls) -> None:
    """Make the names in a directory durable. Raises SwapIOError."""
    with reporting("sync", directory):
        fd = system.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            system.fsync(fd)
        finally:
            system.close(fd)


def require_directory(directory: str, system: SystemCalls) -> None:
    """Raise SwapIOError unless it is one."""
    with reporting("open", directory):
        mode = system.ask(lambda: os.stat(directory).st_mode)
    if not stat.S_ISDIR(mode):
        raise SwapIOError("open", directory, errno=errno.ENOTDIR)


def is_same(path: str, mine: os.stat_result) -> bool:
    """Whether our file is still at `path`. Raises OSError where that cannot be found out."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def unlink_if_same(path: str, fd: int, system: SystemCalls) -> None:
    """Remove our file, open as `fd`, but not one that someone has put in its place. Raises SwapIOError."""

    def remove(mine: os.stat_result) -> None:
        if is_same(path, mine):
            os.unlink(path)

    with reporting("unlink", path), contextlib.suppress(FileNotFoundError):
        mine = os.fstat(fd)  # not within the call: one that was given up may outlive the descriptor
        system.ask(lambda: remove(mine))
