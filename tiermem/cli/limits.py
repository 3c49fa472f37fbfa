"""What the system allows this process: memory, locked memory, open files.

Owns the reading of resource limits. Does not judge. Guarantees the tightest of all limits that apply, and None where
there is none.
"""

from __future__ import annotations

import resource
from pathlib import Path

from tiermem.memory.machine import MEMBERSHIP, MOUNT, control_group_limit


def cgroup_limit(memory_total: int, membership: Path = MEMBERSHIP, root: Path = MOUNT) -> int | None:
    """Return the bytes this process's control groups leave it; None if that is no less than the machine's memory."""
    tightest = control_group_limit(membership, root)
    return tightest if tightest is not None and tightest < memory_total else None


def soft_limit(which: int) -> int | None:
    """Return what `resource.getrlimit` says this process may have of `which`; None: without limit."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft
