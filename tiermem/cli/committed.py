"""What is committed in swap directories: by one process, or by the ranks of a run, each in folders of its own.

Owns the look at it, and the opening of what was found. Changes nothing. Guarantees that of several ranks all are looked
at, whatever is wrong with one of them, and that what does not belong together is told from what does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import swap
from swap import Manifest
from tiermem.errors import ConfigError, ResumeError
from tiermem.pager.extents import page_key
from tiermem.runtime.beginning import SPACE_NAME
from tiermem.runtime.company import RANK_PREFIX

_MANIFESTS = f"{SPACE_NAME}.*.manifest"
_LOOKS = 3  # at a run that is going on, whose ranks commit while they are looked at one by one
_RANK = re.compile(re.escape(RANK_PREFIX) + r"(\d{5,})")


@dataclass(frozen=True, slots=True)
class Committed:
    """What one process has committed in its `directories`. `rank`: its number, where it is one of several.

    `error`: why that could not be found out of a rank, which has no `manifest` then.
    """

    directories: tuple[Path, ...]
    rank: int | None = None
    manifest: Manifest | None = None
    in_use: bool = False
    error: swap.SwapError | ResumeError | None = None

    @contextmanager
    def opened(self) -> Iterator[tuple[Manifest, swap.SwapSpace, swap.Mark]]:
        """The commit, its swap files, and a mark on what it holds. Raises `error`; SwapInUseError; SwapError, damage.

        ResumeError: the files are of another run.
        """
        if self.manifest is None:
            raise self.error or ResumeError(f"nothing is committed in {named(self.directories)}")
        size, reading = sum(self.manifest.file_sizes), swap.ReadingCalls()
        with swap.SwapSpace.open(self.directories, name=SPACE_NAME, nbytes=size, keep=True, system=reading) as space:
            if space.run_id != self.manifest.run_id:
                raise ResumeError(f"the swap files in {self.directories[0]} are of another run than its commit")
            yield self.manifest, space, swap.Generations(space).adopt(self.manifest.entries, page_key)


def named(directories: Sequence[Path]) -> str:
    """Their names, for a message."""
    return ", ".join(map(str, directories))


def find_committed(directories: Sequence[Path]) -> list[Committed]:
    """The commit in `directories`, or that of each rank which has folders there, in the order of their numbers.

    Of ranks the newest that all have, and those too that the run had and that have nothing. Raises ConfigError for
    directories that cannot be meant; of one process ResumeError where nothing is committed, swap.SwapError for damage.
    """
    if len(set(map(os.path.realpath, directories))) < len(directories):
        raise ConfigError(f"expected each swap directory once, found {named(directories)}")
    if len({each.name for each in directories}) > 1 and all(each.name.startswith(RANK_PREFIX) for each in directories):
        raise ConfigError(
            f"expected the folders of one rank, found {named(directories)}: what several have committed is taken as a "
            "whole; give the run's directories, which hold those of the ranks"
        )
    if missing := [each for each in directories if not os.path.lexists(each)]:
        raise ResumeError(f"expected swap directories or the folder of a snapshot, found no {named(missing)}")
    if files := [each for each in directories if each.is_file()]:
        raise ResumeError(f"expected swap directories or the folder of a snapshot, found the file {named(files)}")
    ranks = _ranks_in(directories[0])
    if not ranks:
        return [_look(directories)]
    if any(directories[0].glob(_MANIFESTS)):
        raise ConfigError(
            f"{directories[0]} holds the commit of one process and, in {RANK_PREFIX}{ranks[0]:05d} and so on, that of "
            "several ranks, which are different runs: move the files of one of them to a directory of its own"
        )
    for _ in range(_LOOKS):
        found = _look_at_ranks(directories, ranks)
        if not _reasons(found) or not any(each.in_use for each in found):
            break
    return found


def has_commit(directory: Path) -> bool:
    """Whether something is committed there, or in folders of ranks."""
    return any(directory.glob(_MANIFESTS)) or bool(_ranks_in(directory))


def has_files(directory: Path) -> bool:
    """Whether a run has files there, or in folders of ranks."""
    return any(any(directory.glob(f"{folder}{SPACE_NAME}.*")) for folder in ("", f"{RANK_PREFIX}*/"))


def world_size(manifest: Manifest) -> int:
    """How many ranks the run had, in all copies of the model."""
    layout = manifest.user.get("layout", {})
    return int(layout.get("world_size") or 1) * int(layout.get("copies") or 1)


# What the commits of all ranks of a run have in common.
_COMMON: Mapping[str, Callable[[Manifest], object]] = {
    "run": lambda manifest: manifest.user.get("run"),
    "number of ranks": world_size,
    "commit": lambda manifest: manifest.generation,
}


def disagreement(found: Sequence[Committed]) -> str | None:
    """Why what the ranks have is no commit of the run as a whole, besides the `error` of some; None: nothing is."""
    read = [(each, each.manifest) for each in found if each.manifest is not None]
    if found[0].rank is None or not read:
        return None
    for what, value_of in _COMMON.items():
        ranks: dict[object, list[str]] = {}
        for each, manifest in read:
            ranks.setdefault(value_of(manifest), []).append(str(each.rank))
        if len(ranks) > 1:
            whose = ", ".join(f"{value} (rank {', '.join(own)})" for value, own in ranks.items())
            in_use = any(each.in_use for each in found)
            advice = "; a run that is using them may just be committing: ask again" if in_use else ""
            size = world_size(read[0][1])
            if beyond := [str(each.rank) for each, _ in read if (each.rank or 0) >= size]:
                advice += (
                    f"; the run of rank {read[0][0].rank} had {size} ranks: where it is meant, move what an earlier "
                    f"run has left to rank {', '.join(beyond)} away"
                )
            return f"expected the same {what} everywhere, found {whose}{advice}"
    if len(found) != world_size(read[0][1]):
        return f"expected {world_size(read[0][1])} ranks, as the run had, found {len(found)}"
    for each, manifest in read:
        if (rank := manifest.user.get("rank", each.rank)) != each.rank:
            return f"the folders of rank {each.rank} hold what rank {rank} has committed"
    return None


def require_agreement(found: Sequence[Committed]) -> None:
    """Raise ResumeError where they are no commit of a run as a whole, ConfigError for the folders of one rank."""
    alone = found[0].manifest
    if found[0].rank is None and alone is not None and world_size(alone) > 1:
        raise ConfigError(
            f"{named(found[0].directories)} holds what one of {world_size(alone)} ranks has committed, a part of every "
            "parameter: give the directories of the run, which hold those of the ranks"
        )
    if reasons := _reasons(found):
        raise ResumeError(
            f"expected one commit of all ranks of a run, found {'; '.join(reasons)}; resume the run, which says what "
            "is missing"
        )


def _reasons(found: Sequence[Committed]) -> list[str]:
    """What keeps these from being the commit of a run."""
    errors = [f"rank {each.rank}: {each.error}" for each in found if each.error is not None]
    return [*errors, *filter(None, [disagreement(found)])]


def _ranks_in(directory: Path) -> list[int]:
    """Which ranks have committed something in folders of `directory`."""
    names = {each.parent.name for each in directory.glob(f"{RANK_PREFIX}*/{_MANIFESTS}")}
    return sorted(int(match[1]) for match in map(_RANK.fullmatch, names) if match)


def _look_at_ranks(directories: Sequence[Path], ranks: Sequence[int]) -> list[Committed]:
    """What these `ranks` have, and those that the run had besides. Raises swap.FormatError where none can be read."""
    found = [_look_at_rank(directories, rank) for rank in ranks]
    size = max((world_size(each.manifest) for each in found if each.manifest is not None), default=0)
    if not size:
        raise swap.FormatError("; ".join(_reasons(found)))
    found += [_look_at_rank(directories, rank) for rank in range(size) if rank not in ranks]
    return _of_one_generation(sorted(found, key=lambda each: each.rank or 0))


def _look_at_rank(directories: Sequence[Path], rank: int) -> Committed:
    own = tuple(directory / f"{RANK_PREFIX}{rank:05d}" for directory in directories)
    if missing := [each for each in own if not each.is_dir()]:
        return Committed(own, rank, error=ResumeError(f"there is no folder {named(missing)}"))
    try:
        return replace(_look(own), rank=rank)
    except (swap.SwapError, ResumeError) as error:
        return Committed(own, rank, error=error)


def _look(directories: Sequence[Path]) -> Committed:
    leftovers = swap.find_leftovers(directories, name=SPACE_NAME)
    if leftovers.manifest is not None:
        return Committed(tuple(directories), manifest=leftovers.manifest, in_use=leftovers.in_use)
    for directory in directories[1:]:
        if any(directory.glob(_MANIFESTS)) or _ranks_in(directory):
            raise ResumeError(
                f"the commit is in {directory}, expected in the first directory, found {directories[0]}: "
                "give the directories of the run in its order"
            )
    folders = [each for directory in directories for each in sorted(directory.glob(f"{RANK_PREFIX}*"))]
    if closed := [each for each in folders if not os.access(each, os.R_OK | os.X_OK)]:
        raise ResumeError(
            f"this user may not look into folders of ranks, such as {closed[0]}: ask as the one whose run it is, or "
            "allow it"
        )
    raise ResumeError(f"nothing is committed in {named(directories)}")


def _of_one_generation(found: list[Committed]) -> list[Committed]:
    """The newest commit that all ranks have: a run that was killed may have published another on some of them."""
    oldest = min((each.manifest.generation for each in found if each.manifest is not None), default=0)
    for index, each in enumerate(found):
        if each.manifest is None or each.manifest.generation == oldest:
            continue
        try:
            manifest = swap.CommitStore(each.directories, name=SPACE_NAME).read(oldest)
        except swap.SwapError as error:
            found[index] = replace(each, manifest=None, error=error)
        else:
            found[index] = replace(each, manifest=manifest or each.manifest)
    return found
