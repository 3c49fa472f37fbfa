"""How much memory this process could still use, and how many processor cores.

Owns the reading of what the system and its control groups (versions 1 and 2) say. Does not know budgets or settings.
Guarantees numbers that take every enclosing limit into account, and that a missing or foreign file system means "no
such limit", never an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

MEMBERSHIP, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

# (limit files, usage file, and the fields of memory.stat that count file cache the system can drop). Beyond memory.high
# (MemoryHigh= of a service) nothing is killed, but made to wait, longer and longer.
_VERSION_1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_VERSION_2 = (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def available_host_memory() -> int:
    """Return the bytes this process could still take: free and droppable, within its control groups' limits."""
    available = int(psutil.virtual_memory().available)
    headroom = control_group_headroom(MEMBERSHIP, MOUNT)
    return available if headroom is None else min(available, headroom)


def control_group_headroom(membership: Path, root: Path) -> int | None:
    """Return the bytes left under the tightest control group limit, or None if none is set.

    `membership` is `/proc/self/cgroup`, lines of `id:controllers:path`; `root` is where control groups are mounted. In
    a container the path may lie outside what is mounted; then the mount's own root is what counts.
    """
    rooms: list[int] = []
    for group in _groups(membership, root):
        usage = number_in(group.folder / group.usage_name)
        if usage is not None:
            droppable = _droppable(group.folder / "memory.stat", group.cache)
            rooms.append(max(0, group.limit - max(0, usage - droppable)))
    return min(rooms, default=None)


def control_group_limit(membership: Path = MEMBERSHIP, root: Path = MOUNT) -> int | None:
    """Return the tightest control group limit in bytes, or None if none is set. Arguments as above."""
    return min((group.limit for group in _groups(membership, root)), default=None)


def available_cores(membership: Path = MEMBERSHIP, root: Path = MOUNT) -> float:
    """Return how many cores this process may use: those it is bound to, within its control groups' shares of time.

    A container that may use half a core has 0.5. Arguments as above.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = (_processor_time(folder, version) for folder, version in _folders(membership, root, "cpu"))
    return min([bound, *(share for share in shares if share is not None)])


class _Group(NamedTuple):
    """A control group that has a limit."""

    folder: Path
    limit: int
    usage_name: str
    cache: tuple[str, ...]


def _groups(membership: Path, root: Path) -> Iterator[_Group]:
    """The process's own groups that have limits of memory, and those around them."""
    for folder, version in _folders(membership, root, "memory"):
        limit_names, usage_name, cache = _VERSION_1 if version == 1 else _VERSION_2
        limits = [number_in(folder / name) for name in limit_names]
        limit = min((limit for limit in limits if limit is not None), default=None)
        # Version 1 writes "no limit" as the largest multiple of a page.
        if limit is not None and limit < 1 << 60:
            yield _Group(folder, limit, usage_name, cache)


def _folders(membership: Path, root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The folders of the process's own groups and of those around them, with their version."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            yield from ((folder, 1) for folder in _upwards(root / controller, path))
        elif not controllers:
            for mount in (root, root / "unified"):
                yield from ((folder, 2) for folder in _upwards(mount, path))


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    names = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for depth in range(len(names) + 1):
        yield mount.joinpath(*names[:depth])


def _processor_time(folder: Path, version: int) -> float | None:
    """Seconds of processor time a second that a group may take; None: as many as there are."""
    if version == 1:
        quota, period = (number_in(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    else:
        quota, period = [*_numbers(folder / "cpu.max"), None, None][:2]
    return quota / period if quota and period else None


def number_in(file: Path) -> int | None:
    """The number in `file`; None if there is no such file or it says "max" or "-1"."""
    return next(iter(_numbers(file)), None)


def _numbers(file: Path) -> list[int | None]:
    """The words in `file`, with None for one that is no number; none if there is no such file."""
    try:
        words = file.read_text().split()
    except OSError:
        return []
    return [int(word) if word.isdecimal() else None for word in words]


def _droppable(file: Path, fields: tuple[str, ...]) -> int:
    """Bytes of file cache, which count as used but are dropped before anything fails."""
    try:
        pairs = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in fields and pair[1].isdecimal())
