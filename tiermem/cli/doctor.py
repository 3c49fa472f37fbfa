"""`tiermem doctor`: what this machine offers for swapping, and what is wrong with it.

Owns the findings and which of them are problems. Does not change anything but a small probe file in each directory,
removed at once. Guarantees an answer for every question: what cannot be found out is None, said as "unknown".
"""

from __future__ import annotations

import dataclasses
import json
import platform
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from rich.table import Table

from tiermem.cli.drives import DriveReport, examine_drive
from tiermem.memory.sizes import format_bytes

CGROUP_V1_LIMIT = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
CGROUP_V2_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What was found; the field names are those of `tiermem doctor --json`."""

    python: str
    torch: str
    cuda_devices: tuple[str, ...]
    cpu_cores: int
    memory_bytes: int
    memory_available_bytes: int
    cgroup_limit_bytes: int | None
    memlock_bytes: int | None
    swap_dirs: tuple[DriveReport, ...]
    problems: tuple[str, ...]

    def to_json(self) -> str:
        """Return the findings as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    def to_table(self) -> Table:
        """Return the findings as a table for a terminal."""
        table = Table(show_header=False)
        table.add_column(style="bold")
        table.add_column()
        table.add_row("Python", self.python)
        table.add_row("torch", self.torch)
        table.add_row("CUDA", ", ".join(self.cuda_devices) or "no device: the computation runs on the CPU")
        table.add_row("CPU cores", str(self.cpu_cores))
        available = format_bytes(self.memory_available_bytes)
        table.add_row("memory", f"{format_bytes(self.memory_bytes)}, {available} available")
        table.add_row("memory limit (cgroup)", describe(self.cgroup_limit_bytes, otherwise="none"))
        table.add_row("lockable memory", describe(self.memlock_bytes, otherwise="unlimited"))
        for drive in self.swap_dirs:
            table.add_row(f"swap {drive.directory}", drive.to_line())
        for problem in self.problems:
            table.add_row("[red]problem[/red]", problem)
        return table


def examine(directories: Sequence[Path]) -> DoctorReport:
    """Look at this machine and at `directories` as places for swap files."""
    drives = tuple(examine_drive(directory) for directory in directories)
    memory = psutil.virtual_memory()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return DoctorReport(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda_devices=tuple(torch.cuda.get_device_name(device) for device in devices),
        cpu_cores=psutil.cpu_count() or 1,
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
        cgroup_limit_bytes=cgroup_limit(memory.total),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        swap_dirs=drives,
        problems=tuple(problem for drive in drives for problem in drive.problems()),
    )


def cgroup_limit(memory_total: int) -> int | None:
    """Return the bytes this process's control group may use; None if there is no limit below the machine's memory."""
    limits = [memory_total]
    for path in (*own_cgroup_limits(), CGROUP_V1_LIMIT, CGROUP_V2_LIMIT):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits) if min(limits) < memory_total else None


def own_cgroup_limits() -> list[Path]:
    """Return the files holding the memory limits of this process's own control group, version 1 or 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "memory":
            files.append(CGROUP_V1_LIMIT.parent / group.lstrip("/") / CGROUP_V1_LIMIT.name)
        elif not controllers:
            files.append(CGROUP_V2_LIMIT.parent / group.lstrip("/") / CGROUP_V2_LIMIT.name)
    return files


def describe(nbytes: int | None, *, otherwise: str) -> str:
    """Return an amount as text, or `otherwise` if there is none."""
    return otherwise if nbytes is None else format_bytes(nbytes)
