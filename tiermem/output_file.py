"""A file of results that is there whole or as it was before.

Owns the writing of small files that somebody waits for: traces, settings, reports, pictures. Does not know what is in
them. Guarantees that a disk that gets full, a read-only file system or a kill leave no half file under the name, that
what was there stays until the new file is complete, and that the error names path, bytes and what is free.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

_NEW_FILE = 0o666  # less the process's umask, as for any file that a program makes


def write_whole(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write `data` (text as UTF-8) to the file `path`; links are followed.

    What is no regular file (a pipe, /dev/stdout), or lies in a folder where no file can be made, is written in place.
    Raises OSError naming path and bytes.
    """
    whole = data.encode("utf-8") if isinstance(data, str) else data
    target = Path(os.path.expanduser(path))
    try:
        if _is_replaceable(target):
            _replace(_followed(target), whole)
        else:
            target.write_bytes(whole)
    except OSError as error:
        raise _named(error, target, len(whole)) from error


def _is_replaceable(target: Path) -> bool:
    """Whether a new file may take the name."""
    followed = _followed(target)
    if not os.access(followed.parent, os.W_OK):
        return False
    return not os.path.lexists(followed) or (followed.is_file() and os.access(followed, os.W_OK))


def _followed(target: Path) -> Path:
    """What a link points to, so that it stays a link. `Path.resolve` would raise no OSError for one to itself."""
    return Path(os.path.realpath(target))


def _replace(target: Path, data: bytes) -> None:
    partial = target.with_name(f".{target.name[:64]}.{secrets.token_hex(4)}.partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _NEW_FILE)
    try:
        with open(fd, "wb") as file:
            if target.exists():
                os.fchmod(fd, stat.S_IMODE(target.stat().st_mode))
            file.write(data)
            file.flush()
            os.fsync(fd)  # else a power cut could leave the name with nothing behind it
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):  # the error that matters is on its way
            os.unlink(partial)
        raise


def _named(error: OSError, target: Path, nbytes: int) -> OSError:
    """The same error, with what was written where."""
    code = error.errno or errno.EIO
    detail = f"{os.strerror(code)}, writing {nbytes} bytes"
    if code in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            found = os.statvfs(target.parent)
            detail += f" where {found.f_bavail * found.f_frsize} bytes and {found.f_favail} inodes are free"
    if code in (errno.ENOENT, errno.ENOTDIR):
        detail += ": its folder has to be there first; create it, or correct the path"
    return OSError(code, detail, str(target))
