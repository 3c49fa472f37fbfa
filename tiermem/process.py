"""The process a runtime lives in.

Owns the number of that process, the start of its threads, and the look at what another one of them is in. Does not
know runtimes. Guarantees that a forked child, to which neither the threads nor the memory of a runtime come along, is
told so instead of waiting for ever for threads it does not have; so does whoever may not start one.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from tiermem.errors import TiermemError
from tiermem.future import Future

# Of a function that can be left and gone on with: once left it no longer knows who called it. A look at a thread that
# ends with one was cut short so, and is repeated, this often at most.
_LEFT = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_LOOKS = 10

_forks = [0]  # between this process and the first one: a look at it costs no system call


def _count_fork() -> None:
    _forks[0] += 1


os.register_at_fork(after_in_child=_count_fork)


class HomeProcess:
    """The process that made this object."""

    __slots__ = ("_forks", "_pid")

    def __init__(self) -> None:
        self._pid, self._forks = os.getpid(), _forks[0]

    @property
    def is_here(self) -> bool:
        """Whether this is the process, and not a forked child of it."""
        return _forks[0] == self._forks

    def check(self) -> None:
        """Raise TiermemError in a forked child."""
        if not self.is_here:
            raise TiermemError(
                f"this is a forked child of process {self._pid}, which has the runtime: neither its threads nor its "
                "memory come along; leave the model alone here (data loader workers need the data only)"
            )


def frames_of(thread: int) -> list[FrameType]:
    """The calls that a thread of this process is in, the innermost first; it goes on meanwhile.

    Up to Python 3.11 asking for a frame may collect garbage first, and a finalizer lets the thread leave that frame:
    what is returned then is memory of something else. So nothing is collected here.
    """
    collected = gc.isenabled()
    try:
        gc.disable()
        frames: list[FrameType] = []  # here: it may be what a collection begins with
        for _ in range(_LOOKS):
            frames.clear()
            frame = sys._current_frames().get(thread)  # noqa: SLF001 - documented
            while frame is not None:
                frames.append(frame)
                frame = frame.f_back
            if not frames or not frames[-1].f_code.co_flags & _LEFT:
                break
    finally:
        if collected:
            gc.enable()
    return frames


def start_thread(name: str, work: Callable[..., None], *arguments: Any) -> TiermemError | None:
    """Start a thread that the program waits for at its end; the error of a system that allows no more of them."""
    try:
        begin(threading.Thread(target=work, args=arguments, name=name))
    except TiermemError as refusal:
        return refusal
    return None


def begin(thread: threading.Thread) -> None:
    """Start a thread. Raises TiermemError where the system allows no more of them; it may be begun again then."""
    thread._started = _Begun()  # type: ignore[attr-defined] # noqa: SLF001 - see there
    try:
        thread.start()
    except RuntimeError as error:
        raise refused(thread.name, error) from error


class _Begun:
    """Whether a thread has begun, in the place of the event of `threading`, whose names these are.

    Who starts a thread waits for that, and an interrupt may leave an event locked: the thread would never begin, and
    the program's end wait for it (`future.py`).
    """

    def __init__(self) -> None:
        self._future: Future[None] = Future()

    def set(self) -> None:
        self._future.set_result(None)

    def is_set(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.exception()

    def _at_fork_reinit(self) -> None:
        """In a forked child nobody waits for it."""


def refused(name: str, error: RuntimeError) -> TiermemError:
    """What is said of a thread that Python could not start."""
    return TiermemError(f"no thread can be started for {name} ({error}); see `ulimit -u`, or the container's limit")
