"""The errors and the one warning of the swap engine.

Owns the exception classes, the wording of a failed transfer, and the way from an OSError to both. Knows nothing of who
raises them. Guarantees one root,
`SwapError` (arguments that cannot be meant are a ValueError), and that an error about a file carries operation, path,
offset, length and errno both as attributes and in its message. Errors are recorded by worker threads and raised by
whoever waits, so building one never fails.
"""

from __future__ import annotations

import contextlib
import errno as errno_names
import os
from collections.abc import Callable, Iterator
from typing import Any

# By which a system says that a file cannot grow: the disk, a quota, or the limit of a file's size.
NO_SPACE = (errno_names.ENOSPC, errno_names.EDQUOT, errno_names.EFBIG)

_BOOKKEEPING = 1 << 20  # what a file system may want for itself before it takes a file

_GONE = "the drive, or the server of this file system, is gone: see the kernel log, and mount it again"
_FAULT = "the drive or its connection reported a fault: see the kernel log"
_DAMAGED = "the file system is damaged: see the kernel log, unmount it and have it checked"
_ADVICE = {
    "ENOSPC": "free space on this file system (or inodes: `df -i`) or choose another directory",
    "EDQUOT": "the disk quota is used up: raise it or choose another directory",
    "EFBIG": "the file would exceed a size limit: see `ulimit -f` and the file system's maximum",
    "EIO": _FAULT,
    # As Linux's block layer names what a drive has answered: a bad place, itself, its connection, its own checksum.
    "ENODATA": _FAULT,
    "EREMOTEIO": _FAULT,
    "ENOLINK": _FAULT,
    "EILSEQ": _FAULT,
    "EUCLEAN": _DAMAGED,
    "EBADMSG": _DAMAGED,
    "ESTALE": _GONE,
    "ENOTCONN": _GONE,
    "ENODEV": _GONE,
    "ENXIO": _GONE,
    "ECONNABORTED": _GONE,
    "ECONNRESET": _GONE,
    "EHOSTDOWN": _GONE,
    "ESHUTDOWN": _GONE,
    "EROFS": "the file system is mounted read-only: remount it or choose another directory",
    "EACCES": "this user may not write there: change the permissions or choose another directory",
    "EPERM": "this user may not write there: change the permissions or choose another directory",
    "ENOENT": "create the directory first or correct the path",
    "ENOTDIR": "a directory was expected: correct the path",
    "ELOOP": "symbolic links are not followed: name the real path",
    "EISDIR": "a directory stands where the swap file should be: move it away or choose another name",
    "ETIMEDOUT": "the device shows no progress: see the kernel log",
    "EMFILE": "too many open files: raise `ulimit -n`",
    "EAGAIN": "the system is short of threads or memory: see `ulimit -u`, or the container's limit",
    "ENOLCK": "this file system gives no locks: choose a directory on a local one",
    "ENOSYS": "this file system, or the sandbox, cannot do that: choose a directory on another one",
    "EINVAL": "this file system cannot do that: choose a directory on another one",
}
_UNALIGNED = "buffer, offset and length must be multiples of the device's block size"  # EINVAL of a transfer


class SwapError(Exception):
    """Root of what goes wrong in this package. What cannot be meant, such as an unaligned buffer, is a ValueError."""


class SwapIOError(SwapError, OSError):
    """A system call on a file failed.

    Attributes: `operation` ("read", "write", "open", ...), `path`, `offset` and `length` in bytes (of the transfer that
    was asked for; zero where they mean nothing), and `errno`.
    """

    def __init__(
        self,
        operation: str,
        path: str | os.PathLike[str],
        *,
        offset: int = 0,
        length: int = 0,
        errno: int = errno_names.EIO,
        detail: str | None = None,
    ) -> None:
        self.operation = operation
        self.path = os.fspath(path)
        self.offset = offset
        self.length = length
        self.detail = detail
        extent = f" of {length} bytes at offset {offset}" if length else ""
        found = detail if detail is not None else os.strerror(errno)
        code = errno_names.errorcode.get(errno, str(errno))
        known = _UNALIGNED if length and errno == errno_names.EINVAL else _ADVICE.get(code)
        advice = f"; {known}" if known and detail is None else ""
        self.message = f"{operation}{extent} in {self.path!r} failed: {found} [{code}]{advice}"
        super().__init__(errno, self.message)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.operation, self.path, self.offset, self.length, self.errno, self.detail)


class ChecksumError(SwapIOError):
    """Bytes on disk are not the bytes that were written there.

    `expected` and `found` are the checksums; `others` says where the extent's other pieces lie, any of which may be
    the damaged one.
    """

    def __init__(
        self,
        operation: str,
        path: str | os.PathLike[str],
        *,
        offset: int,
        length: int,
        expected: int,
        found: int,
        others: tuple[str, ...] = (),
    ) -> None:
        self.expected = expected
        self.found = found
        self.others = others
        detail = f"expected checksum {expected:#018x}, found {found:#018x}"
        if others:
            detail += f", of these bytes and {' and '.join(others)} together"
        super().__init__(
            operation, path, offset=offset, length=length, errno=errno_names.EBADMSG,
            detail=f"{detail}; these are not the bytes that were written: check the drive, and go on from a copy",
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        where = {"offset": self.offset, "length": self.length, "others": self.others}
        return _rebuild_checksum, (self.operation, self.path, where | {"expected": self.expected, "found": self.found})


class SwapFullError(SwapError):
    """No room: in the swap space for an extent, or on the disk for the swap file. Names bytes needed and bytes free."""


class FormatError(SwapError):
    """Files are not what their names promise: foreign, damaged, or of another version or run. They are left as is."""


class SwapInUseError(SwapError):
    """Another run holds the directory."""


class SwapClosedError(SwapError):
    """The engine, file or space was closed before or while it was asked."""


class SwapTimeoutError(SwapError, TimeoutError):
    """A request was not done in time. It is still in flight: its buffer must not be reused."""


class DirectIOWarning(RuntimeWarning):
    """A file system refuses O_DIRECT; transfers go through the page cache, slower and outside the memory budget."""


@contextlib.contextmanager
def reporting(
    operation: str,
    path: str | os.PathLike[str],
    *,
    offset: int = 0,
    length: int = 0,
    full: Callable[[int], SwapFullError] | None = None,
) -> Iterator[None]:
    """Make an OSError of the body a SwapIOError; where there is no room, what `full(errno)` makes, if it is given.

    Not around what opens a file: an interrupt that comes as the body ends would leave it open.
    """
    try:
        yield
    except SwapError:
        raise
    except OSError as error:
        code = error.errno or errno_names.EIO
        if full is not None and code in NO_SPACE:
            raise full(code) from error
        raise SwapIOError(operation, path, offset=offset, length=length, errno=code) from error


def why_full(free_bytes: Callable[[], int], code: int, needed: int) -> str:
    """What is free where `needed` bytes did not fit, what the system says by `code`, and what that may mean."""
    said = os.strerror(code)
    try:
        free = free_bytes()
    except OSError:
        return f"how many bytes are free there cannot be found out ({said})"
    fits = code == errno_names.ENOSPC and free > needed + _BOOKKEEPING
    return f"{free} bytes are free there ({said}{', perhaps no inodes: see `df -i`' if fits else ''})"


def no_thread(purpose: str, error: RuntimeError) -> SwapError:
    """What is said where Python could start no thread `purpose`, as in "to move bytes"."""
    return SwapError(f"no thread can be started {purpose} ({error}); see `ulimit -u`, or the container's limit")


def _rebuild_checksum(operation: str, path: str, rest: dict[str, Any]) -> ChecksumError:
    return ChecksumError(operation, path, **rest)


def _rebuild(
    operation: str, path: str, offset: int, length: int, errno: int, detail: str | None
) -> SwapIOError:  # what pickle calls: keyword-only arguments do not survive the default protocol
    return SwapIOError(operation, path, offset=offset, length=length, errno=errno, detail=detail)
