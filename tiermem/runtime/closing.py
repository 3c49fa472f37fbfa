"""How a runtime is closed: by whom, when not, and in which order.

Owns the two methods of a context manager, the refusal of copies, and of what is asked inside something else; the order
in which rooms are closed, and the thread on which files and threads are. Does not know what is in a room. Guarantees
that `close` is called however the body of a `with` ends, that the body's error is not swallowed, and that nothing
closed is entered; that each room is closed whatever the ones before raise, and that files, locks and threads are closed
to their end, whoever is interrupted (Ctrl-C) while he waits for that.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, Self, SupportsIndex

import torch
from torch import nn

from tiermem.errors import CopyError, TiermemError
from tiermem.future import Future
from tiermem.process import begin
from tiermem.registry import registry
from tiermem.runtime.company import leave_directories
from tiermem.runtime.storage import close_all
from tiermem.zero3.engine import backward_elsewhere, backward_number
from tiermem.zero3.lend import copies
from tiermem.zero3.scheduler import GatherScheduler

if TYPE_CHECKING:
    from tiermem.runtime.house import House


class Closing(ABC):
    """`with` gives the object itself and closes it."""

    @abstractmethod
    def close(self) -> None:
        """Close the object; `with` does so at its end."""

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


def begin_to_close(house: House, *, restore_model: bool) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """From here on no other thread may call the model. Returns the values that parameters are to have, if any.

    Raises TiermemError where another thread is inside a forward or backward, and whatever keeps from the values; then
    nothing has changed.
    """
    scheduler = house.scheduler
    refuse_elsewhere(scheduler)
    try:
        if not restore_model:
            return []
        house.coordinator.wait_updates()
        scheduler.settle()
        return copies(house.gatherer, house.layouts, house.parameters, needed=house.coordinator.unit_needed)
    except BaseException:
        scheduler.stack.leave()
        raise


def refuse_elsewhere(scheduler: GatherScheduler) -> None:
    """Raise TiermemError while another thread is inside a forward or backward; else others may not call the model.

    A backward that has not come to a unit yet is known by the graph that it may come through.
    """
    name = scheduler.stack.try_take()
    if name is None and (scheduler.backwards or scheduler.saved.any_outstanding):
        name = backward_elsewhere()
        if name is not None:
            scheduler.stack.leave()
    if name is not None:
        raise TiermemError(
            f"close in thread {threading.current_thread().name!r} while thread {name!r} is inside a forward or "
            "backward: expected it between two steps; nothing is closed. Wait for that thread (thread.join()), or put "
            "a lock around its steps and around close"
        )


def refuse_to_close(scheduler: GatherScheduler, *, lent: bool) -> None:
    """Raise TiermemError for a `close` inside of `gathered` (`lent`) or of `forward_backward`."""
    if lent:
        raise TiermemError(
            "close inside `with runtime.gathered(...)`: expected it after the end of that block, which still lends "
            "parameters; nothing is closed. To keep the values, close(restore_model=True) after the block"
        )
    if scheduler.lockstep is not None:
        raise TiermemError(
            "close inside runtime.forward_backward(): expected it after that call, in which other micro-batches still "
            "use the model; nothing is closed. An exception ends the call"
        )


class Ending:
    """What is done once, and to its end: on a thread of its own, as interrupts and signal handlers come to the first.

    Who is interrupted while he waits goes on; the program's end waits for it. Who is not finds that thread gone, too:
    Python warns of a fork beside any thread.
    """

    def __init__(self) -> None:
        self._begins = threading.Lock()
        self._over: Future[None] = Future()
        self._threads: list[threading.Thread] = []

    def run(self, end: Callable[[], None]) -> None:
        """Have `end()` called, unless somebody has; wait for it. Raises its error."""

        def carry_out() -> None:
            if not self._begins.acquire(blocking=False):
                return
            try:
                end()
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits
                self._over.set_exception(error)
            else:
                self._over.set_result(None)

        def beside() -> None:
            self._threads.append(threading.current_thread())  # whoever starts it may be interrupted before he can
            carry_out()

        if not self._over.done():
            thread = threading.Thread(target=beside, name="tiermem-close")
            try:
                begin(thread)
                self._threads.append(thread)
            except TiermemError:  # no more threads, or the interpreter is ending
                carry_out()
        self._over.exception()
        for thread in self._threads:
            thread.join()
        self._over.result()

    def then(self, function: Callable[[], object]) -> None:
        """Call `function()` if it is over."""
        if self._over.done():
            function()


def close_rooms(house: House, *, remove: bool | None) -> None:
    """See `House.close`."""

    def close_storage() -> None:
        house.commits.wait_open()  # again, if that was interrupted: it must not outlive its bytes, nor the lock
        house.storage.close(remove=house.commits.hold_nothing if remove is None else remove)
        leave_directories(house.config, house.company)

    def end() -> None:
        beside = [] if house.storage.device is None else [house.storage.device.work_beside]
        close_all([*beside, house.updater.close, close_storage, house.company.close])

    def forget() -> None:
        for parameter in house.parameters:
            registry.detach(parameter)

    house.steps.close()
    # The conductor first, so that others who wait for this rank in vain know it soon.
    actions = [house.conductor.close, house.coordinator.wait_updates, house.snapshots.close, house.commits.close]
    close_all([*actions, house.scheduler.close, lambda: house.ending.run(end), forget])
