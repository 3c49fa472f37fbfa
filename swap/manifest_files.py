"""The files of manifests: their names, and how they are written, read and removed.

Owns `<name>.<generation>.manifest` in one directory, and the one that is being made beside them. Does not know when a
commit is one (`commit.py` does). Guarantees that a file which is not ours is never removed or overwritten, and that
what the drive refuses is reported with operation and path.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
from contextlib import AbstractContextManager
from functools import partial

from swap import manifest as format_of
from swap.errors import FormatError, SwapFullError, SwapIOError, reporting, why_full
from swap.manifest import Manifest
from swap.paths import sync_directory
from swap.syscalls import SystemCalls
from swap.transfer import write_all

_LARGEST = 1 << 32  # bytes of a manifest; a hundred million entries have less


class ManifestFiles:
    """The manifests called `name` in a directory."""

    def __init__(self, directory: str, name: str, system: SystemCalls) -> None:
        self.directory = directory
        self.new = os.path.join(directory, f"{name}.manifest.new")
        self._name = name
        self._system = system

    def path(self, generation: int) -> str:
        """Where the manifest of a generation lies."""
        return os.path.join(self.directory, f"{self._name}.{generation:020d}.manifest")

    def found(self) -> list[int]:
        """The generations there are files for."""
        pattern = re.compile(re.escape(self._name) + r"\.(\d{20})\.manifest")
        with self._reporting("list", self.directory):
            names = self._system.ask(lambda: os.listdir(self.directory))
            matches = [pattern.fullmatch(name) for name in names]
        return sorted(int(match[1]) for match in matches if match)

    def read(self, generation: int) -> Manifest:
        """One of them. Raises FormatError if it is damaged or not ours."""
        path = self.path(generation)
        manifest = format_of.parse(_contents(path, self._system), path)
        if manifest.generation != generation:
            raise FormatError(f"expected {path!r} to be generation {generation}, found {manifest.generation}")
        return manifest

    def read_new(self) -> Manifest | None:
        """What `write_new` of a run that died has written and nobody published; None: nothing, or it is not whole."""
        try:
            return format_of.parse(_contents(self.new, self._system), self.new)
        except FormatError:
            return None
        except SwapIOError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    def is_whole(self, generation: int) -> bool:
        """Whether a manifest can be read."""
        try:
            self.read(generation)
        except FormatError:
            return False
        return True

    def is_ours(self, generation: int) -> bool:
        """Whether a file looks like a manifest of this program, damaged or not."""
        return self._is_ours(self.path(generation))

    def remove(self, generation: int) -> None:
        """Remove a manifest, if it is there. Raises FormatError if it is not ours."""
        with self._reporting("unlink", self.path(generation)):
            try:
                self._remove(self.path(generation))
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise

    def discard(self) -> None:
        """Remove all manifests. Returns when that is durable, also what somebody before was interrupted in.

        Raises FormatError, having removed nothing, if something that is not ours or is damaged has the name of one.
        """
        found = self.found()
        for generation in found:
            self.read(generation)
        for generation in found:  # the newest last: an older one alone must never look like the last commit
            self.remove(generation)
            self.sync()
        if not found:
            self.sync()

    def put_aside(self, generation: int) -> None:
        """Give a damaged manifest another name, which nothing has."""
        path = self.path(generation)
        with self._reporting("rename", path):
            names = (f"{path}.damaged{number or ''}" for number in itertools.count())
            self._system.rename(
                path, self._system.ask(lambda: next(name for name in names if not os.path.lexists(name)))
            )

    def drop_new(self) -> None:
        """Remove what `write_new` has written."""
        with self._reporting("unlink", self.new):
            self._system.unlink(self.new)

    def publish_new(self, generation: int) -> None:
        """Give what `write_new` has written its name."""
        with self._reporting("rename", self.path(generation)):
            self._system.rename(self.new, self.path(generation))

    def sync(self) -> None:
        """Make names durable."""
        sync_directory(self.directory, self._system)

    def _is_ours(self, path: str) -> bool:
        return format_of.is_ours(_contents(path, self._system, limit=64))

    def _remove(self, path: str, *, torn: bool = False) -> None:
        """Remove a manifest; with `torn` also one whose bytes a power cut has lost, which reads as zeros."""
        if not self._is_ours(path) and not (torn and not any(_contents(path, self._system, limit=64))):
            raise FormatError(f"expected {path!r} to be a manifest of this program, found something else")
        self._system.unlink(path)

    def write_new(self, packed: bytes, generation: int) -> None:
        """Write a manifest under a name that does not count yet; returns when its bytes are durable.

        Raises FormatError if somebody has put a file where it is to be: to publish it would replace that one.
        """
        path, final = self.new, self.path(generation)
        with self._reporting("look at", final):
            if self._system.ask(lambda: os.path.lexists(final)):
                raise FormatError(
                    f"expected nothing at {final!r} before that commit, found a file; it was left alone: move it away"
                )
        with self._reporting("unlink", path), contextlib.suppress(FileNotFoundError):
            self._system.ask(lambda: os.stat(path, follow_symlinks=False))
            self._remove(path, torn=True)  # what a run that was killed in here has left
        with self._reporting("write", path, len(packed)):
            fd = self._system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                write_all(fd, memoryview(packed), 0, path=path, system=self._system)
                self._system.fsync(fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._system.unlink(path)
                raise
            finally:
                self._system.close(fd)

    def _reporting(self, operation: str, path: str, length: int = 0) -> AbstractContextManager[None]:
        def full(code: int) -> SwapFullError:
            why = why_full(partial(self._system.free_bytes, self.directory), code, length)
            return SwapFullError(
                f"no room for a manifest of {length} bytes in {self.directory!r}: {why}; the commit before holds"
            )

        return reporting(operation, path, length=length, full=full)


def _contents(path: str, system: SystemCalls, *, limit: int = _LARGEST) -> bytes:
    """The first `limit` bytes of a regular file, links not followed. Raises FormatError and SwapIOError."""
    with reporting("read", path):
        fd = system.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FormatError(f"expected {path!r} to be a file, found something else; it was left alone")
            return system.ask(lambda: _read(fd, min(limit, os.fstat(fd).st_size)))
        finally:
            system.close(fd)


def _read(fd: int, nbytes: int) -> bytes:
    """The first bytes of a file, fewer where it ends before."""
    read = bytearray()
    while piece := os.pread(fd, nbytes - len(read), len(read)):
        read += piece
    return bytes(read)
