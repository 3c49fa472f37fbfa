"""How a run begins: anew, or from what an earlier one has committed.

Owns the decision, and the checks that come before anything is changed on disk. Does not open the space. Guarantees that
a committed run is never replaced unless `Config.overwrite` says so, and that what cannot be continued is refused with
the reason, its files left as they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swap import (
    CommitStore,
    Leftovers,
    Manifest,
    SwapFullError,
    SwapInUseError,
    find_leftovers,
    find_prepared,
    free_together,
)
from swap.patience import PatientSystemCalls
from tiermem.checkpoint.reading import Snapshot, open_snapshot
from tiermem.checkpoint.restoring import require_whole
from tiermem.config import Config
from tiermem.errors import ConfigError, MissingSnapshotError, ResumeError
from tiermem.runtime.company import RANK_PREFIX, Company
from tiermem.runtime.record import FORMAT

SPACE_NAME = "tiermem"
_IN_ORDER = (
    "give all the directories of that run, in its order, or start anew with resume=False and Config(overwrite=True) "
    "(tiermem train --overwrite)"
)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a run starts from: a commit that it continues, a snapshot, or, with neither, the model as it is.

    Attributes:
        manifest: of the commit.
        rank: whose random states are taken from the snapshot.
        given_up: the number of a commit that is here, but not with all ranks, which then start anew.
    """

    manifest: Manifest | None = None
    snapshot: Snapshot | None = None
    rank: int = 0
    given_up: int | None = None

    @property
    def past(self) -> Mapping[str, Any] | None:
        """Step, counts, random states and the rest that is taken over besides pages; None: nothing."""
        if self.snapshot is not None:
            record = self.snapshot.record
            states, extras = record["random"], record.get("extras", [])
            own = states[self.rank] if self.rank < len(states) else None  # a rank that was not there begins as seeded
            extra = extras[self.rank] if self.rank < len(extras) else record["extra"]
            return {**record, "random": own, "extra": extra, "buffers": record.get("buffers", {})}
        return self.record

    @property
    def generation(self) -> int:
        """The number of the commit; -1: there is none."""
        return self.manifest.generation if self.manifest is not None else -1

    @property
    def record(self) -> Mapping[str, Any] | None:
        """What the commit says besides its pages."""
        return self.manifest.user if self.manifest is not None else None

    @property
    def tile_numel(self) -> int | None:
        """Elements of a tile in the commit."""
        return int(self.manifest.user["layout"]["tile_numel"]) if self.manifest is not None else None

    @property
    def small_nbytes(self) -> int | None:
        """Bytes up to which units were coalesced in the commit."""
        return int(self.manifest.user["layout"].get("coalesce") or 0) if self.manifest is not None else None


def find_beginning(config: Config, resume: bool | str | os.PathLike[str]) -> Beginning:
    """Look at the swap directories, or at a snapshot, and decide; changes nothing.

    Without a commit True is taken as "auto" here; the caller refuses that once all ranks have looked.

    Raises:
        ConfigError: an unknown word for `resume`.
        ResumeError: there is a commit and `resume` is False or a snapshot, or there is none that could be continued.
        swap.SwapError: a directory is missing, in use, or holds foreign or damaged files; so does the snapshot.
    """
    path = _snapshot_folder(resume)
    continues = resume is not False and path is None
    leftovers = find_leftovers(config.swap_paths, name=SPACE_NAME, stall_seconds=config.stall_timeout)
    _refuse_in_use(config, leftovers)
    manifest = leftovers.manifest
    if manifest is None:
        _refuse_overlooked(config, leftovers, continues=continues)
        return Beginning(snapshot=open_snapshot(path) if path else None)
    if not continues:
        if config.overwrite:
            return _replacing(path) if path else Beginning()
        refuse_committed(config, manifest)
    _refuse_unfit(config, leftovers, manifest)
    return Beginning(manifest)


def refuse_committed(config: Config, manifest: Manifest | None) -> None:
    """Raise ResumeError if the directories hold a commit, `manifest`, that a new run would replace."""
    if manifest is not None:
        names = ", ".join(str(path) for path in config.swap_paths)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(manifest.seconds))
        raise ResumeError(
            f"{names} holds a committed run (step {manifest.user.get('step')}, {when}): continue it with "
            "resume=True or resume='auto' (tiermem train --resume), replace it with Config(overwrite=True) (tiermem "
            "train --overwrite), or choose other directories"
        )


def _snapshot_folder(resume: object) -> Path | None:
    """The folder that `resume` names; None: it is one of the words. Raises ConfigError if it is neither."""
    if isinstance(resume, bool) or resume == "auto":
        return None
    kind: type[ConfigError] = ConfigError
    if isinstance(resume, (str, os.PathLike)):
        path = Path(os.path.expanduser(resume))
        if (path / f"{SPACE_NAME}.swapfile").exists():
            raise MissingSnapshotError(
                f"resume={resume!r} is a swap directory, expected the folder of a snapshot: to continue what is "
                "committed there name it in Config(swap_dirs=...), and give resume=True"
            )
        if resume != "" and path.is_dir():  # an empty text is not the folder that the program runs in
            return path
        kind = MissingSnapshotError
    raise kind(f"resume={resume!r}: expected False, True, 'auto' or the folder of a snapshot")


def _replacing(path: Path) -> Beginning:
    snapshot = open_snapshot(path)
    require_whole(snapshot)  # now: when it is read into pages the commit is gone
    return Beginning(snapshot=snapshot)


def require_room(config: Config, nbytes: int) -> None:
    """Raise SwapFullError unless the swap directories together have room, files of earlier runs counted as free.

    Before a commit is replaced: afterwards it would be too late. Directories on one file system count once. Where a
    file system does not say what is free, whoever makes the files will find out.
    """
    try:
        free = PatientSystemCalls(None, config.stall_timeout).ask(lambda: _room(config))
    except OSError:
        return
    if free < nbytes:
        names = ", ".join(str(path) for path in config.swap_paths)
        advice = "; Config(commits=False) needs half of it" if config.commits else ""
        raise SwapFullError(
            f"the swap files need {nbytes} bytes, {names} has {free} bytes free; free some, or add a directory on "
            f"another drive{advice}"
        )


def _room(config: Config) -> int:
    """Bytes that are free in the swap directories together, or that swap files there have."""
    files = [path / f"{SPACE_NAME}.swapfile" for path in config.swap_paths]
    return free_together(config.swap_paths) + sum(file.stat().st_blocks * 512 for file in files if file.exists())


def agree_on_commit(beginning: Beginning, config: Config, company: Company) -> Beginning:
    """The newest commit that all ranks have: one of them may have published one that others had not yet.

    Where that was the first one they begin anew. Raises ResumeError if some have a commit and others none for another
    reason, or they are of different runs.
    """
    if company.size == 1:
        return beginning
    found = [told[0] for told in company.computing.tell([beginning.generation])]
    if max(found) < 0:
        return beginning
    without = [str(rank) for rank, generation in enumerate(found) if generation < 0]
    if without and _is_first(beginning, config, company):
        return replace(beginning, manifest=None, given_up=max(found))
    if without:
        raise ResumeError(
            f"of {company.size} ranks, rank {', '.join(without)} holds no commit and the others do: the run was "
            f"committed by {company.size - len(without)} ranks, or directories are missing; continue it with as many, "
            "or from a snapshot of it (`tiermem snapshot reshard` makes one, resume=path)"
        )
    manifest = beginning.manifest
    if min(found) != beginning.generation:
        manifest = CommitStore(config.swap_paths, name=SPACE_NAME).read(min(found))
    own = -1 if manifest is None else int(manifest.user["run"])
    whose = company.rank if manifest is None else int(manifest.user.get("rank", company.rank))
    runs, ranks = zip(*company.computing.tell([own, whose]), strict=True)
    if -1 in runs or len(set(runs)) > 1:
        raise ResumeError(
            f"the commits of the ranks do not belong together (newest of each: {found}, runs {[*runs]}): give every "
            "rank the directories of the same run"
        )
    moved = [f"rank {rank} has what rank {each} has committed" for rank, each in enumerate(ranks) if rank != each]
    if moved:  # parts of the same sizes would be taken for each other's
        raise ResumeError(f"{'; '.join(moved)}: give every rank the directories it had")
    return Beginning(manifest)


def _is_first(beginning: Beginning, config: Config, company: Company) -> bool:
    """Whether all ranks have prepared the commit that some have, so that those which lack it never had another.

    The one before goes when all have published the next, and what is prepared keeps its name until then.
    """
    manifest = company.together(
        "look for a commit that was prepared",
        lambda: (
            beginning.manifest or find_prepared(config.swap_paths, name=SPACE_NAME, stall_seconds=config.stall_timeout)
        ),
    )
    own = [-1, -1] if manifest is None else [int(manifest.user.get("run", -1)), manifest.generation]
    told = company.computing.tell(own)
    return -1 not in told[0] and all(each == told[0] for each in told)


def _refuse_in_use(config: Config, leftovers: Leftovers) -> None:
    """Raise SwapInUseError if a run that lives has the directories."""
    if not leftovers.in_use:
        return
    names = ", ".join(str(path) for path in config.swap_paths)
    if leftovers.holder == os.getpid():
        raise SwapInUseError(f"a runtime of this process is using {names}: close() it, or choose other directories")
    who = f" (process {leftovers.holder})" if leftovers.holder else ""
    raise SwapInUseError(f"another run{who} is using {names}: wait for its end, or choose other directories")


def _refuse_unfit(config: Config, leftovers: Leftovers, manifest: Manifest) -> None:
    """Raise ResumeError if the commit that the directories hold cannot be continued."""
    first = config.swap_paths[0]
    if not leftovers.resumable:
        missing = [str(path) for path, file in zip(config.swap_paths, leftovers.files, strict=True) if file is None]
        found = "its swap files are of another run"
        if missing:
            found = f"there is no swap file, or an empty one, in {', '.join(missing)}"
        raise ResumeError(f"the commit in {first} cannot be continued: {found}; {_IN_ORDER}")
    if manifest.user.get("format") != FORMAT:
        raise ResumeError(
            f"the commit in {first} is of format {manifest.user.get('format')!r}, this version of tiermem reads "
            f"{FORMAT}; continue it with the version that made it"
        )


def _refuse_overlooked(config: Config, leftovers: Leftovers, *, continues: bool) -> None:
    """Raise ResumeError if, though no commit was found, there is one that would be lost, or that is to be continued."""
    if continues or not config.overwrite:
        _refuse_other_order(config)
    if continues:
        _refuse_parts(config, leftovers)
    if not config.overwrite:
        _refuse_parts_of_others(config, leftovers)
    if continues:
        _refuse_other_sizes(config)


def _refuse_other_order(config: Config) -> None:
    """Raise ResumeError if a run has committed here whose first directory is not given first: it would be lost."""
    for path in config.swap_paths[1:]:
        found = find_leftovers([path], name=SPACE_NAME, stall_seconds=config.stall_timeout)
        if found.resumable:  # else it has been replaced already
            raise ResumeError(
                f"{path} holds a committed run, expected it to be the first directory, found {config.swap_paths[0]}: "
                f"{_IN_ORDER}, or choose other directories"
            )


def _refuse_parts(config: Config, leftovers: Leftovers) -> None:
    """Raise ResumeError if a swap file here had another place in its run: its commit would be in the first one's."""
    for index, (path, file) in enumerate(zip(config.swap_paths, leftovers.files, strict=True)):
        there = file and (file.identity.index, file.identity.count)
        if there and there != (index, len(leftovers.files)):
            raise ResumeError(
                f"the swap file in {path} is {there[0] + 1} of {there[1]} of its run, expected {index + 1} of "
                f"{len(leftovers.files)}: {_IN_ORDER}"
            )


def _refuse_parts_of_others(config: Config, leftovers: Leftovers) -> None:
    """Raise ResumeError if a swap file here may be needed by a commit in a directory that is not given."""
    first = leftovers.files[0]
    known = first.identity.run_id if first is not None and first.identity.index == 0 else None
    for path, file in zip(config.swap_paths, leftovers.files, strict=True):
        if file and file.identity.index > 0 and file.identity.run_id != known:
            raise ResumeError(
                f"{path} holds swap file {file.identity.index + 1} of {file.identity.count} of another run, whose "
                "commit, if it has made one, is in the first of its directories and would be lost: give all the "
                "directories of that run to continue it, replace it with Config(overwrite=True) (tiermem train "
                "--overwrite), or choose other directories"
            )


def _refuse_other_sizes(config: Config) -> None:
    """Raise ResumeError if a run of another number of ranks has committed here: it would be overlooked."""
    for path in config.swap_paths:
        alone = path.parent if path.name.startswith(RANK_PREFIX) else None
        others = sorted(path.glob(f"{RANK_PREFIX}*/{SPACE_NAME}.*.manifest"))
        if alone is not None:
            others = sorted(alone.glob(f"{SPACE_NAME}.*.manifest"))
        if others:
            count = len({each.parent for each in others})
            ranks = "one process" if alone is not None else "one of several ranks" if count == 1 else f"{count} ranks"
            raise ResumeError(
                f"{alone or path} holds a commit of {ranks}, which only as many can continue; go on from a snapshot of "
                "that run (`tiermem snapshot reshard` makes one, resume=path), start anew with resume=False, or choose "
                "other directories"
            )
