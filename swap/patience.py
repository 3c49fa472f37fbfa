"""System calls that give up on a drive which does not answer.

Owns one thread for each call under way, and how long it is waited for. Does not know why a call is made. Guarantees
that a call returns, raises what the real one raised, or raises TimeoutError with ETIMEDOUT after `seconds`; and that a
call which was interrupted, or told to come back, is made again. For the few calls that are made outside the engine
(headers, manifests, names, syncs): the engine watches its own.

A thread that is stuck in the kernel cannot be ended. It keeps what it was given, its buffer included, until the drive
answers, and what it brings then is dropped. What it does to the disk is not: a rename may take effect long after it was
given up. `late` says which calls are still out, so that nobody else is let into the directory before they have ended.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from swap.syscalls import SystemCalls
from swap.watch import WatchedThread, join

T = TypeVar("T")

_ATTEMPTS = 100
_PAUSE = 0.01  # seconds
_PIECE = 256 << 20  # bytes reserved at once, also where a file system writes zeros for it


class PatientSystemCalls(SystemCalls):
    """The calls of `system`; those that may wait for a drive are waited for `seconds` at most."""

    def __init__(self, system: SystemCalls | None, seconds: float) -> None:
        self._system = system or SystemCalls()
        self._seconds = seconds
        self._given_up: list[threading.Thread] = []
        self._lock = threading.Lock()  # of that list: two drives may be silent at once
        at_once = ("overwrite_in_place", "lock", "unlock", "sleep")
        for name in at_once:
            setattr(self, name, getattr(self._system, name))

    def late(self) -> Sequence[threading.Thread]:
        """Those of the calls given up that the drive has not answered yet."""
        with self._lock:
            self._given_up = [thread for thread in self._given_up if thread.is_alive()]
            return tuple(self._given_up)

    def ask(self, call: Callable[[], T]) -> T:
        """Make some other call that may wait for a drive; where no thread can be started, on the calling one.

        So what a process has made is removed also where it has come to a limit on threads.
        """
        return self._answer(lambda: self._system.ask(call), here=True)

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """Open a file and return its descriptor. One that is opened too late stays open: nobody can close it."""
        return self._answer(lambda: self._system.open(path, flags, mode))

    def close(self, fd: int) -> None:
        """Close a descriptor: at once, unless calls are out, for which a file system over a network may wait."""
        if self.late():
            self._answer(lambda: self._system.close(fd), here=True)
        else:
            self._system.close(fd)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        """Read at `offset` into `view`; return the bytes read."""
        return self._answer(functools.partial(self._system.preadv, fd, view, offset))

    def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
        """Write `view` at `offset`; return the bytes written."""
        # Not a lambda: the frame of one keeps what it closes over, `view`, also when its local variables are cleared.
        return self._answer(functools.partial(self._system.pwritev, fd, view, offset))

    def fdatasync(self, fd: int) -> None:
        """Make a file's completed writes durable."""
        self._answer(lambda: self._system.fdatasync(fd))

    def fsync(self, fd: int) -> None:
        """Make a file's, or a directory's, completed changes durable."""
        self._answer(lambda: self._system.fsync(fd))

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Reserve disk blocks, a piece after the other: all of them may take long without a drive being silent."""
        for begin in range(offset, offset + nbytes, _PIECE):
            length = min(_PIECE, offset + nbytes - begin)
            self._answer(functools.partial(self._system.fallocate, fd, begin, length))

    def truncate(self, fd: int, nbytes: int) -> None:
        """Set a file's size."""
        self._answer(lambda: self._system.truncate(fd, nbytes))

    def free_bytes(self, path: str) -> int:
        """Bytes an ordinary user may still write on the file system of `path`."""
        return self._answer(lambda: self._system.free_bytes(path))

    def rename(self, source: str, target: str) -> None:
        """Give a file another name."""
        self._answer(lambda: self._system.rename(source, target))

    def unlink(self, path: str) -> None:
        """Remove a name."""
        self._answer(lambda: self._system.unlink(path))

    def _answer(self, call: Callable[[], T], *, here: bool = False) -> T:
        attempt = 1
        while True:
            try:
                return self._wait(call, here=here)
            except (InterruptedError, BlockingIOError):
                if attempt == _ATTEMPTS:
                    raise
                attempt += 1
                self._system.sleep(_PAUSE)

    def _wait(self, call: Callable[[], T], *, here: bool) -> T:
        answer: list[T] = []
        raised: list[BaseException] = []
        thread = WatchedThread(functools.partial(_run, call, answer, raised), name="swap-call")
        try:
            try:
                thread.start()
            except RuntimeError as error:
                if here or not threading.main_thread().is_alive():
                    return call()  # the program ends, for one, and Python 3.12.0 and 3.12.1 start none then
                # A limit on processes, which others may keep below in a moment: the drive has not been asked yet.
                raise BlockingIOError(errno.EAGAIN, f"no thread can be started ({error}); see `ulimit -u`") from error
            join([thread], self._seconds)
        finally:
            if thread.is_alive():  # also where an interrupt has ended the waiting: the drive goes on with the call
                with self._lock:
                    self._given_up.append(thread)
        if answer:
            return answer[0]
        if raised:
            raise raised.pop()  # this frame does not keep it, as it keeps this frame: a reference cycle
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


def _run(call: Callable[[], T], answer: list[T], raised: list[BaseException]) -> None:
    try:
        answer.append(call())
    except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
        raised.append(error)
