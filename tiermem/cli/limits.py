"""What the system allows this process: memory, locked memory, open files.

Owns the reading of control groups, version 1 and 2, and of resource limits. Does not judge. Guarantees the tightest of
all limits that apply, those of enclosing groups included, and None where there is none.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_V1_FILE, _V2_FILE = "memory.limit_in_bytes", "memory.max"


def cgroup_limit(memory_total: int, root: Path = _ROOT) -> int | None:
    """Return the bytes this process's control groups leave it; None if that is no less than the machine's memory.

    `root`: where `proc` and `sys` are found.
    """
    limits = []
    for path in limit_files(root):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():  # version 2 says "max", version 1 a number beyond all memory
            limits.append(int(text))
    tightest = min(limits, default=memory_total)
    return tightest if tightest < memory_total else None


def limit_files(root: Path = _ROOT) -> Iterator[Path]:
    """Yield where the limits of this process's memory groups stand, from the innermost to the outermost."""
    groups = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _upwards(groups / "memory", group, _V1_FILE)
        elif not controllers:
            yield from _upwards(groups, group, _V2_FILE)
    # In a container the path is that of the host, while its own group is mounted at the top.
    yield groups / "memory" / _V1_FILE
    yield groups / _V2_FILE


def soft_limit(which: int) -> int | None:
    """Return what `resource.getrlimit` says this process may have of `which`; None: without limit."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _upwards(top: Path, group: str, name: str) -> Iterator[Path]:
    folder = top / group.lstrip("/")
    while folder != top:
        yield folder / name
        folder = folder.parent
