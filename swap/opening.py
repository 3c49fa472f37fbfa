"""The files of a space: how large each is, and whether those an earlier run left belong together.

Owns the opening of one swap file per directory. Does not know extents, engines or what is done with the files.
Guarantees that either all files are open, belong to one run and stand in its order, or none is and what was created
has been removed again; and that what an earlier run has committed is there until `begin_files` is asked for.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from swap.blocks import ALIGNMENT, align_down, align_up
from swap.errors import DirectIOWarning, FormatError, SwapError, reporting
from swap.file_systems import file_system_of
from swap.files import DATA_OFFSET, SwapFile
from swap.manifest_files import ManifestFiles
from swap.patience import PatientSystemCalls
from swap.probe import measure_weights
from swap.settings import EngineSettings
from swap.stripes import fill, proportional, require_weights
from swap.superblock import Identity, new_run_id
from swap.syscalls import SystemCalls

Weights = Sequence[float] | Literal["measure"] | None
"""Bandwidths of the directories to any scale, or how to find them; see `SwapSpace.open`."""


def reserve_files(
    directories: Sequence[Path],
    *,
    name: str,
    nbytes: int,
    keep: bool,
    weights: Weights,
    settings: EngineSettings,
    system: SystemCalls | None,
) -> tuple[list[SwapFile], tuple[float, ...]]:
    """The open files and the weights that hold for them. See `SwapSpace.open` for the parameters and the errors.

    Without `keep` nothing may be written to them before `begin_files`: an earlier run's data are there.
    """
    if not directories:
        raise ValueError("expected one or more swap directories, found none")
    if nbytes <= 0:
        raise ValueError(f"expected a positive number of bytes, found {nbytes}")
    _require_distinct(directories)
    if weights == "measure":
        weights = measure_weights(directories, name=name, settings=settings, system=system)
    ratio = require_weights([1.0] * len(directories) if weights is None else weights, len(directories))
    patient = PatientSystemCalls(system, settings.stall_seconds)
    shares = [ALIGNMENT] * len(directories)
    if not keep:
        rooms = [_answered(directory, name, patient, system or SystemCalls()) for directory in directories]
        shares = _shares(rooms, align_up(nbytes), ratio)
    run_id = new_run_id()
    files: list[SwapFile] = []
    try:
        for index, (directory, share) in enumerate(zip(directories, shares, strict=True)):
            identity = Identity(run_id, index, len(directories))
            files.append(
                SwapFile.reserve(
                    directory,
                    name=name,
                    nbytes=share,
                    keep=keep,
                    identity=identity,
                    direct=settings.direct,
                    system=patient,
                )
            )
        if keep:
            _require_kept(files, nbytes)
    except BaseException:
        give_back(files)
        raise
    if keep and weights is None:
        ratio = tuple(float(file.nbytes) for file in files)
    return files, ratio


def begin_files(files: Sequence[SwapFile], manifests: ManifestFiles) -> None:
    """Forget what an earlier run has committed, by its `manifests`, and then its data."""
    manifests.discard()
    for file in files:
        file.begin()


def give_back(files: Sequence[SwapFile]) -> None:
    """Close the files; remove those that were created. Raises nothing: what had them given back is to be raised."""
    for file in files:
        with contextlib.suppress(SwapError):
            file.close(remove=file.created)


def warn_of_buffered(files: Sequence[SwapFile]) -> None:
    """Give whoever opens a space one DirectIOWarning if O_DIRECT was refused. Raises it where warnings are errors."""
    buffered = [file.path for file in files if not file.direct]
    if buffered:
        warnings.warn(
            f"O_DIRECT is refused for {', '.join(buffered)}: transfers go through the page cache, slower and outside "
            "the memory budget; choose a directory on a local file system such as ext4 or xfs, on a drive with sectors "
            "of 4096 bytes at most",
            DirectIOWarning,
            stacklevel=3,
        )


def _room(directory: Path, name: str, system: SystemCalls) -> tuple[int, int]:
    """The device of a directory and the bytes a swap file may have there, that of an earlier run included."""
    try:
        device = file_system_of(directory)
        free = system.free_bytes(os.fspath(directory))
    except OSError:  # opening will say what is wrong
        return -1, 0
    with contextlib.suppress(OSError):
        free += os.stat(os.path.join(directory, f"{name}.swapfile"), follow_symlinks=False).st_blocks * 512
    return device, max(0, free - DATA_OFFSET - free // 256)  # file systems want some for themselves


def _answered(directory: Path, name: str, patient: PatientSystemCalls, system: SystemCalls) -> tuple[int, int]:
    """As `_room`. Raises SwapIOError where the drive does not answer."""
    with reporting("look at", directory):
        return patient.ask(lambda: _room(directory, name, system))


def _require_distinct(directories: Sequence[Path]) -> None:
    seen: list[Path] = []
    for directory in directories:
        if os.path.exists(directory):
            if any(os.path.samefile(directory, other) for other in seen):
                raise ValueError(f"expected each swap directory once, found {os.fspath(directory)!r} twice")
            seen.append(directory)


def _shares(rooms: Sequence[tuple[int, int]], nbytes: int, weights: Sequence[float]) -> list[int]:
    """Bytes of each directory's file: in proportion, less where there is no room for that."""
    wanted = [max(ALIGNMENT, share) for share in proportional(nbytes, weights)]
    room = list(rooms)
    for index, (device, _) in enumerate(room):  # those on one file system fill it together
        sharing = [other for other, (number, _) in enumerate(room) if number == device]
        free = room[index][1]
        if sum(wanted[other] for other in sharing) > free:
            limited = fill(
                min(align_down(free), nbytes), [weights[other] for other in sharing], [nbytes] * len(sharing)
            )
            room[index] = (device, (limited or wanted)[sharing.index(index)])
    # Nowhere enough: ask for the proportion all the same, so that the error names a directory and what it lacks.
    filled = fill(nbytes, weights, [free for _, free in room])
    return [max(ALIGNMENT, share) for share in filled] if filled is not None else wanted


def _require_kept(files: Sequence[SwapFile], nbytes: int) -> None:
    run_id = files[0].identity.run_id
    for index, file in enumerate(files):
        identity = file.identity
        if identity.run_id != run_id:
            raise FormatError(
                f"expected the swap files to be of one run, found {files[0].path!r} of run {run_id.hex()} and "
                f"{file.path!r} of run {identity.run_id.hex()}; they were left alone"
            )
        if (identity.index, identity.count) != (index, len(files)):
            raise FormatError(
                f"expected {file.path!r} to be file {index + 1} of {len(files)}, found file {identity.index + 1} of "
                f"{identity.count}: give all the directories of that run, in its order; it was left alone"
            )
    found = sum(file.nbytes for file in files)
    if found < nbytes:
        paths = ", ".join(repr(file.path) for file in files)
        raise FormatError(f"expected {paths} with at least {nbytes} bytes of data, found {found}")
