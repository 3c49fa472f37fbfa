"""What each fact about a machine means for tiermem, and what to change.

Owns the sentences. Does not look at the machine: it is given what was found. Guarantees one finding for every fact,
with an advice exactly where something can be made better; what is outright wrong is a problem of the doctor's report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiermem.cli.drives import DriveReport
from tiermem.figures import format_number
from tiermem.memory.sizes import format_bytes

ENOUGH_FILES = 256
BYTES_PER_PARAMETER = 14  # on disk, in bfloat16 and without commits: itself, its gradient, its state
_MUCH_MEMORY = 8 << 30
_FAST_BFLOAT16 = ("amx_bf16", "avx512_bf16")
_WIDE = ("avx512f", "avx2", "asimd", "neon")


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact: its name, what was found, what that means here, and what to change ("" where nothing needs to be)."""

    name: str
    found: str
    means: str
    change: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """An accelerator as torch sees it."""

    name: str
    memory_bytes: int
    capability: str
    bfloat16: bool
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes and counts; None: no limit."""

    cgroup_bytes: int | None
    locked_bytes: int | None
    open_files: int | None
    file_bytes: int | None


def about_software(python: str, torch: str, no_loops: str | None) -> Iterator[Finding]:
    """What runs it. `no_loops`: why the update cannot run as compiled loops, None if it can."""
    yield Finding("Python", python, "3.11 or newer is needed")
    yield Finding("torch", torch, "computes, and updates with its fused AdamW")
    if no_loops is None:
        yield Finding(
            "numba", "works", "bfloat16 parameters and 8-bit moments are updated by compiled loops, same bits"
        )
    else:
        slower = "updates of bfloat16 parameters and 8-bit moments take three times as long; same bits"
        yield Finding("numba", "no compiled loops", slower, no_loops)


def about_cpu(
    model: str | None, cores: int, sets: Sequence[str] | None, available: float | None = None, threads: int = 1
) -> Iterator[Finding]:
    """The processor: it updates the optimizer's state, and without a GPU it computes, too.

    `available`: how many cores this process may use (None: all); `threads`: how many torch computes with.
    """
    available = cores if available is None else available
    found = f"{model or 'model unknown'}, {cores} cores"
    change = ""
    if available <= 2:
        change = "so few cores are shared by computation and update: what runs beside the one slows the other"
    if available < cores:
        found += f", {available:.3g} of them for this process (taskset, or a control group)"
    if threads > max(1.0, available):
        change = f"set OMP_NUM_THREADS={max(1, int(available))}: {threads} threads would wait for each other's turn"
    yield Finding("CPU", found, "updates the optimizer's state", change)
    if sets is None:
        yield Finding("instruction sets", "unknown", "py-cpuinfo could not tell")
        return
    fast = [name for name in _FAST_BFLOAT16 if name in sets]
    wide = next((name for name in _WIDE if name in sets), None)
    if fast:
        yield Finding(
            "instruction sets", ", ".join([*fast, *([wide] if wide else [])]), "bfloat16 is computed natively"
        )
    else:
        faster = "is many times faster" if wide == "avx2" else "may be the faster one"
        yield Finding(
            "instruction sets",
            wide or "none of avx2, avx512f, asimd",
            "bfloat16 is emulated on this CPU",
            f"without a GPU param_dtype='float32' {faster}; it moves twice the parameter bytes",
        )


def about_memory(total: int, available: int, limits: Limits, *, beside_gpu: bool) -> Iterator[Finding]:
    """What host_memory can be, and what else may be used up."""
    room = available if limits.cgroup_bytes is None else min(available, limits.cgroup_bytes)
    little = "" if room >= _MUCH_MEMORY else "close other programs, or choose a smaller host_memory and batch"
    yield Finding(
        "memory",
        f"{format_bytes(total)}, {format_bytes(available)} available",
        f"host_memory may be up to {format_bytes(room)} less what Python, activations and others take",
        little,
    )
    if limits.cgroup_bytes is None:
        yield Finding("memory limit (cgroup)", "none", "only the machine's memory limits this process")
    else:
        yield Finding(
            "memory limit (cgroup)",
            format_bytes(limits.cgroup_bytes),
            "the kernel ends the process beyond it (or slows it down: memory.high), page cache aside",
            "give host_memory explicitly, well below this",
        )
    locked = "unlimited" if limits.locked_bytes is None else format_bytes(limits.locked_bytes)
    yield Finding(
        "lockable memory",
        locked,
        "counts only for pinned memory beside a GPU",
        ""
        if limits.locked_bytes is None or not beside_gpu
        else "if pinning fails: `ulimit -l unlimited`, or LimitMEMLOCK= of the service",
    )
    files = "unlimited" if limits.open_files is None else str(limits.open_files)
    tight = limits.open_files is not None and limits.open_files < ENOUGH_FILES
    yield Finding(
        "open files", files, "a run opens two for each swap directory", f"`ulimit -n {ENOUGH_FILES}`" if tight else ""
    )
    if limits.file_bytes is not None:
        yield Finding(
            "file size", format_bytes(limits.file_bytes), "no swap file can be larger", "`ulimit -f unlimited`"
        )


def about_gpus(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """The accelerators that it can compute on."""
    if not gpus:
        yield Finding("GPU", "none that torch can use", "everything is computed on the CPU; DEVICE is not a tier")
    for gpu in gpus:
        yield Finding(
            "GPU",
            f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, compute capability {gpu.capability}",
            "bfloat16 is computed natively" if gpu.bfloat16 else "bfloat16 is emulated",
            "" if gpu.bfloat16 else "use param_dtype='float16'",
        )


def about_nodes(
    nodes: Sequence[int], gpus: Sequence[Gpu], drives: Sequence[DriveReport], refused: str | None
) -> Iterator[Finding]:
    """Where memory, GPUs and drives are; nothing on a machine of one node. `refused`: why memory cannot be placed."""
    if len(nodes) < 2:
        return
    names = [
        *(f"GPU {number} ({gpu.name})" for number, gpu in enumerate(gpus)),
        *(f"swap {d.directory}" for d in drives),
    ]
    places = [*(gpu.node for gpu in gpus), *(drive.node for drive in drives)]
    where = [
        f"{name} on {'an unknown node' if node is None else f'node {node}'}"
        for name, node in zip(names, places, strict=True)
    ]
    found = "; ".join([f"memory on {', '.join(map(str, nodes))}", *where])
    beside = sorted({gpu.node for gpu in gpus if gpu.node is not None})
    if not beside:
        means = "memory of another node is reached more slowly; without a GPU whose node is known nothing is placed"
        yield Finding("NUMA nodes", found, means)
        return
    means = "host memory of a run is placed on its GPU's node while there is room"
    change = ""
    if refused is not None:
        means = f"host memory lies where the system puts it ({refused}); copies to and from a GPU may be slower"
        change = f"run under `numactl --preferred={beside[0]}`, or allow it: in a container "
        change += "that takes the capability SYS_NICE"
    elif any(drive.node is not None and drive.node not in beside for drive in drives):
        change = "what is read from a drive on another node than the GPU crosses between them: choose a nearer drive"
    yield Finding("NUMA nodes", found, means, change)


def about_drive(drive: DriveReport) -> Finding:
    """What a swap directory is good for."""
    if not drive.exists:
        return Finding(f"swap {drive.directory}", drive.to_line(), "nothing can be swapped there", "make or mount it")
    if not drive.writable:
        means = "nothing can be swapped there, this user may not write to it"
        return Finding(f"swap {drive.directory}", drive.to_line(), means, "choose another directory, or allow it")
    if drive.refusal is not None:
        means = f"nothing can be swapped there, it takes no new file: {drive.refusal}"
        return Finding(f"swap {drive.directory}", drive.to_line(), means, "choose another directory")
    parts = []
    if drive.free_bytes is not None:
        billions = format_number(drive.free_bytes / BYTES_PER_PARAMETER / 1e9)
        parts.append(f"room for about {billions} billion parameters in bfloat16")
    change = ""
    if drive.has_large_blocks:
        change = f"its blocks of {drive.logical_block} bytes do not fit transfers aligned to 4096: choose another drive"
    elif drive.direct_io is False:
        change = "choose a directory on ext4 or xfs"
    elif drive.rotational:
        change = "if it really spins (virtual disks often claim to): choose an NVMe drive; `tiermem bench` tells"
    if drive.direct_io:
        parts.append("transfers pass the page cache by")
    return Finding(f"swap {drive.directory}", drive.to_line(), "; ".join(parts) or "usable", change)
