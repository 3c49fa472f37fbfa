"""Where a run's swap files go, and whether they fit.

Owns the choice of a directory when none is given, the arithmetic of free space, and the removal of that directory
afterwards; and, of results, the looks at where they are to be written, and the writing of pictures. Does not know
what is in them. Guarantees that a
disk too small is found before training starts and that only a directory made here is ever removed.
"""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from swap import file_system_of, free_together
from tiermem.cli.abandoned import is_committed, remove_abandoned, remove_uncommitted
from tiermem.errors import ConfigError
from tiermem.memory.sizes import format_bytes
from tiermem.output_file import write_whole

_PICTURES = (".png", ".svg", ".pdf")


@contextmanager
def swap_directories(
    given: Sequence[Path],
    *,
    keep: bool,
    once: Callable[[Callable[[], str]], str] | None = None,
    first: bool = True,
) -> Iterator[list[Path]]:
    """Yield the directories to swap to: the given ones, or without any a new one here, removed on leaving.

    Here and not in the system's temporary directory: that is often kept in memory. A given directory must exist: making
    a missing one would fill the disk below a drive that is not mounted. Raises `ConfigError` naming it, or if none can
    be made here. What runs that were killed left here is removed, see `abandoned.py`.

    `once`: has one of several processes make the new one for all (`Launch.once`), each of which removes what is its
    own, and the last one the directory: what they commit belongs together.

    Where something was committed in it, stderr says under which name it stays; of several processes the `first` does.
    """
    if given:
        for directory in given:
            require_directory(directory)
        yield list(given)
        return
    made = Path(_make_directory() if once is None else once(_make_directory))
    try:
        yield [made]
    finally:
        if keep or once is not None:
            remove_uncommitted(made)
            try:
                made.rmdir()
            except OSError:  # not empty: something was committed, or other processes are not through yet
                if once is None or (first and is_committed(made)):
                    sys.stderr.write(f"the run is kept in {made}: --resume --swap-dir {made.name} goes on from there\n")
        else:
            shutil.rmtree(made, ignore_errors=True)


def _make_directory() -> str:
    try:
        remove_abandoned(Path.cwd())
        return tempfile.mkdtemp(prefix="tiermem-swap-", dir=Path.cwd())
    except OSError as error:
        raise ConfigError(f"no swap directory can be made here: {error}; name one with --swap-dir") from error


@contextmanager
def new_folders(directories: Sequence[Path], *, prefix: str) -> Iterator[list[Path]]:
    """Yield a new folder in each of the directories, removed on leaving with what is in it."""
    with ExitStack() as stack:
        made = [stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, dir=each)) for each in directories]
        yield list(map(Path, made))


def require_directory(directory: Path) -> None:
    """Raise `ConfigError` unless `directory` is a directory in which files can be made."""
    if not directory.exists():
        raise ConfigError(f"swap directory {directory} does not exist; make it, or mount the drive it is on")
    if not directory.is_dir():
        raise ConfigError(f"swap directory {directory} is not a directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"swap directory {directory} is not writable")


def require_writable(option: str, file: Path) -> None:
    """Raise `ConfigError` unless `file`, the value of `option`, can be written where it is asked for."""
    if file.is_dir():
        raise ConfigError(f"{option}: expected the name of a file, found the directory {file}")
    if not file.parent.is_dir():
        raise ConfigError(f"{option}: {file.parent} is not a directory; make it first")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{option}: {file} cannot be written there; choose another place")


def require_picture(path: Path) -> None:
    """Raise `ConfigError` unless the ending of `path` names a picture: matplotlib would draw another, or elsewhere."""
    if path.suffix not in _PICTURES:
        raise ConfigError(f"expected a file ending in {', '.join(_PICTURES)}, found {str(path)!r}")


def require_drawable(path: Path) -> None:
    """Raise `ConfigError` unless a picture can be drawn to `path`, the value of --plot; before there is one to draw."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'tiermem[plots]'")
    require_picture(path)
    require_writable("--plot", path)


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib's to `path`, whole, as the kind of picture that its ending names."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix.lstrip("."), dpi=120)
    write_whole(path, drawn.getvalue())


def require_room(directories: Sequence[Path], nbytes: int) -> None:
    """Raise `ConfigError` unless the file systems of `directories` together have `nbytes` free."""
    free = free_together(directories)
    if free < nbytes:
        names = ", ".join(str(directory) for directory in directories)
        raise ConfigError(
            f"swapping needs {format_bytes(nbytes)} ({nbytes} bytes) of disk, {names} has {format_bytes(free)} "
            f"({free} bytes) free; free some, add a --swap-dir on another disk, or choose a smaller model"
        )


def capacity_bytes(directories: Sequence[Path]) -> int:
    """Return the size of the file systems of `directories`, each counted once."""
    found = {file_system_of(directory): os.statvfs(directory) for directory in directories}
    return sum(status.f_blocks * status.f_frsize for status in found.values())
