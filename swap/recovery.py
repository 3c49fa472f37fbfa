"""Recovery: from what a dead run left to a space that goes on from its last commit.

Owns the look at leftovers, the verification of every extent, and the order of a resume. Does not decide whether to
resume: its caller does. Guarantees that nothing of an earlier run is changed before its last commit has been found to
be whole, and that a mismatch between manifest, files and bytes is an error that names the place.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swap.buffers import AlignedBuffer
from swap.commit import CommitStore
from swap.errors import FormatError, SwapError, SwapIOError
from swap.extents import Extent
from swap.files import look
from swap.generations import Generations, Mark
from swap.locks import lock_holder
from swap.manifest import Entry, Manifest
from swap.manifest_files import ManifestFiles
from swap.patience import PatientSystemCalls
from swap.requests import Request
from swap.settings import STALL_SECONDS
from swap.space import SwapSpace
from swap.superblock import Superblock
from swap.syscalls import SystemCalls

_IN_FLIGHT = 4  # extents read at once while verifying


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What is in the directories. `files`: the superblock of each directory's swap file, None where none is.

    `in_use`: a run holds one of them now. `holder`: the process it belongs to, 0 where that is not known.
    """

    in_use: bool
    files: tuple[Superblock | None, ...]
    manifest: Manifest | None
    holder: int = 0

    @property
    def resumable(self) -> bool:
        """Whether files and manifest are of one run, which no longer lives. The bytes have not been looked at."""
        if self.in_use or self.manifest is None:
            return False
        return all(block is not None and block.identity.run_id == self.manifest.run_id for block in self.files)


@dataclass(frozen=True, slots=True)
class Recovered:
    """The last commit, current again: `mark` holds its extents until the next commit is durable."""

    manifest: Manifest
    generations: Generations
    mark: Mark


def find_leftovers(
    directories: Sequence[Path], *, name: str, system: SystemCalls | None = None, stall_seconds: float = STALL_SECONDS
) -> Leftovers:
    """What earlier runs left in existing directories. Changes nothing.

    Raises FormatError for foreign or damaged files, SwapIOError for a directory that cannot be read, or whose drive
    does not answer within `stall_seconds`.
    """
    patient = PatientSystemCalls(system, stall_seconds)
    paths = [os.path.join(os.fspath(directory), name) for directory in directories]
    locked = (f"{path}.{kind}" for path in paths for kind in ("lock", "swapfile"))
    holder = next(filter(None, (lock_holder(path, patient) for path in locked)), None)
    return Leftovers(
        in_use=holder is not None,
        holder=max(0, holder or 0),
        files=tuple(look(f"{path}.swapfile", patient)[1] for path in paths),
        manifest=CommitStore(directories, name=name, system=system, stall_seconds=stall_seconds).read_latest(),
    )


def find_prepared(
    directories: Sequence[Path], *, name: str, system: SystemCalls | None = None, stall_seconds: float = STALL_SECONDS
) -> Manifest | None:
    """What a run has prepared and not published when it died; None: nothing. Changes nothing.

    It is no commit: its bytes may have been written over since. Raises SwapIOError if it cannot be read, or the drive
    does not answer within `stall_seconds`.
    """
    return ManifestFiles(os.fspath(directories[0]), name, PatientSystemCalls(system, stall_seconds)).read_new()


def recover(
    space: SwapSpace,
    store: CommitStore,
    *,
    key: Callable[[str], Hashable] = str,
    verify_bytes: bool = True,
    spares: Callable[[Manifest], Iterable[tuple[str, Extent]]] | None = None,
    generation: int | None = None,
) -> Recovered | None:
    """Go on from the last commit, or that of `generation`, in a space opened with `keep`; None if there is none. Waits.

    `key` turns the text of a manifest's entry into the key of the generations; it may raise ValueError. `spares` says
    which extents keys have to spare, if the manifest's `user` tells. Reads every extent and compares its checksum
    unless told otherwise. Raises FormatError if manifest and files do not belong together, ChecksumError or SwapIOError
    for a damaged extent, FormatError for several, saying how many. After an error the space is fit for nothing but
    `close`.
    """
    manifest = store.read_latest() if generation is None else store.read(generation)
    if manifest is None:
        return None
    if manifest.run_id != space.run_id:
        raise FormatError(
            f"the last commit in {store.directory!r} is of run {manifest.run_id.hex()}, the swap files are of run "
            f"{space.run_id.hex()}: the data it speaks of are gone; it was left alone"
        )
    if manifest.file_sizes != space.file_sizes:
        raise FormatError(f"expected swap files of {manifest.file_sizes} bytes, found {space.file_sizes}")
    generations = Generations(space)
    try:
        mark = generations.adopt(manifest.entries, key, spares=spares(manifest) if spares else ())
    except (SwapError, ValueError) as error:
        raise FormatError(f"the last commit in {store.directory!r} does not fit its swap files: {error}") from error
    errors = verify(space, manifest.entries) if verify_bytes else []
    if len(errors) == 1:
        raise errors.pop()
    if errors:
        raise FormatError(f"{len(errors)} extents of the last commit are damaged, the first: {errors[0]}")
    store.settle(manifest, space=space)
    return Recovered(manifest, generations, mark)


def verify(space: SwapSpace, entries: Iterable[Entry]) -> list[SwapIOError]:
    """Read every extent and compare its checksum; the errors, in the order of the extents on disk. Waits.

    The extents must be allocated or claimed in the space. Needs room for a few of the largest of them in memory.
    """
    ordered = sorted(entries, key=lambda entry: (entry.extent.pieces[0].directory, entry.extent.pieces[0].offset))
    errors: list[SwapIOError] = []
    pending: deque[tuple[Request, memoryview]] = deque()
    largest = max((entry.nbytes for entry in ordered), default=0)
    # Not closed but dropped: a drive that stalls may still write into them, and a request keeps its own alive.
    free = [AlignedBuffer(largest).view for _ in ordered[:_IN_FLIGHT]]

    def end_one() -> None:
        request, view = pending.popleft()
        free.append(view)
        try:
            request.wait()
        except SwapIOError as error:
            errors.append(error)

    for entry in ordered:
        if not free:
            end_one()
        view = free.pop()
        pending.append((space.start_read(entry.extent, view[: entry.nbytes], expected=entry.checksum), view))
    while pending:
        end_one()
    return errors
