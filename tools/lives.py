"""Lives: processes that work until they are killed, forked from one that has imported everything and done nothing.

Owns the fork, the kill, and what the child told until then. Does not know what a child does. Guarantees that the parent
has no thread but its own when it forks (a child would lack the others, and find their locks held), that a child is a
process of its own which dies by a real SIGKILL, and that one which fails by itself ends the program with what it said.

Forking saves what a new interpreter would import each time, several seconds where torch is needed: a child lives in its
work from its first moment, and hundreds of kills take minutes.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

LONGEST = 600.0  # seconds that a child which is not killed may take


@dataclass(frozen=True, slots=True)
class Life:
    """What a child told, line by line, and whether it was killed before it had finished."""

    lines: list[str]
    killed: bool


def live(work: Callable[[], None], *, seconds: float | None, working: bool) -> Life:
    """Fork a child that carries out `work`, and kill it after `seconds` (None: never).

    Counted from its first word if `working`, else from its birth. Raises SystemExit if it fails by itself.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise SystemExit(f"expected one thread before a fork, found {threads}; set OMP_NUM_THREADS=1")
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            _be_born(work, told.fileno(), errors.fileno())
        try:
            status = None
            until = time.monotonic() + LONGEST
            while working and status is None and not os.fstat(told.fileno()).st_size and time.monotonic() < until:
                status = _wait(child, 0.001)
            status = status if status is not None else _wait(child, LONGEST if seconds is None else seconds)
        finally:
            if status is None:
                os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
        told.seek(0)
        errors.seek(0)
        lines = told.read().decode().splitlines()
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if status != 0 and (not killed or seconds is None):
            raise SystemExit(f"a child failed with status {status}: {lines}\n{errors.read().decode()}")
    return Life(lines, killed)


def tell(line: str) -> None:
    """For a child: one system call, so that a line is told whole or not at all."""
    os.write(1, f"{line}\n".encode())


def _wait(child: int, seconds: float) -> int | None:
    """The child's status; None if it still lives after `seconds`."""
    until = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        left = until - time.monotonic()
        if found:
            return status
        if left <= 0:
            return None
        time.sleep(min(left, 0.002))


def _be_born(work: Callable[[], None], told: int, errors: int) -> None:
    """Never returns: what the parent would do next, and at its end, is not the child's."""
    status = 1
    try:
        os.dup2(told, 1)
        os.dup2(errors, 2)
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - told to the parent, by the status too
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
