"""Objects that are closed at the end of a `with`, and of which there is one.

Owns the two methods of a context manager, the refusal of copies, and of what is asked inside something else. Does not
know what closing means. Guarantees that `close` is called however the body ends, that the body's error is not
swallowed, and that nothing closed is entered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NoReturn, Self, SupportsIndex

from tiermem.errors import CopyError, TiermemError
from tiermem.zero3.engine import backward_number
from tiermem.zero3.scheduler import GatherScheduler


class Closing(ABC):
    """`with` gives the object itself and closes it."""

    @abstractmethod
    def close(self) -> None:
        """End it."""

    @abstractmethod
    def _open(self) -> object:
        """What is inside. Raises TiermemError once it is closed."""

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise CopyError: what copies and pickles it would get the same threads, memory and files a second time."""
        raise CopyError(
            "a tiermem runtime was copied or pickled; its threads, memory and swap files are there once. Write a copy "
            "of the run by runtime.snapshot(path), to go on from by offload(..., resume=path), or of the model by "
            "runtime.save_pretrained(path)"
        )


def refuse_inside(verb: str, scheduler: GatherScheduler) -> None:
    """Raise TiermemError for what is asked inside a forward or backward, where it would be of half a step."""
    if scheduler.lockstep is not None or scheduler.stack.goes_on or backward_number() >= 0:
        raise TiermemError(
            f"{verb} inside a forward or backward: expected between two steps. Have a signal handler set a flag, and "
            "the loop look at it there; or have it raise an exception"
        )


def refuse_to_close(scheduler: GatherScheduler, *, lent: bool) -> None:
    """Raise TiermemError for a `close` inside of `gathered` (`lent`) or of `forward_backward`."""
    if lent:
        raise TiermemError(
            "close inside `with runtime.gathered(...)`: expected it after the end of that block, which still lends "
            "parameters; nothing is closed. To keep the values, close(restore_model=True) behind the block"
        )
    if scheduler.lockstep is not None:
        raise TiermemError(
            "close inside runtime.forward_backward(): expected it behind that call, in which other micro-batches still "
            "use the model; nothing is closed. An exception ends the call"
        )
