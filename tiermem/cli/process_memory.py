"""How much memory this process holds, and has held at most.

Owns the reading of the kernel's own counters. Does not know budgets. Guarantees bytes, whatever unit the kernel uses.
"""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Return the bytes of memory the process occupies now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Return the most bytes of memory the process has occupied so far."""
    if _STATUS.exists():
        # ru_maxrss survives exec, so a child would inherit its parent's peak; VmHWM does not.
        # The name of the process is in it, in whatever letters that has.
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
