"""The lock that keeps two runs out of one directory.

Owns a small file beside the swap file and the kernel's lock on it. Does not know what it protects. The kernel drops the
lock when its holder dies, however it dies, so a lock is never stale; the process id inside is for messages only.
Guarantees that a foreign file of the same name is neither changed nor removed, and that nobody else gets the lock while
a call that was given up may still change what it protects.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Sequence

from swap.errors import FormatError, SwapInUseError, SwapIOError, reporting
from swap.paths import is_same, unlink_if_same
from swap.syscalls import SystemCalls

_MARK = b"tiermem swap lock, held by process "
_LONGEST = 256


class DirectoryLock:
    """An exclusive lock on `path`, held from construction to `release`."""

    def __init__(self, path: str, system: SystemCalls) -> None:
        """Take the lock. Raises SwapInUseError, FormatError for a foreign file, SwapIOError for anything else."""
        self.path = path
        self._system = system
        self._pid = os.getpid()
        self.is_new = False  # whether no run has had this file before
        self._fd = self._acquire()

    @property
    def is_mine(self) -> bool:
        """Whether this process took it, and is not a forked child of the one that did."""
        return os.getpid() == self._pid

    @property
    def is_held(self) -> bool:
        """Whether it has not been given back."""
        return self._fd >= 0

    def release(self, *, remove: bool = False, after: Sequence[threading.Thread] = ()) -> None:
        """Give the lock back; remove its file if asked. Idempotent. Raises SwapIOError if removing or closing fails.

        Where threads of `after` are stuck in a call, the lock is given back when the last of them has ended, and this
        returns at once. A process that ends before keeps it as well: the kernel closes its descriptors only when all
        its threads are gone, and a thread in a call to the drive is not gone before the drive has answered.
        """
        stuck = [thread for thread in after if thread.is_alive()] if self.is_mine else []  # none came along with a fork
        if stuck and self._fd >= 0:
            thread = threading.Thread(target=self._release_after, args=(stuck, remove), name="swap-lock", daemon=True)
            with contextlib.suppress(RuntimeError):  # none may be started: the lock stays until the process has ended
                thread.start()
            return
        if self._fd < 0:
            return
        if remove:  # while still holding it, so that nobody's new lock file is removed
            try:
                unlink_if_same(self.path, self._fd, self._system)
            except BaseException:
                self.release(after=self._system.late())  # it may be removed yet
                raise
        fd, self._fd = self._fd, -1
        if self.is_mine:  # a child that gave it back would do so for its parent
            with contextlib.suppress(OSError):
                self._system.unlock(fd)
        close_descriptor(fd, self.path, self._system)

    def _release_after(self, stuck: Sequence[threading.Thread], remove: bool) -> None:
        for thread in stuck:
            thread.join()
        with contextlib.suppress(SwapIOError):  # whoever gave it back has been told of the drive
            self.release(remove=remove)

    def _acquire(self) -> int:
        while True:
            try:
                fd = self._system.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise SwapIOError("lock", self.path, errno=error.errno or errno.EIO) from error
            try:
                if self._claim(fd):
                    return fd
            except BaseException as error:
                self._fd = fd
                with contextlib.suppress(SwapIOError):
                    self.release(remove=self.is_new, after=self._system.late())
                if isinstance(error, OSError):
                    raise SwapIOError("lock", self.path, errno=error.errno or errno.EIO) from error
                raise
            close_descriptor(fd, self.path, self._system)

    def _claim(self, fd: int) -> bool:
        """Lock the open file; False if it was removed by its last holder meanwhile and must be opened anew."""
        holder = self._system.ask(lambda: os.pread(fd, _LONGEST, 0))
        holder = holder.strip(b"\0")  # zeros: what a power cut leaves of bytes that were not synced
        if holder and not holder.startswith(_MARK):
            raise FormatError(
                f"expected {self.path!r} to be a lock file of this program, found something else; "
                "it was left alone: move it away or choose another directory"
            )
        try:
            self._system.lock(fd)
        except BlockingIOError:
            who = holder.removeprefix(_MARK).decode(errors="replace").strip() or "unknown"
            raise in_use(self.path, who) from None
        if not self._system.ask(lambda: is_same(self.path, os.fstat(fd))):
            return False
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:  # nobody writes there (`ReadingCalls`)
            return True
        self.is_new = not holder
        mark = _MARK + f"{os.getpid()}\n".encode()
        # One call each: between two that were given up the descriptor may become another file's. Over what is there,
        # and cut then: a full disk has no room for it otherwise.
        self._system.ask(lambda: os.pwrite(fd, mark, 0))
        self._system.ask(lambda: os.ftruncate(fd, len(mark)))
        return True


def in_use(path: str, who: str) -> SwapInUseError:
    """The error of somebody who comes to the file at `path` while process `who` is using it."""
    return SwapInUseError(
        f"the directory {os.path.dirname(path)!r} is in use by process {who}: "
        "wait for that run to end, or choose another directory"
    )


def lock_holder(path: str, system: SystemCalls) -> int | None:
    """The process that holds the lock at `path`; -1 if it does not say which it is, None if nobody does.

    Raises SwapIOError where the drive does not answer, or it cannot be read.
    """
    try:
        fd = system.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except TimeoutError as error:
        raise SwapIOError("open", path, errno=error.errno or errno.ETIMEDOUT) from error
    except OSError:
        return None
    try:
        # Shared and at once given back: a run that starts in this instant would be refused, one that lives is seen.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        with reporting("read", path):
            number = system.ask(lambda: os.pread(fd, _LONGEST, 0)).removeprefix(_MARK).strip()
        return int(number) if number.isdigit() else -1
    except OSError:  # a file system without locks: whoever opens it is told
        return None
    finally:
        close_descriptor(fd, path, system)


def close_descriptor(fd: int, path: str, system: SystemCalls) -> None:
    """Close it; it is closed even if that raises SwapIOError, as a file system over a network may have it do."""
    with reporting("close", path):
        system.close(fd)
