"""A swap file: one preallocated file, known by its superblock, held by a lock.

Owns the descriptor, the lock and the superblock of one file. Does not know extents or what the data means. Layout: the
superblock, padded to `DATA_OFFSET` bytes, then data, so every data offset is aligned when the extent is. Guarantees:
created 0600, links never followed; space on disk is reserved before the first write where the file system can; a file
that is not ours, whatever its name, is never truncated, overwritten or removed; the superblock, with a new run id, is
durable before any byte of an earlier run can be overwritten; after a failed sync no sync succeeds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from swap import superblock
from swap.blocks import ALIGNMENT, is_aligned
from swap.buffers import AlignedBuffer
from swap.direct_io import NO_DIRECT, takes_direct
from swap.errors import NO_SPACE, FormatError, SwapClosedError, SwapFullError, SwapIOError, reporting, why_full
from swap.file_systems import file_system_of
from swap.intact import has_all_blocks, require_intact
from swap.locks import DirectoryLock, close_descriptor, in_use
from swap.paths import require_directory, sync_directory, unlink_if_same
from swap.superblock import LEFT_ALONE, SUPERBLOCK_BYTES, Identity, Superblock
from swap.syscalls import SystemCalls
from swap.system import require_linux

DATA_OFFSET = ALIGNMENT
"""Bytes before the first data byte."""

# The last two by what guards a sandbox: the header has just been written, so writing is permitted.
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.EPERM, errno.EACCES)


class SwapFile:
    """An open swap file with `nbytes` bytes of data from `DATA_OFFSET` on; a `BlockFile`. Made by `open`."""

    def __init__(self, path: str, fd: int, block: Superblock, lock: DirectoryLock, system: SystemCalls) -> None:
        self.path = path
        self.identity = block.identity
        self.nbytes = block.nbytes
        self.device = file_system_of(fd)
        self.direct = False
        self.created = self.reserved = False
        self._failed_sync: OSError | None = None
        self._before: int | None = None  # bytes of the file that was found, until `begin`; None: its data are kept
        self._fd = fd
        self._lock = lock
        self._system = system

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        name: str,
        nbytes: int,
        keep: bool = False,
        system: SystemCalls | None = None,
    ) -> Self:
        """Create `<name>.swapfile` in an existing directory, or take over the one an earlier run left there.

        With `keep` it must be there, whole, with at least `nbytes` of data, which stay, as does its identity; without,
        data left there is forgotten and the file has another identity. Raises SwapInUseError, FormatError for a file
        that is not ours, damaged or cut short, SwapFullError naming bytes needed and bytes free, SwapIOError for the
        rest.
        """
        file = cls.reserve(directory, name=name, nbytes=nbytes, keep=keep, system=system)
        try:
            file.begin()
        except BaseException:
            file.close(remove=file.created)
            raise
        return file

    @classmethod
    def reserve(
        cls,
        directory: Path,
        *,
        name: str,
        nbytes: int,
        keep: bool = False,
        identity: Identity | None = None,
        direct: bool = True,
        system: SystemCalls | None = None,
    ) -> Self:
        """The first part of `open`: all that may be refused, lack room, or take long. `begin` is the second.

        Until then a file that was there is what it was. `identity`: None, a new one. `direct`: by O_DIRECT if that can
        be.
        """
        if nbytes <= 0 or not is_aligned(nbytes):
            raise ValueError(f"expected a positive multiple of {ALIGNMENT} bytes, found {nbytes}")
        if not name or "/" in name or "\0" in name:
            raise ValueError(f"expected a file name without '/', found {name!r}")
        require_linux()
        system = system or SystemCalls()
        path = os.path.join(os.fspath(directory), f"{name}.swapfile")
        require_directory(os.fspath(directory), system)
        lock = DirectoryLock(os.path.join(os.fspath(directory), f"{name}.lock"), system)
        try:
            size, found = look(path, system)
            block = _whole(path, found, size or 0, nbytes) if keep else Superblock(identity or Identity(), nbytes)
            file = cls(path, _open(path, system, create=size is None), block, lock, system)
        except BaseException:
            lock.release(remove=lock.is_new)
            raise
        try:
            file.created = size is None
            file._claim()
            file._reserve_room(keep=keep)
            if direct:
                file._choose_direct()
        except BaseException:
            file.close(remove=file.created)
            raise
        return file

    def begin(self) -> None:
        """The second part of `open`: data left there are forgotten. Raises SwapFullError and SwapIOError."""
        if self._before:
            self._write_superblock()
        if self._before is not None and self._before > DATA_OFFSET + self.nbytes:
            self._truncate(DATA_OFFSET + self.nbytes)
        self._before = None

    def fileno(self) -> int:
        """The descriptor. Raises SwapClosedError after `close`."""
        if self._fd < 0:
            raise SwapClosedError(f"the swap file {self.path!r} is closed")
        return self._fd

    def sync(self) -> None:
        """Wait until completed writes are durable. Raises SwapIOError, and does so ever after; or if it is not intact.

        The kernel reports a lost write once and then forgets it, so a later success would say nothing about it.
        """
        fd = self.fileno()
        with self._syncing():
            self._system.fdatasync(fd)
        block, named = Superblock(self.identity, self.nbytes), self._lock.is_held
        require_intact(fd, self.path, block, self._system, reserved=self.reserved, named=named)

    def sync_name(self) -> None:
        """Wait until the file's name is durable. Raises SwapIOError, and does so ever after, as `sync` does."""
        with self._syncing():
            sync_directory(os.path.dirname(self.path), self._system)

    @contextlib.contextmanager
    def _syncing(self) -> Iterator[None]:
        """One that fails, unless before it was asked for, is the last that is tried."""
        try:
            if self._failed_sync is not None:
                raise self._failed_sync
            yield
        except OSError as error:
            if error.errno != errno.EAGAIN:  # that is: there was no thread to ask by (`PatientSystemCalls`)
                self._failed_sync = error
            raise SwapIOError("sync", self.path, errno=error.errno or errno.EIO) from error

    def forget_name(self) -> None:
        """Remove the file's name and its lock: it lasts as long as it is open. Raises SwapIOError if removing fails."""
        unlink_if_same(self.path, self.fileno(), self._system)
        self._lock.release(remove=True)

    def close(self, *, remove: bool = False, after: Sequence[threading.Thread] = ()) -> None:
        """Close; remove the file, and its lock file, if asked. Idempotent. Raises SwapIOError if that fails.

        The lock is kept until calls that were given up, and the threads of `after`, have ended.
        """
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        remove = remove and self._lock.is_mine  # never by a forked child: the parent is still using it
        with contextlib.ExitStack() as stack:  # each of these whatever the ones before raise
            # What is given up in here counts, too: a late removal would be that of the next run's file.
            stack.callback(lambda: self._lock.release(remove=remove, after=[*self._system.late(), *after]))
            stack.callback(self._close_descriptor, fd, waiting=bool(after))
            if self._lock.is_mine:
                stack.callback(self._unlock, fd)
            if remove:
                unlink_if_same(self.path, fd, self._system)
            elif self._before is not None and self._lock.is_mine:
                with contextlib.suppress(OSError):  # the room that was made in vain
                    self._system.truncate(fd, self._before)

    def _close_descriptor(self, fd: int, *, waiting: bool) -> None:
        """Close it; `waiting`: transfers are out, for which that may wait."""
        close = partial(close_descriptor, fd, self.path, self._system)
        with reporting("close", self.path):
            self._system.ask(close) if waiting else close()

    def _unlock(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # it ends with the last descriptor
            self._system.unlock(fd)

    def _claim(self) -> None:
        """Lock the file itself too: somebody may clear the directory of what looks old, such as the lock file."""
        with reporting("lock", self.path):
            try:
                self._system.lock(self._fd)
            except BlockingIOError:
                self.created = False
                raise in_use(self.path, "unknown") from None

    def _reserve_room(self, *, keep: bool) -> None:
        found = os.fstat(self._fd)
        if keep:
            self.reserved = has_all_blocks(found, found.st_size)
            return
        self._before = found.st_size
        if self._before == 0:  # the only time it can be said
            with contextlib.suppress(OSError):  # a file system without the flag, or too old: slower at worst
                self._system.overwrite_in_place(self._fd)
            self._write_superblock()  # at once: a file without one that is not empty would be taken for foreign
        self._reserve(self._before)

    def _choose_direct(self) -> None:
        """Open anew with O_DIRECT and keep that descriptor if the header can be moved through it."""
        try:
            fd = _open(self.path, self._system, direct=True)
        except SwapIOError as error:
            if error.errno not in NO_DIRECT:
                raise
            return
        try:
            takes = takes_direct(fd, self.path, self._system)
        except BaseException:
            close_descriptor(fd, self.path, self._system)
            raise
        if not takes:
            close_descriptor(fd, self.path, self._system)
            return
        old, self._fd = self._fd, fd
        self._unlock(old)  # explicitly: a child that is forked meanwhile has this descriptor, too
        self.direct = True
        close_descriptor(old, self.path, self._system)
        self._claim()

    def _reserve(self, before: int) -> None:
        needed = DATA_OFFSET + self.nbytes
        if self._lacks_room(needed):  # else a piece after the other would take what there is, of tmpfs the memory
            raise self._full(errno.ENOSPC)
        try:
            self._system.fallocate(self._fd, 0, needed)
            self.reserved = has_all_blocks(os.fstat(self._fd), needed)  # some file systems promise without doing it
        except OSError as error:
            if error.errno in NO_SPACE:
                with contextlib.suppress(OSError):  # what it had reserved by then would not be counted as free
                    self._system.truncate(self._fd, before)
                raise self._full(error.errno) from error
            if error.errno not in _CANNOT_RESERVE:
                raise SwapIOError("reserve", self.path, length=needed, errno=error.errno or errno.EIO) from error
            self._truncate(max(before, needed))  # and fail later if others fill the disk

    def _lacks_room(self, needed: int) -> bool:
        with contextlib.suppress(OSError):  # nobody says how much there is: writing will
            free = self._system.free_bytes(os.path.dirname(self.path) or ".")
            return free + os.fstat(self._fd).st_blocks * 512 < needed
        return False

    def _full(self, code: int) -> SwapFullError:
        needed, folder = DATA_OFFSET + self.nbytes, os.path.dirname(self.path) or "."
        why = why_full(partial(self._system.free_bytes, folder), code, needed)
        return SwapFullError(
            f"cannot reserve {needed} bytes for {self.path!r}: {why}; free some, raise the limit, or add another "
            "directory"
        )

    def _truncate(self, nbytes: int) -> None:
        with reporting("truncate", self.path, length=nbytes, full=self._full):
            self._system.truncate(self._fd, nbytes)

    def _write_superblock(self) -> None:
        """Write it and make it durable."""
        with AlignedBuffer(DATA_OFFSET) as buffer:
            buffer.view[:SUPERBLOCK_BYTES] = superblock.pack(Superblock(self.identity, self.nbytes))
            with reporting("write", self.path, length=DATA_OFFSET, full=self._full):
                moved = self._system.pwritev(self._fd, buffer.view, 0)
                self._system.fsync(self._fd)
            if moved != DATA_OFFSET:
                raise SwapIOError("write", self.path, length=DATA_OFFSET, detail=f"only {moved} bytes were taken")


def _open(path: str, system: SystemCalls, *, create: bool = False, direct: bool = False) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0) | (os.O_DIRECT if direct else 0)
    try:
        return system.open(path, flags, 0o600)
    except OSError as error:
        raise SwapIOError("open", path, errno=error.errno or errno.EIO) from error


def look(path: str, system: SystemCalls) -> tuple[int | None, Superblock | None]:
    """Bytes of the swap file at `path`, None: there is none; and its superblock, none if it is empty (a run that died).

    Raises FormatError for anything that is not a swap file of ours. The file may be shorter than its superblock says.
    """
    try:
        # Non-blocking, or a fifo in the way would wait for its other end.
        fd = system.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except FileNotFoundError:
        return None, None
    except OSError as error:
        raise SwapIOError("open", path, errno=error.errno or errno.EIO) from error
    try:
        with reporting("read", path, length=SUPERBLOCK_BYTES):
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise FormatError(
                    f"expected {path!r} to be a swap file of this program, found something else{LEFT_ALONE}"
                )
            first = system.ask(lambda: os.pread(fd, SUPERBLOCK_BYTES, 0))
    finally:
        close_descriptor(fd, path, system)
    return found.st_size, superblock.parse(first, path) if first else None


def _whole(path: str, block: Superblock | None, size: int, nbytes: int) -> Superblock:
    """The superblock of a file of `size` bytes whose data are to be kept, if they can be."""
    if block is None or block.nbytes < nbytes:
        found = block.nbytes if block is not None else "none"
        raise FormatError(f"expected {path!r} with at least {nbytes} bytes of data, found {found}")
    expected = DATA_OFFSET + block.nbytes
    if size < expected:
        raise FormatError(
            f"expected {path!r} to have {expected} bytes, found {size}: it has been truncated{LEFT_ALONE}"
        )
    return block
