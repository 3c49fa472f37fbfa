"""A memory limit that the kernel enforces, for one child process and its children.

Owns a memory control group (cgroup, version 1 or 2) for the time of one child. Does not know what the child does. The
child enters the group before it starts its program, so that everything it maps is counted; more than the limit and the
kernel first reclaims page cache, then kills it. Page cache counts too, but is given up under pressure; direct I/O
leaves none. `why_not()` says why a limit cannot be set here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

V1_ROOT = Path("/sys/fs/cgroup/memory")
V2_ROOT = Path("/sys/fs/cgroup")
KILLED = -9


@dataclass(frozen=True)
class LimitedRun:
    """What became of a limited child."""

    completed: subprocess.CompletedProcess[str]
    peak_bytes: int | None  # most the group ever held, page cache included; None where the kernel does not say

    @property
    def was_killed(self) -> bool:
        """Whether the child was killed, as it is for wanting more than its limit."""
        return self.completed.returncode == KILLED


class MemoryGroup:
    """One control group with a memory limit; a folder under /sys/fs/cgroup."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self.is_v2 = not (path / "memory.limit_in_bytes").exists()
        self.write("memory.max" if self.is_v2 else "memory.limit_in_bytes", limit_bytes)
        # Memory must not escape to an operating-system swap device, where there is one.
        with contextlib.suppress(OSError):
            if self.is_v2:
                self.write("memory.swap.max", 0)
            else:
                self.write("memory.memsw.limit_in_bytes", limit_bytes)

    def write(self, name: str, value: int) -> None:
        """Set a number of the group."""
        (self.path / name).write_text(str(value), encoding="ascii")

    def peak_bytes(self) -> int | None:
        """Return the most bytes the group ever held."""
        try:
            return int((self.path / ("memory.peak" if self.is_v2 else "memory.max_usage_in_bytes")).read_text())
        except OSError:  # memory.peak is newer than version 2 itself
            return None


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Make a control group limited to `limit_bytes`; remove it on leaving. OSError where that is not allowed."""
    path = groups_root() / f"tiermem-limit-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    try:
        yield MemoryGroup(path, limit_bytes)
    finally:
        remove(path)


def remove(path: Path) -> None:
    """Remove a group, killing what its child left running in it: a group with a process in it cannot be removed."""
    for _ in range(500):
        with contextlib.suppress(OSError):
            path.rmdir()
            return
        for process in map(int, (path / "cgroup.procs").read_text(encoding="ascii").split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)  # what was killed leaves the group a little later
    path.rmdir()


def groups_root() -> Path:
    """Return the folder in which memory groups are made; OSError if this machine has none."""
    if (V1_ROOT / "memory.limit_in_bytes").exists():
        return V1_ROOT
    controllers = V2_ROOT / "cgroup.subtree_control"
    if not controllers.exists():
        raise OSError("there is no memory control group in /sys/fs/cgroup")
    if "memory" not in controllers.read_text(encoding="ascii").split():
        controllers.write_text("+memory", encoding="ascii")
    return V2_ROOT


def why_not() -> str | None:
    """Return why no limit can be set on this machine; None if it can."""
    try:
        with memory_group(1 << 30):
            return None
    except OSError as error:  # not with the group's name, which is another one each time
        where = f" in {Path(error.filename).parent}" if error.filename else ""
        return f"no memory limit can be set here: {error.strerror or error}{where}"


def run_in_group(
    arguments: Sequence[str], limit_bytes: int, *, timeout_seconds: float = 300, cwd: Path | None = None
) -> LimitedRun:
    """Run a program under a memory limit. Raises OSError where none can be set.

    The limit is for everything the child maps, its interpreter and libraries included, and for its own children.
    """
    shell = shutil.which("sh") or "/bin/sh"
    with memory_group(limit_bytes) as group:
        # The shell joins the group and then becomes the program: nothing of it ever runs outside.
        join = ["-c", 'echo $$ > "$0" && exec "$@"', str(group.path / "cgroup.procs")]
        completed = subprocess.run(
            [shell, *join, *arguments], capture_output=True, text=True, timeout=timeout_seconds, cwd=cwd, check=False
        )
        return LimitedRun(completed, group.peak_bytes())
