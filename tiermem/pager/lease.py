"""Leases: the hold on pages that somebody outside the pager's loop has in hand.

Owns the user's side of a lease and of the wait for one. Does not change any page: releasing is a message to the loop.
Guarantees that a lease is released once however often it is asked to, that waiting ends with leases or with an error,
and that the time spent waiting is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self

import torch

from tiermem.errors import InvariantError
from tiermem.pager.page import Page, PageKey

Release = Callable[["Lease", BaseException | None], None]


class Lease:
    """A hold on one or more pages on one tier; forbids their eviction until released."""

    __slots__ = ("_open", "_pages", "_release", "_tensors")

    def __init__(self, pages: Sequence[Page], tensors: dict[PageKey, torch.Tensor], release: Release) -> None:
        self._pages = pages
        self._tensors = tensors
        self._release = release
        self._open = True

    @property
    def pages(self) -> Sequence[Page]:
        """The leased pages; their facts belong to the pager's loop."""
        return self._pages

    def tensor(self, key: PageKey) -> torch.Tensor:
        """The bytes of a page: uint8, shape (nbytes,), a view that shares the frame's storage.

        Raises:
            InvariantError: the lease is released already.
        """
        if not self._open:
            raise InvariantError(f"{key}: looked at after its lease was released; this is a bug in tiermem")
        return self._tensors[key]

    def release(self) -> None:
        """Give the hold back. Never waits; may be called from any thread and more than once."""
        self._close(None)

    def fail(self, error: BaseException) -> None:
        """Give the hold back and declare the contents garbage: whoever uses the pages next gets `error`."""
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if self._open:
            self._open = False
            self._tensors = {}
            self._release(self, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class PendingLease:
    """A lease that was asked for; `wait` returns it."""

    __slots__ = ("_future", "_stalled")

    def __init__(self, future: Future[Lease], stalled: Callable[[float, float], None]) -> None:
        self._future = future
        self._stalled = stalled

    def wait(self) -> Lease:
        """Wait for the lease.

        Raises:
            CapacityError: no room can be made for it.
            Exception: the recorded error of one of the pages.
        """
        started = time.perf_counter()
        try:
            return self._future.result()
        except KeyboardInterrupt:
            # Nobody will receive the lease any more: give it back as soon as it is granted.
            self._future.add_done_callback(_give_back)
            raise
        finally:
            self._stalled(started, time.perf_counter())


def _give_back(future: Future[Lease]) -> None:
    if future.exception() is None:
        future.result().release()
