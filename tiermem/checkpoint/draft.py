"""A folder that is there whole or not at all.

Owns a folder being made under a name of its own beside its final one, and its becoming that one by a single rename.
Does not know what the files mean. Guarantees that the final name never stands for half a folder, that after an error
nothing is left behind (a killed process may leave the hidden folder, which nothing takes for a whole one), and that
nothing that was there before is replaced.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from swap import SystemCalls
from swap.paths import sync_directory
from swap.patience import PatientSystemCalls
from swap.settings import STALL_SECONDS
from swap.transfer import write_all
from tiermem.checkpoint.tensor_writer import TensorSpec, TensorWriter, reporting
from tiermem.errors import ConfigError

_SHOWN = 48  # characters of a folder's name in that of its draft, which is longer; a name has 255 bytes at most


class Draft:
    """A folder being made. A context manager: without `finish` it is gone at the end."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        stall_seconds: float = STALL_SECONDS,
        folder: Path | None = None,
        system: SystemCalls | None = None,
    ) -> None:
        """Begin a folder that is to be `path`: a free name, or an empty folder, in a folder that exists.

        `folder`: where another process has begun it; that one finishes it, and removes it if it is abandoned.

        A system call that the drive does not answer within `stall_seconds` is an error. Raises ConfigError if the path
        is neither free nor an empty folder, SwapIOError if it cannot be looked at or made.
        """
        self.path = Path(os.path.abspath(os.path.expanduser(os.fspath(path))))
        self._system = PatientSystemCalls(system or SystemCalls(), stall_seconds)
        self._finished = folder is not None  # nothing for this process to remove
        if folder is None:
            with reporting("open", self.path, system=self._system):
                folder = self._system.ask(lambda: _begin(self.path))
        self.folder = folder
        self._naming = False  # whether it has been asked for its final name
        self._open: list[TensorWriter] = []

    def tensors(
        self, name: str, specs: Sequence[TensorSpec], *, metadata: Mapping[str, str] | None = None
    ) -> TensorWriter:
        """Begin a safetensors file. Raises SwapFullError, SwapIOError."""
        writer = TensorWriter(self.folder / name, specs, metadata=metadata, system=self._system)
        self._open.append(writer)
        return writer

    def text(self, name: str, text: str) -> None:
        """Write a file of text and wait until it is durable. Raises SwapFullError, SwapIOError."""
        path, data = self.folder / name, text.encode("utf-8")
        with reporting("write", path, system=self._system, length=len(data)):
            fd = self._system.open(os.fspath(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                write_all(fd, memoryview(data), 0, path=path, system=self._system)
                self._system.fsync(fd)
            finally:
                self._system.close(fd)

    def finish(self) -> None:
        """Give the folder its name; durable when this returns. Raises ConfigError if the name was taken meanwhile."""
        sync_directory(os.fspath(self.folder), self._system)
        with reporting("rename", self.path, system=self._system):
            self._system.ask(lambda: _require_free(self.path))
            self._naming = True
            self._system.rename(os.fspath(self.folder), os.fspath(self.path))
        self._finished = True
        sync_directory(os.fspath(self.path.parent), self._system)

    def abandon(self) -> None:
        """Remove what there is of it, unless it is finished. May be called twice.

        Where the call that gives it its name was given up, that is done when it has ended: it may have it then, and
        is to be whole.
        """
        for writer in self._open:
            with contextlib.suppress(OSError):  # over a network it says once more why writing failed
                writer.close()
        if self._finished:
            return
        if self._naming and (late := self._system.late()):
            thread = threading.Thread(target=self._abandon_after, args=(late,), name="tiermem-draft", daemon=True)
            with contextlib.suppress(RuntimeError):  # none may be started: what is left is hidden
                thread.start()
            return
        with contextlib.suppress(OSError):  # what cannot be removed is hidden, and nothing takes it for whole
            self._system.ask(lambda: _remove(self.folder))

    def _abandon_after(self, late: Sequence[threading.Thread]) -> None:
        for thread in late:
            thread.join()
        self.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.abandon()


def _begin(path: Path) -> Path:
    """Make the folder that is to become `path`."""
    _require_free(path)
    return Path(tempfile.mkdtemp(prefix=f".{path.name[:_SHOWN]}.", suffix=".partial", dir=path.parent))


def _remove(folder: Path) -> None:
    """Remove a folder and its files, as far as that can be done. Raises OSError where something stays."""
    for file in folder.iterdir():
        with contextlib.suppress(OSError):
            file.unlink()
    folder.rmdir()


def _require_free(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"expected {str(path.parent)!r} to be a folder, found none; create it first")
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode) or any(path.iterdir()):
        raise ConfigError(f"expected {str(path)!r} to be free or an empty folder; remove it, or choose another name")
