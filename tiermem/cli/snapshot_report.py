"""What the commands below `tiermem snapshot` say, for people and for programs.

Owns the fields and the tables. Does not look at anything itself (`snapshot.py`). Guarantees that what is said to be
wrong with a commit of several ranks names the rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from tiermem.figures import counted
from tiermem.memory.sizes import format_bytes

_NAMED = 5  # the most names that are shown of a list


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one of several ranks has committed. Without a `generation` nothing that can be read: `damaged` says why.

    `part`: of which copy of the model it has which part, both from 0; null where an earlier version did not say.
    `in_use`: by a run that is going on. `nbytes` and `pages` are of its part of the state, in `files` swap files.
    """

    rank: int
    directories: tuple[str, ...]
    part: tuple[int, int] | None = None
    generation: int | None = None
    step: int | None = None
    seconds: float | None = None
    nbytes: int = 0
    pages: int = 0
    files: int = 0
    extra: Any = None
    in_use: bool = False
    damaged: tuple[str, ...] = ()

    def to_text(self, *, verified: bool, copies: int) -> str:
        """A line of the table. `copies`: of the model."""
        if self.generation is None:
            return "nothing that can be read"
        parts = f"{format_bytes(self.nbytes)} in {counted(self.pages, 'page')} in {counted(self.files, 'file')}"
        state = " (in use)" if self.in_use else ""
        if verified:
            state += ", DAMAGED" if self.damaged else ", whole"
        place = f"copy {self.part[0]}, part {self.part[1]}: " if copies > 1 and self.part is not None else ""
        return f"{place}commit {self.generation}, step {self.step}, {parts}{state}"


@dataclass(frozen=True, slots=True)
class RanksReport:
    """The ranks of a run, in `copies` of the model, over which they are divided.

    `each`: what each of them has committed; nothing where the folder of one was given. `disagreement`: why these are no
    commit of the run as a whole.
    """

    copies: int
    stage: int | None
    each: tuple[RankReport, ...] = ()
    disagreement: str | None = None

    def to_text(self, world_size: int) -> str:
        """A line of the table."""
        divided = f", {self.copies} copies of the model, each over {world_size // self.copies}"
        return f"{counted(world_size, 'rank')}, stage {self.stage}{divided if self.copies > 1 else ''}"


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """One commit or snapshot. `seconds`: when it was made, since 1970 UTC; `verified`: whether its bytes were compared.

    `parameters`: as elements, of the whole model, in `tensors` tensors; those that are shared count once. `files`: of
    all directories. `world_size`: ranks of the run, or of which the snapshot has files. `damaged`: what cannot be read,
    and, where it is `verified`, what is not as it was written.

    Of commits are `generation`, `units`, `pages`, and `ranks` (null for one process). Of a commit of several ranks,
    taken as a whole, sizes are those of all; it has no `step` where not all have it.
    """

    kind: str
    directories: tuple[str, ...]
    step: int | None
    seconds: float
    param_dtype: str | None
    parameters: int
    tensors: int
    nbytes: int
    extra: Any
    in_use: bool = False
    verified: bool = False
    damaged: tuple[str, ...] = ()
    generation: int | None = None
    units: int | None = None
    pages: int | None = None
    world_size: int | None = None
    files: int | None = None
    ranks: RanksReport | None = None

    def problems(self) -> str:
        """What is wrong, in one sentence; empty if nothing is known to be."""
        reason = self.ranks.disagreement if self.ranks is not None else None
        apart = f"the ranks' commits do not belong together: {reason}" if reason else ""
        damaged = f"damaged: {'; '.join(self.damaged)}" if self.damaged else ""
        return "; ".join(filter(None, (damaged, apart)))

    def to_table(self) -> Table:
        """Return the report for people."""
        table = Table(show_header=False, box=None)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.seconds))
        each = self.ranks.each if self.ranks is not None else ()
        number = f" {self.generation}" if self.generation is not None else ""
        step = f"step {self.step}" if not each or number else "none that all ranks have"
        table.add_row(f"{self.kind}{number}", f"{step}, {when}")
        within = ", ".join(self.directories)
        files = (self.files or 0) // max(1, sum(rank.generation is not None for rank in each))
        if self.kind == "commit" and files != len(self.directories):
            within += f" ({len(self.directories)} of its {files} directories)"
        table.add_row("in", within + (" (in use)" if self.in_use else ""))
        if self.ranks is not None:
            table.add_row("of", self.ranks.to_text(self.world_size or 1))
        for rank in each:
            table.add_row(
                f"rank {rank.rank}",
                rank.to_text(verified=self.verified, copies=self.ranks.copies if self.ranks is not None else 1),
            )
        if self.ranks is not None and self.ranks.disagreement:
            table.add_row("ranks", "DISAGREE")
        elif each and number:
            table.add_row("ranks", "agree")
        pages = (
            f"{counted(self.pages or 0, 'page')} of {counted(self.units or 0, 'unit')} in "
            if self.kind == "commit"
            else ""
        )
        table.add_row(
            "holds", f"{self.parameters:,} parameters in {counted(self.tensors, 'tensor')}, {format_bytes(self.nbytes)}"
        )
        table.add_row("as", f"{pages}{counted(self.files or 0, 'file')}")
        table.add_row("dtype", str(self.param_dtype))
        if self.verified or self.damaged:
            table.add_row("bytes", "every one is as it was written" if not self.damaged else "DAMAGED")
        for line in self.damaged:
            table.add_row("", line)
        return table


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """What has been written: `what`, where, out of what, how many files and bytes.

    `lacking`: buffers of the model that are not among it: of a commit large ones that training had not changed, sparse
    ones, and those of a dtype that safetensors does not know.
    """

    what: str
    source: tuple[str, ...]
    path: str
    files: int
    nbytes: int
    lacking: tuple[str, ...] = ()

    def to_table(self) -> Table:
        """Return the report for people."""
        table = Table(show_header=False, box=None)
        table.add_row("written", f"{self.what}, {counted(self.files, 'file')}, {format_bytes(self.nbytes)}")
        table.add_row("to", self.path)
        if self.lacking:
            more = f" and {len(self.lacking) - _NAMED} more" if len(self.lacking) > _NAMED else ""
            table.add_row("without", ", ".join(self.lacking[:_NAMED]) + more)
            table.add_row(
                "", "training had not changed them, and a commit has only small ones of these (a snapshot has:"
            )
            table.add_row("", "runtime.snapshot), or they are sparse, or of a dtype that safetensors does not know: a")
            table.add_row("", "model is built with them (load_state_dict: strict=False)")
        return table
