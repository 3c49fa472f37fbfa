"""`tiermem snapshot`: what is kept in swap directories and snapshots, whether it is whole, and what can be made of it.

Owns the reports. Changes nothing that is there and needs no model. Guarantees that what it calls whole has been read
and compared, that a run which is going on is left alone, and that what it writes is there whole or not at all.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.table import Table

import swap
from swap import Manifest
from tiermem.checkpoint.exporting import CommitSource, SnapshotSource, recorded
from tiermem.checkpoint.pretrained import save_pretrained
from tiermem.checkpoint.reading import Snapshot, is_snapshot, open_snapshot
from tiermem.checkpoint.resharding import reshard
from tiermem.checkpoint.shard import MarkedPages
from tiermem.errors import ConfigError, ResumeError
from tiermem.memory.sizes import format_bytes
from tiermem.pager.extents import page_key
from tiermem.runtime.beginning import SPACE_NAME
from tiermem.runtime.company import RANK_PREFIX
from tiermem.runtime.rewriting import CommittedRank, snapshot_of

_NAMED = 5  # the most names that are shown of a list


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """One commit or snapshot. `seconds`: when it was made, since 1970 UTC; `verified`: whether its bytes were compared.

    `parameters`: as elements, of the whole model, in `tensors` tensors; those that are shared count once.

    `files`: of all directories. `generation`, `units` and `pages` are of commits, `world_size` is of snapshots.
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

    def to_table(self) -> Table:
        """Return the report for people."""
        table = Table(show_header=False, box=None)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.seconds))
        number = f" {self.generation}" if self.generation is not None else ""
        table.add_row(f"{self.kind}{number}", f"step {self.step}, {when}")
        within = ", ".join(self.directories)
        if self.kind == "commit" and self.files != len(self.directories):
            within += f" ({len(self.directories)} of its {self.files} directories)"
        table.add_row("in", within + (" (in use)" if self.in_use else ""))
        pages = f"{self.pages} pages of {self.units} units in " if self.kind == "commit" else ""
        table.add_row("holds", f"{self.parameters:,} parameters in {self.tensors} tensors, {format_bytes(self.nbytes)}")
        table.add_row("as", f"{pages}{counted(self.files or 0, 'file')}")
        table.add_row("dtype", str(self.param_dtype))
        if self.verified:
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


def look(paths: Sequence[Path]) -> SnapshotReport:
    """What is there, without a look at the bytes. Raises ResumeError if nothing is, swap.SwapError for damage."""
    if _is_snapshot(paths):
        return _of_snapshot(open_snapshot(paths[0]))
    leftovers = _leftovers(paths)
    return _of_commit(paths, _manifest(paths, leftovers), in_use=leftovers.in_use)


def verify(paths: Sequence[Path]) -> SnapshotReport:
    """Read all of it and compare; waits. Raises what `look` raises, and SwapInUseError while a run is using it."""
    if _is_snapshot(paths):
        snapshot = open_snapshot(paths[0])
        return _of_snapshot(snapshot, errors=list(snapshot.verify()))
    with _opened(paths) as (manifest, space, _):
        errors = swap.verify(space, manifest.entries)
    return _of_commit(paths, manifest, in_use=False, errors=[str(error) for error in errors])


def export(paths: Sequence[Path], to: Path, *, max_shard_nbytes: int) -> WrittenReport:
    """Write the weights as `from_pretrained` reads them; waits. Raises what `verify` raises, and for a full disk."""
    source: SnapshotSource | CommitSource
    with ExitStack() as opened:
        if _is_snapshot(paths) or len(_ranks(paths)) > 1:
            snapshot = opened.enter_context(_snapshot(paths, to))
            record, source = snapshot.record, SnapshotSource(snapshot)
        else:
            manifest, space, mark = opened.enter_context(_opened(paths))
            record, source = manifest.user, CommitSource(manifest.user, MarkedPages(space, mark))
        save_pretrained(to, source, recorded(record).files, max_shard_nbytes=max_shard_nbytes)
    return dataclasses.replace(_written("weights", paths, to), lacking=source.lacking)


def rewrite(paths: Sequence[Path], to: Path, *, ranks: int) -> WrittenReport:
    """Write a snapshot, or a commit of however many ranks, as a snapshot for `ranks`; verifies what was written. Waits.

    Raises what `verify` raises, and for a full disk.
    """
    if not _is_snapshot(paths) and len(_ranks(paths)) == ranks:
        written = _of_ranks(paths, to)
    else:  # a commit as it is first: what each rank is to have lies across pages of several
        with _snapshot(paths, to) as snapshot:
            written = reshard(snapshot, to, ranks=ranks)
    for damage in written.verify():
        raise swap.FormatError(f"what was written is damaged: {damage}")
    report = _written(f"snapshot for {counted(ranks, 'rank')}", paths, written.path)
    return dataclasses.replace(report, lacking=SnapshotSource(written).lacking)


@contextmanager
def _snapshot(paths: Sequence[Path], to: Path) -> Iterator[Snapshot]:
    """The snapshot that is given, or one of the commit that is, which lies beside `to` meanwhile."""
    if _is_snapshot(paths):
        yield open_snapshot(paths[0])
        return
    parent = to.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"expected {str(parent)!r} to be a folder, found none; create it first")
    with TemporaryDirectory(prefix=f".{SPACE_NAME}.", dir=parent) as folder:
        yield _of_ranks(paths, Path(folder) / "snapshot")


def _of_ranks(paths: Sequence[Path], to: Path) -> Snapshot:
    """Write what all ranks have committed to `to`, as a snapshot of as many."""
    with ExitStack() as opened:
        committed = [opened.enter_context(_opened(*each)) for each in _ranks(paths)]
        parts = [CommittedRank(manifest.user, MarkedPages(space, mark)) for manifest, space, mark in committed]
        return snapshot_of(parts, to, seconds=committed[0][0].seconds)


def counted(count: int, noun: str) -> str:
    """A number with its noun, in the plural unless the number is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _is_snapshot(paths: Sequence[Path]) -> bool:
    """Whether it is about a snapshot. Raises ConfigError for one among other paths."""
    if len(paths) == 1:
        return is_snapshot(paths[0])
    for path in paths:
        if is_snapshot(path) and not any(path.glob(f"{SPACE_NAME}.*")):  # somebody else may name a file like ours
            raise ConfigError(
                f"{path} is a snapshot: expected it alone, or all the swap directories of a run, found "
                f"{len(paths)} paths"
            )
    return False


def _ranks(directories: Sequence[Path]) -> list[tuple[Sequence[Path], Manifest | None]]:
    """The directories of each rank, and the newest commit that all have; None: it is the newest there.

    Raises ResumeError for ranks that have none, or whose commits do not belong together.
    """
    names = sorted({each.parent.name for each in directories[0].glob(f"{RANK_PREFIX}*/{SPACE_NAME}.*.manifest")})
    if not names:
        return [(directories, None)]
    expected = [f"{RANK_PREFIX}{number:05d}" for number in range(len(names))]
    own = [[directory / name for directory in directories] for name in names]
    newest = [_manifest(each, _leftovers(each)) for each in own]
    generation = min(manifest.generation for manifest in newest)
    found = [swap.CommitStore(each, name=SPACE_NAME).read(generation) for each in own]
    complete = [manifest for manifest in found if manifest is not None]
    runs = {manifest.user.get("run") for manifest in complete}
    sizes = {manifest.user.get("layout", {}).get("world_size") for manifest in complete}
    if names != expected or len(complete) < len(found) or len(runs) > 1 or sizes != {len(names)}:
        raise ResumeError(
            f"expected the commits of all ranks of one run in {', '.join(map(str, directories))}, found "
            f"{', '.join(names)} with commits of {sorted(map(str, sizes))} ranks: resume the run, which says what is "
            "missing"
        )
    return list(zip(own, complete, strict=True))


@contextmanager
def _opened(
    directories: Sequence[Path], manifest: Manifest | None = None
) -> Iterator[tuple[Manifest, swap.SwapSpace, swap.Mark]]:
    """A commit, by default the last one, its swap files, and a mark on what it holds."""
    manifest = manifest or _manifest(directories, _leftovers(directories))
    size, reading = sum(manifest.file_sizes), swap.ReadingCalls()
    with swap.SwapSpace.open(directories, name=SPACE_NAME, nbytes=size, keep=True, system=reading) as space:
        if space.run_id != manifest.run_id:
            raise ResumeError(f"the swap files in {directories[0]} are of another run than its commit")
        yield manifest, space, swap.Generations(space).adopt(manifest.entries, page_key)


def _leftovers(directories: Sequence[Path]) -> swap.Leftovers:
    if len(set(map(os.path.realpath, directories))) < len(directories):
        raise ConfigError(f"expected each swap directory once, found {', '.join(map(str, directories))}")
    if len({each.name for each in directories}) > 1 and all(each.name.startswith(RANK_PREFIX) for each in directories):
        raise ConfigError(
            f"expected the folders of one rank, found {', '.join(map(str, directories))}: a commit of several ranks is "
            "listed and verified rank by rank; exported and resharded it is as a whole: give the run's directories"
        )
    return swap.find_leftovers(directories, name=SPACE_NAME)


def _manifest(directories: Sequence[Path], leftovers: swap.Leftovers) -> Manifest:
    if leftovers.manifest is not None:
        return leftovers.manifest
    for directory in directories[1:]:
        if any(directory.glob(f"{SPACE_NAME}.*.manifest")):
            raise ResumeError(
                f"the commit is in {directory}, expected in the first directory, found {directories[0]}: "
                "give the directories of the run in its order"
            )
    for directory in directories:
        if ranks := sorted({each.parent for each in directory.glob(f"{RANK_PREFIX}*/{SPACE_NAME}.*.manifest")}):
            raise ResumeError(
                f"{directory} holds the commit of {counted(len(ranks), 'rank')}: give the folder of one of them, such "
                f"as {ranks[0]}; export and reshard take all together"
            )
    raise ResumeError(f"nothing is committed in {', '.join(map(str, directories))}")


def _of_commit(
    directories: Sequence[Path], manifest: Manifest, *, in_use: bool, errors: Sequence[str] | None = None
) -> SnapshotReport:
    layout = manifest.user.get("layout", {})
    shapes = [shape for _, slots in layout.get("units", ()) for _, shape, *_ in slots]
    return SnapshotReport(
        kind="commit",
        directories=tuple(map(str, directories)),
        step=manifest.user.get("step"),
        seconds=manifest.seconds,
        param_dtype=layout.get("param_dtype"),
        parameters=sum(map(math.prod, shapes)),
        tensors=len(shapes),
        nbytes=manifest.nbytes,
        extra=manifest.user.get("extra"),
        in_use=in_use,
        verified=errors is not None,
        damaged=tuple(errors or ()),
        generation=manifest.generation,
        files=len(manifest.file_sizes),
        units=len(layout.get("units", ())),
        pages=len(manifest.entries),
    )


def _of_snapshot(snapshot: Snapshot, errors: Sequence[str] | None = None) -> SnapshotReport:
    manifest = snapshot.manifest
    return SnapshotReport(
        kind="snapshot",
        directories=(str(snapshot.path),),
        step=manifest.record["step"],
        seconds=manifest.seconds,
        param_dtype=manifest.record["param_dtype"],
        parameters=sum(kept.numel for kept in manifest.parameters),
        tensors=len(manifest.parameters),
        nbytes=manifest.nbytes,
        extra=manifest.record["extra"],
        verified=errors is not None,
        damaged=tuple(errors or ()),
        world_size=manifest.world_size,
        files=len(manifest.files),
    )


def _written(what: str, source: Sequence[Path], path: Path) -> WrittenReport:
    sizes = [file.stat().st_size for file in path.iterdir()]
    return WrittenReport(what, tuple(map(str, source)), str(path), len(sizes), sum(sizes))
