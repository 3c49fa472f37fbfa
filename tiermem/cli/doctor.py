"""`tiermem doctor`: what this machine offers for swapping, what that means, and what is wrong with it.

Owns the report, and which findings are problems. Does not change anything but a small probe file in each directory,
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
from rich.text import Text

from tiermem.cli.drives import DriveReport, examine_drive
from tiermem.cli.findings import (
    ENOUGH_FILES,
    Finding,
    Gpu,
    Limits,
    about_cpu,
    about_drive,
    about_gpus,
    about_memory,
    about_nodes,
    about_software,
)
from tiermem.memory import numa
from tiermem.memory.cuda import bus_address
from tiermem.memory.machine import MEMBERSHIP, MOUNT, available_cores, control_group_limit
from tiermem.optim.compiled import why_not


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
    cpu_model: str | None = None
    instruction_sets: tuple[str, ...] | None = None
    open_files: int | None = None
    file_size_bytes: int | None = None
    gpus: tuple[Gpu, ...] = ()
    no_compiled_loops: str | None = None
    numa_nodes: tuple[int, ...] = ()
    no_placement: str | None = None
    cpu_available: float | None = None
    threads: int = 1

    def findings(self) -> tuple[Finding, ...]:
        """Every fact with what it means for tiermem."""
        limits = Limits(self.cgroup_limit_bytes, self.memlock_bytes, self.open_files, self.file_size_bytes)
        return (
            *about_software(self.python, self.torch, self.no_compiled_loops),
            *about_cpu(self.cpu_model, self.cpu_cores, self.instruction_sets, self.cpu_available, self.threads),
            *about_memory(self.memory_bytes, self.memory_available_bytes, limits, beside_gpu=bool(self.gpus)),
            *about_gpus(self.gpus),
            *about_nodes(self.numa_nodes, self.gpus, self.swap_dirs, self.no_placement),
            *map(about_drive, self.swap_dirs),
        )

    def to_json(self) -> str:
        """Return the findings as one JSON object."""
        findings = [dataclasses.asdict(finding) for finding in self.findings()]
        return json.dumps({**dataclasses.asdict(self), "findings": findings})

    def to_table(self) -> Table:
        """Return the findings as a table for a terminal."""
        table = Table(show_header=False, show_lines=True)
        table.add_column(style="bold")
        table.add_column()
        for finding in self.findings():
            said = Text.assemble(finding.found, "\n", (finding.means, "dim"))
            if finding.change:
                said.append(f"\n{finding.change}", style="yellow")
            table.add_row(finding.name, said)
        for problem in self.problems:
            table.add_row(Text("problem", style="red"), problem)
        return table


def examine(directories: Sequence[Path]) -> DoctorReport:
    """Look at this machine and at `directories` as places for swap files; takes a second or two."""
    drives = tuple(examine_drive(directory) for directory in directories)
    memory = psutil.virtual_memory()
    gpus = find_gpus()
    model, sets = find_cpu()
    files, nodes = soft_limit(resource.RLIMIT_NOFILE), numa.memory_nodes()
    problems = [problem for drive in drives for problem in drive.problems()]
    if files is not None and files < 16 + 4 * len(drives):
        problems.append(f"only {files} files may be open at once: raise it with `ulimit -n {ENOUGH_FILES}`")
    return DoctorReport(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda_devices=tuple(gpu.name for gpu in gpus),
        cpu_cores=psutil.cpu_count() or 1,
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
        cgroup_limit_bytes=cgroup_limit(memory.total),
        memlock_bytes=soft_limit(resource.RLIMIT_MEMLOCK),
        swap_dirs=drives,
        problems=tuple(problems),
        cpu_model=model,
        instruction_sets=sets,
        open_files=files,
        file_size_bytes=soft_limit(resource.RLIMIT_FSIZE),
        gpus=gpus,
        no_compiled_loops=why_not(),
        numa_nodes=nodes,
        no_placement=numa.why_not(nodes[0]) if len(nodes) > 1 else None,
        cpu_available=available_cores(),
        threads=torch.get_num_threads(),
    )


def cgroup_limit(memory_total: int, membership: Path = MEMBERSHIP, root: Path = MOUNT) -> int | None:
    """Return the bytes this process's control groups leave it; None if that is no less than the machine's memory."""
    tightest = control_group_limit(membership, root)
    return tightest if tightest is not None and tightest < memory_total else None


def soft_limit(which: int) -> int | None:
    """Return what `resource.getrlimit` says this process may have of `which`; None: without limit."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def find_cpu() -> tuple[str | None, tuple[str, ...] | None]:
    """Return the processor's model and its instruction sets, sorted; None for what py-cpuinfo cannot tell."""
    import cpuinfo  # looks at the processor when it is imported

    try:
        found = cpuinfo.get_cpu_info()
    except (OSError, ValueError):  # it asks in another interpreter, which may not start, or not answer
        return None, None
    flags = found.get("flags")
    return found.get("brand_raw"), tuple(sorted(flags)) if flags else None


def find_gpus() -> tuple[Gpu, ...]:
    """Return the accelerators that torch can use."""
    if not torch.cuda.is_available():
        return ()
    found = []
    for number in range(torch.cuda.device_count()):
        properties, address = torch.cuda.get_device_properties(number), bus_address(number)
        found.append(
            Gpu(
                name=properties.name,
                memory_bytes=properties.total_memory,
                capability=f"{properties.major}.{properties.minor}",
                bfloat16=properties.major >= 8,  # Ampere; torch's own question is about the current device only
                node=None if address is None else numa.pci_node(address),
            )
        )
    return tuple(found)
