"""`tiermem snapshot`: what is committed in swap directories, and whether every byte of it is whole.

Owns the report. Does not change anything on disk and needs no model. Guarantees that what it calls whole has been read
and compared, and that a run which is going on is left alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

import swap
from swap import Manifest
from tiermem.errors import ResumeError
from tiermem.memory.sizes import format_bytes
from tiermem.runtime.beginning import SPACE_NAME


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """One commit. `seconds`: when it was made, since 1970 UTC; `verified`: whether its bytes were read and compared."""

    directories: tuple[str, ...]
    generation: int
    step: int | None
    seconds: float
    param_dtype: str | None
    units: int
    pages: int
    nbytes: int
    extra: Any
    in_use: bool
    verified: bool
    damaged: tuple[str, ...]

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps(asdict(self))

    def to_table(self) -> Table:
        """Return the report for people."""
        table = Table(show_header=False, box=None)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.seconds))
        table.add_row("commit", f"{self.generation}, step {self.step}, {when}")
        table.add_row("in", ", ".join(self.directories) + (" (in use)" if self.in_use else ""))
        table.add_row("holds", f"{self.pages} pages of {self.units} units, {format_bytes(self.nbytes)}")
        table.add_row("dtype", str(self.param_dtype))
        if self.verified:
            table.add_row("bytes", "every one is as it was written" if not self.damaged else "DAMAGED")
        for line in self.damaged:
            table.add_row("", line)
        return table


def look(directories: Sequence[Path]) -> SnapshotReport:
    """What is committed, without a look at the bytes. Raises ResumeError if nothing is, swap.SwapError for damage."""
    leftovers = swap.find_leftovers(directories, name=SPACE_NAME)
    return _report(directories, _manifest(directories, leftovers), in_use=leftovers.in_use)


def verify(directories: Sequence[Path]) -> SnapshotReport:
    """Read all of it and compare; waits. Raises what `look` raises, and SwapInUseError while a run is using it."""
    manifest = _manifest(directories, swap.find_leftovers(directories, name=SPACE_NAME))
    with swap.SwapSpace.open(directories, name=SPACE_NAME, nbytes=sum(manifest.file_sizes), keep=True) as space:
        if space.run_id != manifest.run_id:
            raise ResumeError(f"the swap files in {directories[0]} are of another run than its commit")
        swap.Generations(space).adopt(manifest.entries)
        errors = swap.verify(space, manifest.entries, mode="all")
    return _report(directories, manifest, in_use=False, errors=[str(error) for error in errors])


def _manifest(directories: Sequence[Path], leftovers: swap.Leftovers) -> Manifest:
    if leftovers.manifest is None:
        raise ResumeError(f"nothing is committed in {', '.join(map(str, directories))}")
    return leftovers.manifest


def _report(
    directories: Sequence[Path], manifest: Manifest, *, in_use: bool, errors: Sequence[str] | None = None
) -> SnapshotReport:
    layout = manifest.user.get("layout", {})
    return SnapshotReport(
        directories=tuple(map(str, directories)),
        generation=manifest.generation,
        step=manifest.user.get("step"),
        seconds=manifest.seconds,
        param_dtype=layout.get("param_dtype"),
        units=len(layout.get("units", ())),
        pages=len(manifest.entries),
        nbytes=manifest.nbytes,
        extra=manifest.user.get("extra"),
        in_use=in_use,
        verified=errors is not None,
        damaged=tuple(errors or ()),
    )
