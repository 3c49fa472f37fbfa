"""Commits: manifests on disk, one replacing the other so that a cut at any instant leaves one that holds.

Owns the manifests of one rank, `<name>.<generation>.manifest` in the first swap directory: with stripes the loss of any
directory is the loss of all, so copies elsewhere would only be something to disagree. Does not move data and does not
lock: the space's lock covers it. Guarantees:

1. A manifest under its final name is whole, and all bytes it speaks of are durable ("The order of a commit").
2. While a manifest exists and no newer one was acknowledged, its extents are untouched, if the caller keeps to rule
   "Keep both marks". So falling back to it, when the newer one turns out to be damaged, is always safe.
3. A file that is not ours, or damaged, is never removed or overwritten.

The order of a commit. (1) fdatasync of every data file: what the manifest promises must be there before the promise.
(2) The manifest under a temporary name, fsync: a name must never become durable before the bytes behind it. (3) rename,
fsync of the directory: the commit; before it the old one holds, after it the new. (4) unlink of the old manifest, fsync
of the directory: only now may the old extents be written over, because only now can nobody fall back to them.

Keep both marks. The mark of the last acknowledged commit, and that of the one being written, are kept until `write`
returns; then the older is released. If `write` raises, both are kept until a later `write` returns. After an error that
leaves open which manifest is on disk, no later `write` will: the store is failed for good, and only closing is left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swap import manifest as format_of
from swap.errors import FormatError, SwapError, SwapFullError, SwapIOError
from swap.files import sync_directory
from swap.manifest import Entry, Manifest
from swap.patience import PatientSystemCalls
from swap.settings import STALL_SECONDS
from swap.space import SwapSpace
from swap.syscalls import SystemCalls

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LARGEST = 1 << 32  # bytes of a manifest; a hundred million entries have less


class CommitStore:
    """The manifests of rank `name`. Not thread-safe: one thread commits."""

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        name: str,
        system: SystemCalls | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """Open the store in existing directories, the same as the space's and in the same order.

        After `stall_seconds` without an answer of the drive a system call is an error.
        """
        self.directory = os.fspath(directories[0])
        self._name = name
        self._system = PatientSystemCalls(system, stall_seconds)
        self._latest: Manifest | None = None
        self._settled = False
        self._failed: BaseException | None = None

    @property
    def latest(self) -> Manifest | None:
        """The last commit acknowledged or settled here."""
        return self._latest

    @property
    def in_doubt(self) -> bool:
        """Whether a commit failed so that it is not known which manifest is on disk: both marks must be kept then."""
        return self._failed is not None

    def read_latest(self) -> Manifest | None:
        """The newest intact manifest; None if there is none at all. Changes nothing.

        Raises FormatError if the newest one is damaged and there is no earlier one whose extents are untouched, or if
        something that is not ours has its name.
        """
        found = self._found()
        damage: FormatError | None = None
        for generation in sorted(found, reverse=True):
            try:
                return self._read(generation)
            except FormatError as error:
                if not self._is_ours(self._path(generation)):
                    raise
                damage = damage or error
        if damage is not None:
            raise FormatError(
                f"{damage}; there is no earlier commit to fall back to: {len(found)} manifests, none whole"
            )
        return None

    def settle(self, manifest: Manifest) -> None:
        """Go on from this manifest, which `read_latest` returned: remove older ones, put damaged newer ones aside.

        Waits until that is durable. From then on the extents of the others may be overwritten.
        """
        for generation in self._found():
            path = self._path(generation)
            with self._reporting("rename" if generation > manifest.generation else "unlink", path):
                if generation > manifest.generation:
                    self._system.rename(path, f"{path}.damaged")
                elif generation < manifest.generation:
                    self._remove_ours(path)
        sync_directory(self.directory, self._system)
        self._latest = manifest
        self._settled = True

    def discard(self) -> None:
        """Forget the commits of an earlier run: remove its manifests. Waits until that is durable.

        To be called before the space is opened without `keep`. Raises FormatError, having removed nothing, if something
        that is not ours or is damaged has the name of a manifest.
        """
        found = self._found()
        for generation in found:
            self._read(generation)
        for generation in sorted(found):  # the newest last: an older one alone must never look like the last commit
            with self._reporting("unlink", self._path(generation)):
                self._system.unlink(self._path(generation))
            sync_directory(self.directory, self._system)
        self._latest = None
        self._settled = True

    def write(
        self, generation: int, entries: Iterable[Entry], user: Mapping[str, Any], *, space: SwapSpace
    ) -> Manifest:
        """Commit: returns when the manifest, and everything it speaks of, is durable. Waits for the drive.

        `entries` must come from a mark that is live until then, whose writes have ended ("Keep both marks"); `user` is
        what JSON holds, with text for keys. `generation` must exceed that of the last commit. Writes to other extents
        may go on meanwhile. Raises SwapIOError, SwapFullError, TypeError or ValueError for an unfit `user`.
        """
        self._check(generation)
        manifest = Manifest(generation, space.run_id, space.file_sizes, tuple(entries), user, time.time())
        packed = format_of.pack(manifest)
        space.make_durable()
        temporary = os.path.join(self.directory, f"{self._name}.manifest.new")
        path = self._path(generation)
        self._write_file(temporary, packed)
        try:
            with self._reporting("rename", path):
                self._system.rename(temporary, path)
            sync_directory(self.directory, self._system)
            if self._latest is not None:
                with self._reporting("unlink", self._path(self._latest.generation)):
                    self._system.unlink(self._path(self._latest.generation))
                sync_directory(self.directory, self._system)
        except BaseException as error:  # which manifest is on disk, and for how long, is not known any more
            self._failed = error
            raise
        self._latest = manifest
        return manifest

    def _check(self, generation: int) -> None:
        if self._failed is not None:
            raise SwapError(f"no commit is possible after this: {self._failed}") from self._failed
        if not self._settled:
            if self._found():
                raise SwapError(
                    f"{self.directory!r} holds commits of an earlier run: settle on the latest, or discard them, first"
                )
            self._settled = True
        if generation < 0 or (self._latest is not None and generation <= self._latest.generation):
            last = self._latest.generation if self._latest is not None else "none"
            raise ValueError(f"expected a generation above the last ({last}), found {generation}")

    def _path(self, generation: int) -> str:
        return os.path.join(self.directory, f"{self._name}.{generation:020d}.manifest")

    def _found(self) -> list[int]:
        """The generations there are files for."""
        pattern = re.compile(re.escape(self._name) + r"\.(\d{20})\.manifest")
        with self._reporting("list", self.directory):
            matches = [pattern.fullmatch(name) for name in os.listdir(self.directory)]
        return sorted(int(match[1]) for match in matches if match)

    def _read(self, generation: int) -> Manifest:
        path = self._path(generation)
        manifest = format_of.parse(_contents(path, self._system), path)
        if manifest.generation != generation:
            raise FormatError(f"expected {path!r} to be generation {generation}, found {manifest.generation}")
        return manifest

    def _is_ours(self, path: str) -> bool:
        return format_of.is_ours(_contents(path, self._system, limit=64))

    def _remove_ours(self, path: str, *, torn: bool = False) -> None:
        """Remove a manifest; with `torn` also one whose bytes a power cut has lost, which reads as zeros."""
        if not self._is_ours(path) and not (torn and not any(_contents(path, self._system, limit=64))):
            raise FormatError(f"expected {path!r} to be a manifest of this program, found something else")
        self._system.unlink(path)

    def _write_file(self, path: str, packed: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):  # what a run that was killed in here has left
            os.stat(path, follow_symlinks=False)
            with self._reporting("unlink", path):
                self._remove_ours(path, torn=True)
        with self._reporting("write", path, len(packed)):
            fd = self._system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                self._write_all(fd, memoryview(packed), path)
                self._system.fsync(fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._system.unlink(path)
                raise
            finally:
                self._system.close(fd)

    def _write_all(self, fd: int, left: memoryview, path: str) -> None:
        done = 0
        while done < len(left):
            try:
                moved = self._system.pwritev(fd, left[done:], done)
            except InterruptedError:
                continue
            if moved == 0:
                raise SwapIOError("write", path, length=len(left), detail="the device takes no more")
            done += moved

    @contextlib.contextmanager
    def _reporting(self, operation: str, path: str, length: int = 0) -> Any:
        try:
            yield
        except SwapError:
            raise
        except OSError as error:
            code = error.errno or errno.EIO
            if code in _FULL:
                free = self._system.free_bytes(self.directory)
                raise SwapFullError(
                    f"no room for a manifest of {length} bytes in {self.directory!r}: {free} bytes are free "
                    f"({os.strerror(code)}); the commit before holds"
                ) from error
            raise SwapIOError(operation, path, length=length, errno=code) from error


def _contents(path: str, system: SystemCalls, *, limit: int = _LARGEST) -> bytes:
    """The first `limit` bytes of a regular file, links not followed. Raises FormatError and SwapIOError."""
    try:
        fd = system.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FormatError(f"expected {path!r} to be a file, found something else; it was left alone")
            with os.fdopen(fd, "rb", closefd=False) as file:
                return file.read(limit)
        finally:
            system.close(fd)
    except OSError as error:
        raise SwapIOError("read", path, errno=error.errno or errno.EIO) from error
