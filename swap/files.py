"""A swap file: one preallocated file, known by its header, held by a lock.

Owns the descriptor, the lock and the header of one file. Does not know extents or what the data means. Layout: a header
of `DATA_OFFSET` bytes (magic, version, data bytes, checksum of these), then data, so every data offset is aligned when
the extent is. Guarantees: created 0600, links never followed; space on disk is reserved before the first write where
the file system can; a file that is not ours, whatever its name, is never truncated, overwritten or removed.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import zlib
from pathlib import Path
from typing import Self

from swap.blocks import ALIGNMENT, align_down, is_aligned
from swap.buffers import AlignedBuffer
from swap.errors import FormatError, SwapClosedError, SwapFullError, SwapIOError
from swap.locks import DirectoryLock
from swap.syscalls import SystemCalls

DATA_OFFSET = ALIGNMENT
"""Bytes before the first data byte."""

_MAGIC = b"tiermem-swapfile"
_VERSION = 1
_HEADER = struct.Struct("<16sIIQI")  # magic, version, data offset, data bytes, CRC-32 of the fields before
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)


class SwapFile:
    """An open swap file with `nbytes` bytes of data from `DATA_OFFSET` on; a `BlockFile`. Made by `open`."""

    def __init__(self, path: str, fd: int, nbytes: int, lock: DirectoryLock, system: SystemCalls) -> None:
        self.path = path
        self.nbytes = nbytes
        self.device = os.fstat(fd).st_dev
        self.direct = False
        self.created = False
        self.reserved = False
        self._pid = os.getpid()
        self._fd = fd
        self._lock = lock
        self._system = system

    @classmethod
    def open(
        cls, directory: Path, *, name: str, nbytes: int, keep: bool = False, system: SystemCalls | None = None
    ) -> Self:
        """Create `<name>.swapfile` in an existing directory, or take over the one an earlier run left there.

        With `keep` it must be there, with at least `nbytes` of data, which stay; without, data left there is
        forgotten. Raises SwapInUseError, FormatError for a file that is not ours or damaged, SwapFullError naming bytes
        needed and bytes free, SwapIOError for the rest.
        """
        if nbytes <= 0 or not is_aligned(nbytes):
            raise ValueError(f"expected a positive multiple of {ALIGNMENT} bytes, found {nbytes}")
        if not name or "/" in name or "\0" in name:
            raise ValueError(f"expected a file name without '/', found {name!r}")
        system = system or SystemCalls()
        path = os.path.join(os.fspath(directory), f"{name}.swapfile")
        _check_directory(os.fspath(directory))
        lock = DirectoryLock(os.path.join(os.fspath(directory), f"{name}.lock"), system)
        try:
            found = _size_of_ours(path, system)
            if keep and (found is None or found < nbytes):
                raise FormatError(f"expected {path!r} with at least {nbytes} bytes of data, found {found or 'none'}")
            file = cls(path, _open(path, found is None, False, system), nbytes, lock, system)
        except BaseException:
            lock.release(remove=True)
            raise
        try:
            file.created = found is None
            file._prepare(keep=keep, found=found)
        except BaseException:
            file.close(remove=file.created)
            raise
        return file

    def fileno(self) -> int:
        """The descriptor. Raises SwapClosedError after `close`."""
        if self._fd < 0:
            raise SwapClosedError(f"the swap file {self.path!r} is closed")
        return self._fd

    def sync(self) -> None:
        """Wait until completed writes are durable. Raises SwapIOError."""
        try:
            self._system.fdatasync(self.fileno())
        except OSError as error:
            raise SwapIOError("sync", self.path, errno=error.errno or errno.EIO) from error

    def close(self, *, remove: bool = False) -> None:
        """Close; remove the file, and its lock file, if asked. Idempotent. Raises SwapIOError if removing fails."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        mine = os.fstat(fd)
        remove = remove and os.getpid() == self._pid  # never by a forked child: the parent is still using it
        try:
            self._system.close(fd)
            if remove:
                _unlink_if_same(self.path, mine)
        finally:
            self._lock.release(remove=remove)

    def _prepare(self, *, keep: bool, found: int | None) -> None:
        if keep:
            self.nbytes = found or self.nbytes
            self.reserved = True
            self._choose_direct()
            return
        before = os.fstat(self._fd).st_size
        self._write_header()
        self._choose_direct()
        try:
            self._reserve()
        except SwapFullError:
            if before:
                self._system.truncate(self._fd, before)
            raise
        if before > DATA_OFFSET + self.nbytes:
            self._truncate(DATA_OFFSET + self.nbytes)

    def _choose_direct(self) -> None:
        """Open anew with O_DIRECT and keep that descriptor if the header can be read through it."""
        try:
            fd = _open(self.path, False, True, self._system)
        except SwapIOError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return
        with AlignedBuffer(ALIGNMENT) as probe:
            try:
                self._system.preadv(fd, probe.view, 0)
            except OSError as error:
                self._system.close(fd)
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise SwapIOError("read", self.path, length=ALIGNMENT, errno=error.errno or errno.EIO) from error
                return
        self._system.close(self._fd)
        self._fd = fd
        self.direct = True

    def _reserve(self) -> None:
        needed = DATA_OFFSET + self.nbytes
        try:
            self._system.fallocate(self._fd, 0, needed)
            self.reserved = True
        except OSError as error:
            if error.errno in _FULL:
                raise self._full(error) from error
            if error.errno not in _CANNOT_RESERVE:
                raise SwapIOError("reserve", self.path, length=needed, errno=error.errno or errno.EIO) from error
            # Without reservation the best that can be done is to look, and to fail later if others fill the disk.
            if self._system.free_bytes(self.path) < needed:
                raise self._full(error) from error
            self._truncate(needed)

    def _full(self, error: OSError) -> SwapFullError:
        free = self._system.free_bytes(os.path.dirname(self.path) or ".")
        needed = DATA_OFFSET + self.nbytes
        return SwapFullError(
            f"cannot reserve {needed} bytes for {self.path!r}: {free} bytes are free there "
            f"({os.strerror(error.errno or errno.ENOSPC)}); free some, raise the limit, or add another directory"
        )

    def _truncate(self, nbytes: int) -> None:
        try:
            self._system.truncate(self._fd, nbytes)
        except OSError as error:
            if error.errno in _FULL:
                raise self._full(error) from error
            raise SwapIOError("truncate", self.path, length=nbytes, errno=error.errno or errno.EIO) from error

    def _write_header(self) -> None:
        with AlignedBuffer(DATA_OFFSET) as buffer:
            buffer.view[: _HEADER.size] = _pack_header(self.nbytes)
            try:
                moved = self._system.pwritev(self._fd, buffer.view, 0)
            except OSError as error:
                if error.errno in _FULL:
                    raise self._full(error) from error
                raise SwapIOError("write", self.path, length=DATA_OFFSET, errno=error.errno or errno.EIO) from error
            if moved != DATA_OFFSET:
                raise SwapIOError("write", self.path, length=DATA_OFFSET, detail=f"only {moved} bytes were taken")


def _pack_header(nbytes: int) -> bytes:
    fields = _HEADER.pack(_MAGIC, _VERSION, DATA_OFFSET, nbytes, 0)[:-4]
    return fields + struct.pack("<I", zlib.crc32(fields))


def _check_directory(directory: str) -> None:
    try:
        mode = os.stat(directory).st_mode
    except OSError as error:
        raise SwapIOError("open", directory, errno=error.errno or errno.EIO) from error
    if not stat.S_ISDIR(mode):
        raise SwapIOError("open", directory, errno=errno.ENOTDIR)


def _open(path: str, create: bool, direct: bool, system: SystemCalls) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0) | (os.O_DIRECT if direct else 0)
    try:
        return system.open(path, flags, 0o600)
    except OSError as error:
        raise SwapIOError("open", path, errno=error.errno or errno.EIO) from error


def _size_of_ours(path: str, system: SystemCalls) -> int | None:
    """Bytes of data in the swap file at `path`: None if there is no file, 0 if it is empty (a run died at once).

    Raises FormatError for anything that is not a swap file of ours.
    """
    try:
        # Non-blocking, or a fifo in the way would wait for its other end.
        fd = system.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SwapIOError("open", path, errno=error.errno or errno.EIO) from error
    try:
        found = os.fstat(fd)
        header = os.pread(fd, _HEADER.size, 0) if stat.S_ISREG(found.st_mode) else b"?"
    except OSError as error:
        raise SwapIOError("read", path, length=_HEADER.size, errno=error.errno or errno.EIO) from error
    finally:
        system.close(fd)
    if not header:
        return 0
    left = "; it was left alone: move it away or choose another directory or name"
    if not stat.S_ISREG(found.st_mode) or header[: len(_MAGIC)] != _MAGIC:
        raise FormatError(f"expected {path!r} to be a swap file of this program, found something else{left}")
    if len(header) < _HEADER.size or zlib.crc32(header[:-4]) != struct.unpack("<I", header[-4:])[0]:
        raise FormatError(f"expected {path!r} to have a whole header, found a damaged one{left}")
    _, version, offset, nbytes, _ = _HEADER.unpack(header)
    if version != _VERSION or offset != DATA_OFFSET:
        raise FormatError(f"expected {path!r} to be of version {_VERSION}, found version {version}{left}")
    return max(0, align_down(min(int(nbytes), found.st_size - DATA_OFFSET)))


def _unlink_if_same(path: str, mine: os.stat_result) -> None:
    """Remove our file, but not one that someone has put in its place."""
    try:
        there = os.stat(path, follow_symlinks=False)
        if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SwapIOError("unlink", path, errno=error.errno or errno.EIO) from error
