"""The old bytes of pages that are updated before it is known whether that counts, in host memory.

Owns one piece of memory and where in it the bytes of which page go. Does not know tiers, or why an update is taken
back. Guarantees that what a kernel is about to change has been copied before it does, as long as the update may have to
be undone, that taking back restores exactly these bytes, and that confirming costs nothing.

    closed <-- confirm -- open -- revert --> closed: old bytes are written back, what had none is forgotten
                          | ^
                          +-+ log: on the worker, just before a kernel

Where everything fits into memory, old bytes in SWAP would be the only ones written there at all. A copy in memory takes
half of a kernel's own time, and is made while the processor would have nothing else to do: see "What taking back costs"
in README.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, Protocol, TypeVar

import numpy as np
import torch

from tiermem.errors import InvariantError
from tiermem.optim.shares import Job, Shares
from tiermem.optim.updates import OldBytes
from tiermem.optim.window import HeldPages
from tiermem.pager.page import Intent, PageKey

P = ParamSpec("P")
T = TypeVar("T")
Range = tuple[int, int]  # of a page: first byte, bytes
_BLOCK = 4096  # where the threads that copy divide the bytes among them


class LogPager(Protocol):
    """The part of the pager that taking back uses."""

    async def acquire(self, keys: Sequence[PageKey], intent: Intent) -> HeldPages:
        """A lease, awaited on the loop."""

    async def run_worker(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on the update worker."""

    def start_discard(self, keys: Sequence[PageKey]) -> None:
        """Forget the contents of pages."""

    def has_failed(self, key: PageKey) -> bool:
        """Whether the page has an error that is raised to whoever uses it. On the loop only."""

    def set_agenda(self, groups: Sequence[Sequence[PageKey]]) -> None:
        """Say what the update does next. On the loop only."""


class UndoLog:
    """Memory for the old bytes of given pages, used by one protection after the other."""

    def __init__(self, pager: LogPager, pages: Mapping[PageKey, int], shares: Shares) -> None:
        """`pages`: which, with their sizes in bytes. `shares`: the worker's, which copies."""
        self.pager = pager
        self._shares = shares
        self._starts: dict[PageKey, int] = {}
        self.nbytes = 0
        for key, nbytes in pages.items():
            self._starts[key] = self.nbytes
            self.nbytes += nbytes
        self._memory = torch.empty(self.nbytes, dtype=torch.uint8)

    def protection(self) -> LoggedUpdates:
        """An open protection of no page yet."""
        return LoggedUpdates(self)

    def keep(self, pieces: Sequence[OldBytes]) -> None:
        """Copy bytes into the log. On the worker."""
        self._shares.run(
            [
                _copying(self._place(piece.key, piece.offset, piece.present.numel()), piece.present)
                for piece in pieces
                if piece.present is not None
            ]
        )

    def restore(self, key: PageKey, ranges: Sequence[Range], whole: torch.Tensor) -> None:
        """Copy what the log has of a page back to where the whole page is. On the worker."""
        self._shares.run(
            [_copying(whole[start : start + numel], self._place(key, start, numel)) for start, numel in ranges]
        )

    def _place(self, key: PageKey, offset: int, nbytes: int) -> torch.Tensor:
        if key not in self._starts:
            raise InvariantError(f"{key} is updated early and has no place in the undo log; this is a bug in tiermem")
        start = self._starts[key] + offset
        return self._memory[start : start + nbytes]


def _copying(to: torch.Tensor, source: torch.Tensor) -> Job:
    """Not by torch: it has threads of its own, and numpy lets go of the interpreter's lock."""
    target, origin = to.numpy(), source.numpy()
    return Job(target.size, _BLOCK, lambda piece: np.copyto(target[piece], origin[piece]))


class LoggedUpdates:
    """The updates of one step that may be undone (`optim.updates.Protector`)."""

    def __init__(self, log: UndoLog) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._open = True
        self._logged: dict[PageKey, list[Range]] = {}
        self._fresh: set[PageKey] = set()  # had no contents
        self._discarded: list[PageKey] = []

    def prepare(self, keys: Sequence[PageKey]) -> None:
        """Nothing: bytes are copied when they are about to change."""

    async def protect(self, keys: Sequence[PageKey]) -> None:
        """As `prepare`."""

    def log(self, pieces: Sequence[OldBytes]) -> None:
        """Copy what is about to change, unless that counts already. On the worker.

        Bytes that were logged before are left out: of two optimizers that share a tile the second finds it changed.
        """
        if not self._open:
            return
        new = [piece for piece in pieces if not self._is_logged(piece)]
        self._log.keep(new)
        for key, offset, present in new:  # not the bytes themselves: their frame is soon somebody else's
            if present is None:
                self._fresh.add(key)
            else:
                self._logged.setdefault(key, []).append((offset, present.numel()))

    def _is_logged(self, piece: OldBytes) -> bool:
        """Whether the log has these bytes; pieces of a page are the same ones, or apart."""
        key, offset, present = piece
        return key in self._fresh or (present is not None and (offset, present.numel()) in self._logged.get(key, ()))

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Forget these pages as soon as they cannot be needed for a redo."""
        with self._lock:
            if self._open:
                self._discarded.extend(keys)
                return
        self._log.pager.start_discard(keys)

    def confirm(self) -> None:
        """The new bytes count. Any thread; does not wait."""
        with self._lock:
            self._open, discarded, self._discarded = False, self._discarded, []
        if discarded:
            self._log.pager.start_discard(discarded)

    async def revert(self) -> None:
        """Until every page that was logged has its old bytes again; one that has failed stays failed. On the loop.

        The updates themselves have ended. Raises the error of the pager where there is no more paging at all.
        """
        with self._lock:
            self._open = False
            self._discarded.clear()
        pager = self._log.pager
        pager.start_discard(list(self._fresh))
        for key, ranges in self._logged.items():
            try:
                held = await pager.acquire([key], Intent.WRITE)
            except Exception:
                if pager.has_failed(key):
                    continue
                raise
            try:
                await pager.run_worker(self._log.restore, key, ranges, held.tensor(key))
            except BaseException as error:
                held.fail(error)
                raise
            held.release()
        pager.set_agenda([])
