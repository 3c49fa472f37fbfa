"""The system calls this package makes on files, as one object.

Owns nothing: every method is one call. Does not know why it is called and handles no error. It is an object so that a
test can put a faulty one in its place (short transfers, EIO, a full disk, a stall) without patching the os module.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

T = TypeVar("T")

# <linux/fs.h>, the numbers of x86 and ARM; where others hold the call is refused as by a file system without flags.
_GET_FLAGS = 0x80086601
_SET_FLAGS = 0x40086602
_NO_COPY_ON_WRITE = 0x00800000
UNCOUNTED = 1 << 62
"""Free bytes of a file system that counts none: ramfs, and those in user space that do not answer the question."""


@functools.cache
def _fallocate() -> Callable[[int, int, int, int], int]:
    library = ctypes.CDLL(None, use_errno=True)
    function = getattr(library, "fallocate64", None) or library.fallocate  # musl has one, of 64 bits
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    function.restype = ctypes.c_int
    return cast("Callable[[int, int, int, int], int]", function)


class SystemCalls:
    """The real system calls. All raise OSError as the os module does; all release the interpreter lock."""

    def late(self) -> Sequence[threading.Thread]:
        """Threads of calls that were given up, and may take effect yet: none where every call is waited for."""
        return ()

    def ask(self, call: Callable[[], T]) -> T:
        """Make `call()`, some other system call that may wait for a drive: a look at a name, a few bytes."""
        return call()

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """Open a file and return its descriptor (close-on-exec)."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        """Read at `offset` into `view`; return the bytes read, 0 at the end of the file."""
        return os.preadv(fd, [view], offset)

    def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
        """Write `view` at `offset`; return the bytes written."""
        return os.pwritev(fd, [view], offset)

    def fdatasync(self, fd: int) -> None:
        """Make a file's completed writes durable."""
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        """Make a file's, or a directory's, completed changes durable, names included."""
        os.fsync(fd)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Reserve disk blocks, growing the file. A file system that cannot is an OSError with EOPNOTSUPP."""
        # Not os.posix_fallocate: where the file system cannot, that of glibc writes a byte into every block instead.
        # Not again after an interrupt: where the call was given up the descriptor may be another file's by then.
        if _fallocate()(fd, 0, offset, nbytes):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def truncate(self, fd: int, nbytes: int) -> None:
        """Set a file's size."""
        os.ftruncate(fd, nbytes)

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, replacing what had it."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        os.unlink(path)

    def overwrite_in_place(self, fd: int) -> None:
        """Have an empty file written without copy-on-write, which btrfs does otherwise.

        Raises OSError where the file system does not know the flag, as all that never copy.
        """
        # Four bytes, though the numbers of these calls speak of a long.
        (flags,) = struct.unpack("I4x", fcntl.ioctl(fd, _GET_FLAGS, bytes(8)))
        fcntl.ioctl(fd, _SET_FLAGS, struct.pack("I4x", flags | _NO_COPY_ON_WRITE))

    def free_bytes(self, path: str) -> int:
        """Bytes an ordinary user may still write on the file system of `path`; `UNCOUNTED` where it counts none."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize if found.f_blocks else UNCOUNTED

    def lock(self, fd: int) -> None:
        """Take the exclusive kernel lock of an open file; BlockingIOError if someone has it."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self, fd: int) -> None:
        """Give it back, also where forked children have the descriptor too: to close it is not enough then."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def sleep(self, seconds: float) -> None:
        """Wait before trying again."""
        time.sleep(seconds)


class ReadingCalls(SystemCalls):
    """The calls of who only reads: files of a file system that is mounted read-only are opened for that alone.

    As Linux mounts one whose drive has failed.
    """

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """As above; nothing is created there."""
        try:
            return super().open(path, flags, mode)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            return super().open(path, flags & ~(os.O_ACCMODE | os.O_CREAT) | os.O_RDONLY, mode)
