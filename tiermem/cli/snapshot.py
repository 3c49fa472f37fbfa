"""`tiermem snapshot`: what is kept in swap directories and snapshots, whether it is whole, and what can be made of it.

Owns the work; what it says is `snapshot_report.py`. Changes nothing that is there and needs no model. Guarantees that
what it calls whole has been read and compared, that a run which is going on is left alone, and that what it writes is
there whole or not at all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import swap
from swap import Manifest
from tiermem.checkpoint.exporting import CommitSource, SnapshotSource, recorded
from tiermem.checkpoint.pretrained import save_pretrained
from tiermem.checkpoint.reading import Snapshot, is_snapshot, open_snapshot
from tiermem.checkpoint.resharding import reshard
from tiermem.checkpoint.shard import MarkedPages
from tiermem.cli.committed import (
    Committed,
    disagreement,
    find_committed,
    has_commit,
    has_files,
    require_agreement,
    world_size,
)
from tiermem.cli.snapshot_report import RankReport, RanksReport, SnapshotReport, WrittenReport
from tiermem.errors import ConfigError, ResumeError
from tiermem.figures import counted
from tiermem.runtime.beginning import SPACE_NAME
from tiermem.runtime.rewriting import CommittedRank, snapshot_of


def look(paths: Sequence[Path]) -> SnapshotReport:
    """What is there, without a look at the bytes. Raises ResumeError if nothing is, swap.SwapError for damage.

    Of several ranks all are looked at, and the report says what is wrong with some of them.
    """
    if _is_snapshot(paths):
        return _of_snapshot(open_snapshot(paths[0]))
    found = find_committed(paths)
    return _of_commit(paths, found, [() if each.error is None else (str(each.error),) for each in found])


def verify(paths: Sequence[Path]) -> SnapshotReport:
    """Read all of it and compare; waits. Raises what `look` raises, and SwapInUseError while a run is using it."""
    if _is_snapshot(paths):
        snapshot = open_snapshot(paths[0])
        return _of_snapshot(snapshot, errors=list(snapshot.verify()))
    found = find_committed(paths)
    count = max(len(each.manifest.file_sizes) for each in found if each.manifest is not None)
    if count != len(paths):  # no damage, but every file would be found to be another than is expected there
        raise ResumeError(
            f"expected {counted(count, 'directory', 'directories')}, as the run had, in its order, found "
            f"{', '.join(map(str, paths))}"
        )
    return _of_commit(paths, found, list(map(_damage, found)), verified=True)


def _damage(committed: Committed) -> tuple[str, ...]:
    """Read what one process, or one of several ranks, has committed; what is wrong with it."""
    try:
        with committed.opened() as (manifest, space, _):
            return tuple(map(str, swap.verify(space, manifest.entries)))
    except swap.SwapInUseError:
        raise
    except (swap.SwapError, ResumeError) as error:
        if committed.rank is None:
            raise
        return (str(error),)  # the other ranks are looked at all the same


def export(paths: Sequence[Path], to: Path, *, max_shard_nbytes: int) -> WrittenReport:
    """Write the weights as `from_pretrained` reads them; waits. Raises what `verify` raises, and for a full disk."""
    source: SnapshotSource | CommitSource
    with ExitStack() as opened:
        found = [] if _is_snapshot(paths) else _as_a_whole(paths)
        if len(found) != 1:
            snapshot = opened.enter_context(_snapshot(paths, to))
            record, source = snapshot.record, SnapshotSource(snapshot)
        else:
            manifest, space, mark = opened.enter_context(found[0].opened())
            record, source = manifest.user, CommitSource(manifest.user, MarkedPages(space, mark))
        save_pretrained(to, source, recorded(record).files, max_shard_nbytes=max_shard_nbytes)
    return dataclasses.replace(_written("weights", paths, to), lacking=source.lacking)


def rewrite(paths: Sequence[Path], to: Path, *, ranks: int) -> WrittenReport:
    """Write a snapshot, or a commit of however many ranks, as a snapshot for `ranks`; verifies what was written. Waits.

    Raises what `verify` raises, and for a full disk.
    """
    if not _is_snapshot(paths) and _sharing(_as_a_whole(paths)) == ranks:
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
    """Write what all ranks have committed to `to`, as a snapshot of those who share a copy of the model."""
    with ExitStack() as opened:
        committed = [opened.enter_context(each.opened()) for each in _as_a_whole(paths)]
        parts = [CommittedRank(manifest.user, MarkedPages(space, mark)) for manifest, space, mark in committed]
        return snapshot_of(parts, to, seconds=committed[0][0].seconds)


def _as_a_whole(paths: Sequence[Path]) -> list[Committed]:
    """What all ranks have committed. Raises what `look` raises, and ResumeError where that is no commit of the run."""
    found = find_committed(paths)
    require_agreement(found)
    return found


def _is_snapshot(paths: Sequence[Path]) -> bool:
    """Whether it is about a snapshot. Raises ConfigError for one among other paths."""
    if len(paths) == 1:
        return is_snapshot(paths[0]) and not has_commit(paths[0])  # somebody else may name a file like ours
    for path in paths:
        if is_snapshot(path) and not has_files(path):
            raise ConfigError(
                f"{path} is a snapshot: expected it alone, or all the swap directories of a run, found "
                f"{len(paths)} paths"
            )
    return False


def _sharing(found: Sequence[Committed]) -> int | None:
    """How many ranks share a copy of the model; the files of one copy make a snapshot."""
    manifest = found[0].manifest
    return manifest.user.get("layout", {}).get("world_size") if manifest is not None else None


def _of_commit(
    directories: Sequence[Path],
    found: Sequence[Committed],
    damage: Sequence[tuple[str, ...]],
    *,
    verified: bool = False,
) -> SnapshotReport:
    """`damage`: what is wrong with each of them."""
    manifests = [each.manifest for each in found if each.manifest is not None]
    first = manifests[0]
    layout = first.user.get("layout", {})
    shapes = [shape for _, slots in layout.get("units", ()) for _, shape, *_ in slots]
    ranks, of_ranks = world_size(first), found[0].rank is not None
    apart = disagreement(found)
    is_whole = apart is None and len(manifests) == len(found)
    named = zip(found, damage, strict=True)
    each = tuple(map(_of_rank, found, damage)) if of_ranks else ()
    of_all = RanksReport(layout.get("copies") or 1, layout.get("stage"), each, apart)
    return SnapshotReport(
        kind="commit",
        directories=tuple(map(str, directories)),
        step=first.user.get("step") if is_whole else None,
        seconds=first.seconds,
        param_dtype=layout.get("param_dtype"),
        parameters=sum(map(math.prod, shapes)),
        tensors=len(shapes),
        nbytes=sum(manifest.nbytes for manifest in manifests),
        extra=first.user.get("extra") if is_whole else None,
        in_use=any(each.in_use for each in found),
        verified=verified,
        damaged=tuple(f"rank {one.rank}: {line}" if of_ranks else line for one, lines in named for line in lines),
        generation=first.generation if is_whole else None,
        files=sum(len(manifest.file_sizes) for manifest in manifests),
        units=len(layout.get("units", ())),
        pages=sum(len(manifest.entries) for manifest in manifests),
        world_size=ranks,
        ranks=of_all if ranks > 1 or of_ranks else None,
    )


def _of_rank(committed: Committed, damage: tuple[str, ...]) -> RankReport:
    rank, directories = committed.rank or 0, tuple(map(str, committed.directories))
    if committed.manifest is None:
        return RankReport(rank, directories, damaged=damage)
    manifest: Manifest = committed.manifest
    return RankReport(
        rank,
        directories,
        part=_part_of(manifest),
        generation=manifest.generation,
        step=manifest.user.get("step"),
        seconds=manifest.seconds,
        nbytes=manifest.nbytes,
        pages=len(manifest.entries),
        files=len(manifest.file_sizes),
        extra=manifest.user.get("extra"),
        in_use=committed.in_use,
        damaged=damage,
    )


def _part_of(manifest: Manifest) -> tuple[int, int] | None:
    """Of which copy of the model it has which part; None where it does not say so."""
    match manifest.user.get("part"):
        case [int() as copy, int() as part]:
            return copy, part
    return None


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
