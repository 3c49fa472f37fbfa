"""The ranks of one run: who takes part, how they talk, and where each keeps its files.

Owns the choice of the group, the two lines of talk (one of the computation, one of commits, which run beside it), and
what ranks must agree on before anything is opened. Does not know units or pages. Guarantees that a run of one process
has none of it, and that what goes wrong on one rank while a run begins is told to all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import secrets
import socket
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from swap import SwapIOError
from swap.paths import sync_directory
from swap.patience import PatientSystemCalls
from swap.syscalls import SystemCalls
from tiermem.config import Config, resolve_device
from tiermem.errors import ConfigError, TiermemError
from tiermem.zero3.collectives import Collectives, SingleProcess, by_rank, reason_of
from tiermem.zero3.grid import Grid, one_copy
from tiermem.zero3.ranks import Ranks, next_name, rows_of

T = TypeVar("T")
RANK_PREFIX = "rank_"


@dataclass(frozen=True)
class Company:
    """Those who train together. What is in `grid`, and `committing`, are used by one thread each."""

    grid: Grid
    committing: Collectives
    neighbours: int = 1  # how many of them are on this machine
    run: int = 0  # by which the parts of a commit are known to belong together

    @property
    def computing(self) -> Collectives:
        """The line of the computation, of all of them."""
        return self.grid.everyone

    @property
    def rank(self) -> int:
        """This process's number among them."""
        return self.computing.rank

    @property
    def size(self) -> int:
        """How many take part."""
        return self.computing.size

    def together(self, what: str, action: Callable[[], T], undo: Callable[[T], None] = lambda _: None) -> T:
        """See `together`, on the line of the computation."""
        return together(self.computing, what, action, undo)

    def least(self, number: int) -> int:
        """The smallest of the numbers that the ranks give."""
        return min(told[0] for told in self.computing.tell([number]))

    def close(self, reason: str | None = None) -> None:
        """Leave. May be called twice."""
        self.computing.close(reason)
        self.committing.close(reason)


def together(
    ranks: Collectives,
    what: str,
    action: Callable[[], T],
    undo: Callable[[T], None] = lambda _: None,
    doubt: Callable[[T, BaseException], None] | None = None,
) -> T:
    """Do something on every rank; if it fails on one, all raise: that one its error, the others TiermemError.

    `undo`: takes back what was done here where another rank has failed, or it could not be found out. `doubt`: instead
    of it in that second case, where others may go on from what was done here; is given the error too.
    """
    failure: BaseException | None = None
    result: list[T] = []
    try:
        result.append(action())
    except BaseException as error:  # noqa: BLE001 - told to the others, then raised
        failure = error
    try:
        reasons = ranks.tell_text(reason_of(failure))
    except BaseException as lost:
        if result and doubt is not None:
            doubt(result[0], lost)
        elif result:
            undo(result[0])
        raise
    if failure is not None:
        raise failure
    if any(reasons):
        undo(result[0])
        raise TiermemError(f"another rank could not {what}: {by_rank(reasons)}")
    return result[0]


def refuse(ranks: Collectives, what: str, refusal: BaseException) -> BaseException:
    """Take the place of `together` where it cannot even begin here; returns what this rank is to raise."""

    def fail() -> None:
        raise refusal

    try:
        together(ranks, what, fail)
    except BaseException as error:  # noqa: BLE001 - it is returned
        return error
    return refusal


def alone() -> Company:
    """This process by itself, whatever others there are."""
    one = SingleProcess()
    return Company(one_copy(one), one)


def find_company(config: Config, mesh: Any = None) -> Company:
    """The ranks to train with: those of `mesh` (see `rows_of`), else all.

    Waits for all of them. Without torch.distributed, or alone in the group: one process. Raises ConfigError for a mesh
    that is none, or that nobody is there for.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        if mesh is not None:
            raise ConfigError("mesh= names ranks, but torch.distributed is not initialised here; leave it out for one")
        return alone()
    copies = None if mesh is None else rows_of(mesh)
    members = None if copies is None else sorted(itertools.chain(*copies))
    if (torch.distributed.get_world_size() if members is None else len(members)) == 1:
        return alone()
    device = resolve_device(config)
    name = next_name()
    # A rank whose drive is silent in a commit notices after `stall_timeout`, and must then still be listened to.
    patience = 2 * config.stall_timeout
    lines: list[Ranks] = []
    try:
        lines.append(Ranks(members, timeout=config.stall_timeout, device=device, name=f"{name}/computing"))
        lines.append(Ranks(members, timeout=patience, device=torch.device("cpu"), name=f"{name}/committing"))
        computing, committing = lines
        rows = [[members.index(rank) for rank in row] for row in copies] if members and copies else []
        grid = _arrange(computing, rows) if len(rows) > 1 else one_copy(computing)
        host = zlib.crc32(socket.gethostname().encode())
        neighbours = sum(told[0] == host for told in computing.tell([host]))
        run = computing.tell([secrets.randbits(62)])[0][0]
    except BaseException as error:
        for line in lines:
            line.close(f"could not begin: {reason_of(error)}")
        raise
    return Company(grid, committing, neighbours, run)


def _arrange(everyone: Ranks, rows: Sequence[Sequence[int]]) -> Grid:
    """The lines of this rank: its copy, and those who hold the same part of the others."""
    columns = list(zip(*rows, strict=True))
    return Grid(everyone, everyone.part(rows), everyone.part(columns), tuple(map(tuple, rows)))


def own_directories(config: Config, company: Company) -> Config:
    """`config` with this rank's subdirectory of each swap directory; one process has none.

    The paths are absolute: the run goes on where it began, whatever directory the process changes to.
    """
    paths = [path.absolute() for path in config.swap_paths]
    if company.size > 1:
        paths = [path / f"{RANK_PREFIX}{company.rank:05d}" for path in paths]
    return dataclasses.replace(config, swap_dirs=[str(path) for path in paths])


def make_directories(config: Config, company: Company) -> None:
    """Make this rank's subdirectories, where `config` is that of `own_directories`."""
    system = PatientSystemCalls(None, config.stall_timeout)
    for path in config.swap_paths if company.size > 1 else ():
        _make(path, system)


def leave_directories(config: Config, company: Company) -> None:
    """Remove this rank's subdirectories where nothing is left in them."""
    system = PatientSystemCalls(None, config.stall_timeout)
    for path in config.swap_paths if company.size > 1 else ():
        with contextlib.suppress(OSError):  # something is, a commit or what is not ours; or the drive is silent
            system.ask(path.rmdir)


def _make(path: Path, system: SystemCalls) -> None:
    def make() -> bool:
        missing = path.parent.is_dir() and not path.is_dir()  # else whoever opens it says that it is missing
        if missing:
            path.mkdir(mode=0o700, exist_ok=True)
        return missing

    try:
        made = system.ask(make)
    except OSError as error:
        raise SwapIOError("mkdir", path, errno=error.errno or errno.EIO) from error
    if made:
        sync_directory(os.fspath(path.parent), system)  # a commit in there is only as durable as its name
