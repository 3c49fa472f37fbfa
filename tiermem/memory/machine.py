"""How much memory this process could still use.

Owns the reading of what the system and its control groups (versions 1 and 2) say. Does not know budgets or settings.
Guarantees a number that takes every enclosing limit into account, and that a missing or foreign file system means "no
such limit", never an error.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import psutil

# (limit file, usage file, and the fields of memory.stat that count file cache the system can drop)
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_VERSION_2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_host_memory() -> int:
    """Return the bytes this process could still take: free and droppable, within its control groups' limits."""
    available = int(psutil.virtual_memory().available)
    headroom = control_group_headroom(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return available if headroom is None else min(available, headroom)


def control_group_headroom(membership: Path, root: Path) -> int | None:
    """Return the bytes left under the tightest control group limit, or None if none is set.

    `membership` is `/proc/self/cgroup`, lines of `id:controllers:path`; `root` is where control groups are mounted. In
    a container the path may lie outside what is mounted; then the mount's own root is what counts.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    rooms: list[int] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            rooms.extend(_rooms(root / "memory", path, *_VERSION_1))
        elif not controllers:
            for mount in (root, root / "unified"):
                rooms.extend(_rooms(mount, path, *_VERSION_2))
    return min(rooms, default=None)


def _rooms(mount: Path, path: str, limit_name: str, usage_name: str, cache: tuple[str, ...]) -> list[int]:
    """Bytes left in the group at `path` and in each group around it that has a limit."""
    names = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    rooms = []
    for depth in range(len(names) + 1):
        folder = mount.joinpath(*names[:depth])
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        # Version 1 writes "no limit" as the largest multiple of a page.
        if limit is not None and usage is not None and limit < 1 << 60:
            rooms.append(max(0, limit - max(0, usage - _droppable(folder / "memory.stat", cache))))
    return rooms


def _number(file: Path) -> int | None:
    """The number in `file`; None if there is no such file or it says "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _droppable(file: Path, fields: tuple[str, ...]) -> int:
    """Bytes of file cache, which count as used but are dropped before anything fails."""
    try:
        pairs = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in fields and pair[1].isdecimal())
