"""How fast a directory is: a short measurement before a space is opened.

Owns the probe: a small swap file of its own, written and read once through an engine, and removed. Does not know what
the result is used for. Guarantees that no file but its own is touched and that its own is gone afterwards. A short
probe tells a drive from another, not a drive's worst day: caches in the drive flatter writes, other load slows both.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swap.blocks import ALIGNMENT, align_down
from swap.buffers import AlignedBuffer
from swap.engine import Engine, make_backend
from swap.files import DATA_OFFSET, SwapFile
from swap.patience import PatientSystemCalls
from swap.requests import Operation, Priority
from swap.settings import EngineSettings
from swap.syscalls import SystemCalls

PROBE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What a probe found; bytes per second."""

    read: float
    write: float
    device: int

    @property
    def both(self) -> float:
        """Bytes per second when as much is read as written, one after the other."""
        return 2 / (1 / self.read + 1 / self.write)


def measure(
    directory: Path,
    *,
    name: str,
    settings: EngineSettings,
    system: SystemCalls | None = None,
    nbytes: int = PROBE_BYTES,
) -> Bandwidth:
    """Write and read `nbytes` in an existing directory. Waits. Raises as `SwapFile.open`, and SwapIOError."""
    patient = PatientSystemCalls(system, settings.stall_seconds)
    file = SwapFile.open(directory, name=f"{name}.probe", nbytes=nbytes, system=patient)
    try:
        with (
            AlignedBuffer(nbytes) as buffer,
            Engine(settings, backend=make_backend(settings.backend, system)) as engine,
        ):
            span = [(file, DATA_OFFSET, nbytes)]

            def move(operation: Operation) -> None:
                engine.start(operation, span, buffer.view, priority=Priority.DEMAND).wait()

            move(Operation.WRITE)  # the first write of a stretch also pays for the file system's bookkeeping
            write = _seconds(lambda: move(Operation.WRITE))
            read = _seconds(lambda: move(Operation.READ))
    finally:
        file.close(remove=True)
    return Bandwidth(nbytes / read, nbytes / write, file.device)


def measure_weights(
    directories: Sequence[Path], *, name: str, settings: EngineSettings, system: SystemCalls | None = None
) -> tuple[float, ...]:
    """A weight for each directory, bytes per second. Directories on one device share what it gives."""
    patient = PatientSystemCalls(system, settings.stall_seconds)
    found = [
        measure(directory, name=name, settings=settings, system=system, nbytes=_probe_bytes(directory, patient))
        for directory in directories
    ]
    sharing = Counter(bandwidth.device for bandwidth in found)
    return tuple(bandwidth.both / sharing[bandwidth.device] for bandwidth in found)


def _probe_bytes(directory: Path, system: SystemCalls) -> int:
    """Bytes to measure a directory with: a file that leaves half of what is free there, for a drive that is small."""
    try:
        free = system.free_bytes(os.fspath(directory))
    except OSError:  # opening will say what is wrong
        return PROBE_BYTES
    return max(ALIGNMENT, min(PROBE_BYTES, align_down(free // 2)))


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-9)
