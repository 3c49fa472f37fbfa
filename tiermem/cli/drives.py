"""What one directory is worth as a place for swap files.

Owns the questions put to the file system: type, free bytes, direct I/O, spinning or not. Does not measure speed; that
is a benchmark's work. Guarantees that its probe file is gone afterwards (unless the drive answers after
the program's end), that it waits ten seconds for an answer of the drive at most, whatever it asks, and that an
unanswerable question is None.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import psutil

from swap.errors import NO_SPACE
from swap.patience import PatientSystemCalls
from swap.syscalls import UNCOUNTED, SystemCalls
from tiermem.memory.numa import block_node
from tiermem.memory.sizes import format_bytes

T = TypeVar("T")

BLOCK = 4096
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
LITTLE_FREE = 1 << 30
_PATIENCE = 10.0  # seconds
_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class DriveReport:
    """What was found about a directory; None where it could not be found out.

    `refusal`: why no file can be made there, though permissions allow it.
    """

    directory: str
    exists: bool
    writable: bool
    free_bytes: int | None
    file_system: str | None
    direct_io: bool | None
    rotational: bool | None
    logical_block: int | None = None
    drive_model: str | None = None
    node: int | None = None
    refusal: str | None = None

    def problems(self) -> Iterator[str]:
        """Yield what makes the directory unfit, and what to do about it."""
        if not self.exists:
            yield f"{self.directory} is not a directory; make it, or mount its drive"
            return
        if not self.writable:
            yield f"{self.directory} is not writable by this user"
        if self.refusal is not None:
            yield f"{self.directory} takes no new file: {self.refusal}"
        if self.file_system in IN_MEMORY:
            yield f"{self.directory} is on {self.file_system}, which is memory itself; choose a directory on a drive"
        elif self.direct_io is False:
            what = "refuses direct I/O, so swapping goes through the page cache"
            yield f"{self.directory} {what}; choose ext4 or xfs{' on another drive' if self.has_large_blocks else ''}"
        if self.free_bytes is not None and self.free_bytes < LITTLE_FREE:
            yield f"{self.directory} has only {format_bytes(self.free_bytes)} free"

    @property
    def has_large_blocks(self) -> bool:
        """Whether the drive moves larger blocks only than transfers are aligned to."""
        return self.logical_block is not None and self.logical_block > BLOCK

    def to_line(self) -> str:
        """Return the findings in one line."""
        if not self.exists:
            return "is no directory, or does not exist"
        direct = {True: "direct I/O", False: "no direct I/O", None: "direct I/O unknown"}[self.direct_io]
        spinning = {True: "said to spin", False: "solid state", None: "drive unknown"}[self.rotational]
        model = f", {self.drive_model}" if self.drive_model else ""
        blocks = f", blocks of {self.logical_block}" if self.logical_block else ""
        free = "free space unknown" if self.free_bytes is None else f"{format_bytes(self.free_bytes)} free"
        return f"{free}, {self.file_system or 'file system unknown'}, {direct}{blocks}, {spinning}{model}"


def examine_drive(directory: Path) -> DriveReport:
    """Look at `directory`."""
    try:
        found = _answered(lambda: _look(directory))
    except OSError as error:  # there is something, such as a mount whose server is gone
        return DriveReport(str(directory), True, True, None, None, None, None, refusal=_reason(error))
    if found.exists and found.writable:
        direct, refusal = _probed(directory)
        return replace(found, direct_io=direct, refusal=refusal)
    return found


def _look(directory: Path) -> DriveReport:
    """What is found without making a file. Raises OSError where the file system says nothing."""
    try:
        exists = stat.S_ISDIR(os.stat(directory).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        exists = False
    return DriveReport(
        directory=str(directory),
        exists=exists,
        writable=exists and os.access(directory, os.W_OK | os.X_OK),
        free_bytes=_known_free_bytes(directory) if exists else None,
        file_system=file_system(directory) if exists else None,
        direct_io=None,
        rotational=is_rotational(directory) if exists else None,
        logical_block=_number(queue_attribute(directory, "queue/logical_block_size")) if exists else None,
        drive_model=queue_attribute(directory, "device/model") if exists else None,
        node=drive_node(directory) if exists else None,
    )


def _answered(question: Callable[[], T]) -> T:
    return PatientSystemCalls(None, _PATIENCE).ask(question)


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"its drive has not answered for {_PATIENCE:g} seconds; see the kernel log"
    return os.strerror(error.errno or errno.EIO)


def _known_free_bytes(directory: Path) -> int | None:
    free = SystemCalls().free_bytes(os.fspath(directory))  # as `swap` counts them
    return free if free < UNCOUNTED else None


def _probed(directory: Path) -> tuple[bool | None, str | None]:
    """Whether direct I/O works, and why no file can be made: no inodes left, or a file system that only looks so."""
    try:
        return _answered(lambda: direct_io_works(directory)), None
    except OSError as error:
        full = error.errno in NO_SPACE and os.statvfs(directory).f_favail == 0
        return None, "no inodes are free there (`df -i`)" if full else _reason(error)


def file_system(directory: Path) -> str | None:
    """Return the type of the file system `directory` is on."""
    resolved = directory.resolve()
    best, kind = -1, None
    for partition in psutil.disk_partitions(all=True):
        mount = Path(partition.mountpoint)
        # Later mounts cover earlier ones on the same point, hence >=.
        if resolved.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), partition.fstype
    return kind or None


def direct_io_works(directory: Path) -> bool | None:
    """Return whether a block can be written with O_DIRECT in `directory`; None: there is no such flag, or no room.

    Raises OSError if no file can be made.
    """
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    handle, name = tempfile.mkstemp(prefix="tiermem-probe-", dir=directory)
    os.close(handle)
    try:
        handle = os.open(name, os.O_WRONLY | flag)
        try:
            with mmap.mmap(-1, BLOCK) as page:  # anonymous memory is page-aligned, as O_DIRECT demands
                return os.pwrite(handle, page, 0) == BLOCK
        finally:
            os.close(handle)
    except OSError as error:
        return None if error.errno in NO_SPACE else False  # a full disk says nothing of how it is written to
    finally:
        Path(name).unlink()


def is_rotational(directory: Path, root: Path = _ROOT) -> bool | None:
    """Return whether the drive below `directory` spins, as the kernel says; None for what is no block device.

    Virtual disks often say so without spinning, so this is a finding, not a problem.
    """
    text = queue_attribute(directory, "queue/rotational", root)
    return None if text is None else text == "1"


def queue_attribute(directory: Path, name: str, root: Path = _ROOT) -> str | None:
    """Return what the kernel says of the drive below `directory`, such as "queue/rotational"; None if it does not.

    `root`: where `sys` is found.
    """
    device = directory.stat().st_dev
    block = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    # A partition has no queue of its own: its disk is the folder above.
    for folder in (block, block.resolve().parent):
        try:
            return (folder / name).read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            continue
    return None


def drive_node(directory: Path, root: Path = _ROOT) -> int | None:
    """Return the NUMA node that the drive below `directory` hangs on; None where the kernel does not say."""
    device = directory.stat().st_dev
    return block_node(os.major(device), os.minor(device), root / "sys")


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
