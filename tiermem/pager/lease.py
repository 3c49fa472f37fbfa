"""Leases: the hold on pages that somebody outside the pager's loop has in hand.

Owns the user's side of a lease and of the wait for one. Does not change any page: releasing is a message to the loop.
Guarantees that a lease is released once however often and from however many threads it is asked to, that waiting ends
with leases or with an error, and that a lease nobody receives any more is given back.
"""

from __future__ import annotations

import enum
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar

import torch

from tiermem.errors import InvariantError, TiermemError, again
from tiermem.memory.arena import Fence, Frame
from tiermem.pager.page import Page, PageKey
from tiermem.pager.waits import LONG, Waits


class Parting(enum.Enum):
    """What a lease leaves of its pages: contents as they are, or as if there had been no lease."""

    KEPT = "kept"
    UNUSED = "unused"


T = TypeVar("T")
Release = Callable[["Lease", Parting, BaseException | None], None]


class Lease:
    """A hold on one or more pages on one tier; forbids their eviction until released."""

    __slots__ = ("__weakref__", "_closed", "_fences", "_frames", "_make_fence", "_release", "handed_over", "pages")

    def __init__(
        self,
        pages: Sequence[Page],
        frames: dict[PageKey, Frame],
        release: Release,
        fences: Sequence[Fence] = (),
        make_fence: Callable[[], Fence | None] = lambda: None,
    ) -> None:
        """`frames`: where the bytes are. `fences`: what a device may still be doing with them.

        `make_fence()`: a fence after what the calling thread has asked of a device; None where there is no device.
        """
        self.handed_over: tuple[Fence, ...] = ()
        self._make_fence = make_fence
        self._fences = fences
        self.pages = pages  # their facts belong to the pager's loop
        self._frames: dict[PageKey, Frame] | None = frames
        self._release = release
        self._closed = False

    def tensor(self, key: PageKey) -> torch.Tensor:
        """The bytes of a page: uint8, shape (nbytes,), a view that shares the frame's storage.

        On a device, what the calling thread asks for from now on waits for what others had asked to be done there.

        Raises:
            InvariantError: the lease is released already.
        """
        frames = self._frames
        if frames is None:
            raise InvariantError(f"{key}: looked at after its lease was released; this is a bug in tiermem")
        if self._fences or self.handed_over:
            for fence in (*self._fences, *self.handed_over):
                fence.hold()
        frame = frames[key]
        return frame.tensor[: frame.asked]

    def hand_over(self) -> None:
        """Another thread goes on: `tensor` there, and release, come after what this one has asked of a device."""
        fence = self._make_fence()
        if fence is not None:
            self.handed_over = (*(before for before in self.handed_over if not before.passed()), fence)

    def release(self) -> None:
        """Give the hold back. Never waits; may be called from any thread and more than once."""
        self._close(Parting.KEPT, None)

    def return_unused(self) -> None:
        """Give the hold back, as nobody has made use of it: pages that were taken FRESH are without contents again."""
        self._close(Parting.UNUSED, None)

    def fail(self, error: BaseException) -> None:
        """Give the hold back and declare the contents garbage: whoever uses the pages next gets `error`.

        Or, if that is an interrupt, a TiermemError: raised later and elsewhere it would end what it is not meant for.
        """
        if not isinstance(error, Exception):
            keys = ", ".join(str(page.key) for page in self.pages)
            interrupted = TiermemError(
                f"{type(error).__name__} came while {keys} was being written: forget this step's gradients "
                "(optimizer.zero_grad()) or, if they are not what was written, resume from a commit"
            )
            interrupted.__cause__ = error.with_traceback(None)
            error = interrupted
        self._close(Parting.KEPT, error)

    def _close(self, parting: Parting, error: BaseException | None) -> None:
        if not self._closed:
            self._frames = None
            self._release(self, parting, error)  # said twice, by two threads or after an interrupt, it counts once
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class LeasesOut(Generic[T]):
    """The leases that are not given back yet, each with what is to be known of it. Used on the pager's loop only.

    Some are lost: an interrupt came before whoever asked for one had stored it, or while it was being given back. They
    are found by weak references; in a `__del__` an interrupt would be swallowed, and the lease lost for good.
    """

    def __init__(self) -> None:
        self._known: dict[weakref.ref[Lease], T] = {}

    def add(self, lease: Lease, known: T) -> None:
        """A lease is given out."""
        self._known[weakref.ref(lease)] = known

    def remove(self, lease: Lease) -> T | None:
        """It is given back: what is known of it; None if it was before."""
        return self._known.pop(weakref.ref(lease), None)

    def take_lost(self) -> list[T]:
        """What is known of the leases that nobody has any more."""
        lost = [reference for reference in self._known if reference() is None]
        return [self._known.pop(reference) for reference in lost]


class PendingLease:
    """A lease that was asked for; `wait` returns it, `give_up` says that nobody will.

    A lock instead of a `concurrent.futures.Future`, because every use of a page waits for one of these.
    """

    __slots__ = ("_abandoned", "_error", "_gate", "_keys", "_lease", "_waits", "awaited")

    def __init__(self, keys: Sequence[PageKey], waits: Waits) -> None:
        """`waits`: is told what was waited for these pages."""
        self.awaited = False
        self._keys = keys
        self._waits = waits
        self._gate = threading.Lock()
        self._gate.acquire()
        self._lease: Lease | None = None
        self._error: BaseException | None = None
        self._abandoned = False

    def settle(self, lease: Lease | None, error: BaseException | None) -> None:
        """The request is served, or failed with `error`. Called once."""
        self._lease, self._error = lease, error
        self._gate.release()
        if self._abandoned and lease is not None:
            lease.return_unused()

    def wait(self) -> Lease:
        """Wait for the lease. If the wait is interrupted (Ctrl-C), the lease is given back as soon as it is granted.

        Raises:
            CapacityError: no room can be made for it.
            TiermemError: the pager was closed.
            Exception: the recorded error of one of the pages.
        """
        started = time.perf_counter()
        self.awaited = True
        try:
            try:
                if not self._gate.acquire(timeout=LONG):
                    self._waits.meanwhile()
                    self._gate.acquire()
                self._gate.release()
            finally:
                self._waits.note(started, time.perf_counter(), self._keys)
        except BaseException:
            self.give_up()
            raise
        if self._lease is None:
            if self._error is None:
                raise InvariantError("a lease was settled with nothing; this is a bug in tiermem")
            # A copy: the page keeps its error, and an error that is raised keeps the frames it passes, here those of
            # the model, and with them the graph and whatever that holds.
            raise again(self._error) from self._error
        return self._lease

    def has_raised(self, error: BaseException) -> bool:
        """Whether `wait` has raised this as its answer, and not a signal handler amid it."""
        return self._error is not None and error.__cause__ is self._error

    def give_up(self) -> None:
        """Nobody wants the lease any more: it is given back as soon as it is granted. Never waits."""
        # The flag before the look: `settle` does it the other way round, so one of the two sees the other.
        self._abandoned = True
        lease = self._lease
        if lease is not None:
            lease.return_unused()
