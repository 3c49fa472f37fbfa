"""Where the commands print, for people and for programs.

Owns how text is taken by rich. Does not know what is printed. Guarantees that it is shown as it is: a directory, a file
or a model may be called `run[a]` or `:cat:`, which would be marks of rich otherwise, and lost.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_ANY_WIDTH = 10_000


class _Stdout(io.FileIO):
    """Stdout, the errors of which say so. After one it takes what is left in buffers, and drops it."""

    _is_broken = False

    def write(self, data: ReadableBuffer, /) -> int:
        if self._is_broken:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self._is_broken = True
            raise OSError(error.errno, os.strerror(error.errno or errno.EIO), "stdout") from error


def name_stdout() -> None:
    """Have stdout's errors name it: that of a disk which is full comes in the middle of anything."""
    plain = sys.stdout
    if isinstance(plain, io.TextIOWrapper):
        plain.flush()
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Stdout(plain.fileno(), "w", closefd=False)),
            encoding=plain.encoding,
            errors=plain.errors,
            line_buffering=plain.line_buffering,
        )


def terminal(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Stdout, or stderr; `quiet`: nothing is shown."""
    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False)


def print_table(table: RenderableType, *, in_one_line: bool = False) -> None:
    """Print what holds tables on stdout, wider than the terminal where a word would not fit, which rich cuts off.

    A figure without its last digits is another one. `in_one_line`: no cell is broken in lines.
    """
    console = terminal()
    _widen(table, console, in_one_line=in_one_line)
    console.print(table, crop=False)


def _widen(table: RenderableType, console: Console, *, in_one_line: bool) -> None:
    if isinstance(table, Group):
        for part in table.renderables:
            _widen(part, console, in_one_line=in_one_line)
    elif isinstance(table, Table):
        options = console.options.update(max_width=_ANY_WIDTH)
        for column in table.columns:
            widths = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
            column.min_width = max(width.maximum if in_one_line else width.minimum for width in widths)


def print_object(text: str) -> None:
    """Write the one object of a `--json` command to stdout."""
    sys.stdout.write(text + "\n")


def fail(message: str, code: int) -> int:
    """Write `message` in one line to stderr; return `code`."""
    sys.stderr.write(f"tiermem: {' '.join(message.split())}\n")
    return code
