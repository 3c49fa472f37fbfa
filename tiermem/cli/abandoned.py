"""What runs that were killed left in the directories that were made for them.

Owns the search for such directories and their removal. Does not know why a run ended. Guarantees that nothing is
removed but the files of a swap space which no process holds and in which nothing is committed, and folders that are
empty then; what cannot be told for certain, or not be removed, stays.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import swap
from swap.locks import DirectoryLock, lock_holder
from tiermem.runtime.beginning import SPACE_NAME

PREFIXES = ("tiermem-swap-", "tiermem-tune-", "tiermem-measure-")


def remove_abandoned(parent: Path) -> None:
    """Remove what is abandoned in `parent`, and say so on stderr. Several processes may do so at once."""
    for made in sorted(path for path in parent.iterdir() if path.name.startswith(PREFIXES) and _is_own(path)):
        if remove_uncommitted(made):
            sys.stderr.write(f"removed {made}, left behind by a process that was killed\n")


def remove_uncommitted(made: Path) -> bool:
    """Remove from a directory made for a run what nobody holds and nothing is committed in; whether anything was."""
    # The innermost first: those of ranks and of trials.
    return sum(_clear(Path(folder)) for folder, _, _ in os.walk(made, topdown=False)) > 0


def is_committed(made: Path) -> bool:
    """Whether something is committed in a directory made for a run, or in a folder of it, as each rank has one."""
    return any(_has_manifest(Path(folder)) for folder, _, _ in os.walk(made))


def _is_own(path: Path) -> bool:
    try:
        return path.is_dir() and path.lstat().st_uid == os.geteuid() and not path.is_symlink()
    except OSError:  # gone since it was listed
        return False


def _clear(folder: Path) -> bool:
    """Remove what a dead process left in one folder, and the folder if that was all; whether there was something."""
    file, found = folder / f"{SPACE_NAME}.swapfile", False
    # Without a file there is nothing to remove, or a run is just beginning: it makes its file under its lock.
    if file.is_file() and not file.is_symlink():
        path = folder / f"{SPACE_NAME}.lock"
        was_there = path.exists()  # else somebody has cleared the directory of what looked old
        try:
            lock = DirectoryLock(str(path), swap.SystemCalls())
        except swap.SwapError:  # held by a run that lives, or not ours
            return False
        try:
            # Its own lock besides, which a lock file that was removed does not tell of.
            found = lock_holder(str(file), swap.SystemCalls()) is None and not _has_manifest(folder)
            if found:
                file.unlink(missing_ok=True)
        except OSError:
            found = False
        finally:
            lock.release(remove=found or not was_there)
    if found:
        with contextlib.suppress(OSError):  # something else is there, too
            folder.rmdir()
    return found


def _has_manifest(folder: Path) -> bool:
    try:
        return swap.find_leftovers([folder], name=SPACE_NAME).manifest is not None
    except swap.SwapError:  # damaged, or not ours: for people to look at
        return True
