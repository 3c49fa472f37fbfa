"""Where the commands print, for people and for programs.

Owns how text is taken by rich. Does not know what is printed. Guarantees that it is shown as it is: a directory, a file
or a model may be called `run[a]` or `:cat:`, which would be marks of rich otherwise, and lost.
"""

from __future__ import annotations

import sys

from rich.console import Console


def terminal(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Stdout, or stderr; `quiet`: nothing is shown."""
    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False)


def print_object(text: str) -> None:
    """Write the one object of a `--json` command to stdout."""
    sys.stdout.write(text + "\n")


def fail(message: str, code: int) -> int:
    """Write `message` in one line to stderr; return `code`."""
    sys.stderr.write(f"tiermem: {' '.join(message.split())}\n")
    return code
