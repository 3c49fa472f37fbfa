"""The files a measurement works on: its own, made for it, gone with it.

Owns one swap file per directory, with a name nobody else has, each seen twice: direct and through the page cache.
Does not know what is measured. Guarantees that a directory that is missing, read-only or too full is refused before
anything is made, that a twentieth of the free space stays free, and that a file has lost its name before anything is
written to it, so that whatever ends the process ends the file too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from swap.buffers import AlignedBuffer
from swap.errors import SwapFullError, reporting
from swap.file_systems import file_system_of
from swap.files import DATA_OFFSET, SwapFile
from swap.locks import close_descriptor
from swap.patience import PatientSystemCalls
from swap.requests import BlockFile
from swap.settings import STALL_SECONDS
from swap.syscalls import SystemCalls

_LEFT_FREE = 20  # a twentieth of what is free stays free: others are writing there too
_NOISE_BYTES = 1 << 20


class BufferedView:
    """A swap file opened a second time, through the page cache; a `BlockFile`."""

    direct = False

    def __init__(self, file: SwapFile, system: SystemCalls) -> None:
        self.path = file.path
        self.device = file.device
        self._system = system
        with reporting("open", self.path):
            self._fd = system.open(file.path, os.O_RDWR | os.O_NOFOLLOW)

    def fileno(self) -> int:
        """The open descriptor."""
        return self._fd

    def settle(self) -> None:
        """Wait until what was written is on the drive, and let the page cache forget the file. Raises SwapIOError."""
        with reporting("sync", self.path):
            self._system.fdatasync(self._fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the descriptor. Raises SwapIOError."""
        close_descriptor(self._fd, self.path, self._system)


class Ground:
    """Files of `nbytes` in each directory, and memory for what is in flight; made by `open`, removed by `close`."""

    def __init__(self, nbytes: int, buffer: AlignedBuffer, system: SystemCalls) -> None:
        self.nbytes = nbytes
        self.buffer = buffer
        self.system = system
        self.files: list[SwapFile] = []
        self.buffered: list[BufferedView] = []

    @classmethod
    def open(
        cls,
        directories: Sequence[Path],
        *,
        nbytes: int,
        buffer_nbytes: int,
        huge_pages: bool = True,
        system: SystemCalls | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> Self:
        """Make the files and reserve their space.

        Raises SwapIOError for a directory that cannot be used, or whose drive does not answer within `stall_seconds`;
        SwapFullError for one without room; nothing is left.
        """
        system = system or SystemCalls()
        patient = PatientSystemCalls(system, stall_seconds)
        require_room(directories, nbytes, patient)
        ground = cls(nbytes, AlignedBuffer(buffer_nbytes, huge_pages=huge_pages), system)
        try:
            _fill_with_noise(ground.buffer.view)
            for directory in directories:
                name = f"tiermem-bench-{os.getpid()}-{secrets.token_hex(4)}"
                ground.files.append(SwapFile.open(directory, name=name, nbytes=nbytes, system=patient))
                ground.buffered.append(BufferedView(ground.files[-1], system))
                ground.files[-1].forget_name()  # nothing is left then, not even by SIGKILL
        except BaseException:
            ground.close()
            raise
        return ground

    @property
    def direct(self) -> bool:
        """Whether every directory accepts direct I/O."""
        return all(file.direct for file in self.files)

    def seen(self, which: Sequence[int], *, direct: bool) -> list[BlockFile]:
        """Some of the files, as a case wants to see them."""
        return [self.files[index] if direct else self.buffered[index] for index in which]

    def settle(self) -> None:
        """Empty the page cache of these files, writing out what is dirty."""
        for view in self.buffered:
            view.settle()

    def close(self) -> None:
        """Close every file, which ends it, and give the memory back. Raises the first error, after all was tried."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._give_up_buffer)
            for file in self.files:
                stack.callback(file.close, remove=True)
            for view in self.buffered:
                stack.callback(view.close)
            self.files, self.buffered = [], []

    def _give_up_buffer(self) -> None:
        with contextlib.suppress(BufferError):  # a drive that has not answered may yet write into it
            self.buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def require_room(directories: Sequence[Path], nbytes: int, system: SystemCalls | None = None) -> None:
    """Raise SwapIOError unless all are directories, SwapFullError unless `nbytes` fit into each with room to spare."""
    system = system or SystemCalls()
    wanted: dict[int, int] = {}
    for directory in directories:
        path = os.fspath(directory)
        with reporting("open", path):
            device = file_system_of(os.path.join(path, ""))  # with the slash a file in its place is an error
            free = system.free_bytes(path)
        wanted[device] = wanted.get(device, 0) + nbytes + DATA_OFFSET
        if wanted[device] > free - free // _LEFT_FREE:
            raise SwapFullError(
                f"measuring in {path!r} needs {wanted[device]} bytes, {free} are free there and a twentieth of "
                "that is left alone; choose a smaller size or another directory"
            )


def _fill_with_noise(view: memoryview) -> None:
    """Bytes that no drive can compress; zeros would flatter some of them."""
    noise = secrets.token_bytes(min(_NOISE_BYTES, view.nbytes))
    for start in range(0, view.nbytes, len(noise)):
        length = min(len(noise), view.nbytes - start)
        view[start : start + length] = noise[:length]
