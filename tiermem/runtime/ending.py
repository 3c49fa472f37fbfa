"""How a house ends.

Owns the order in which its rooms are closed, and the thread on which files and threads are. Does not know whether a
runtime is open. Guarantees that each room is closed whatever the ones before raise, and that files, locks and threads
are closed to their end, whoever is interrupted (Ctrl-C) while he waits for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tiermem.future import Future
from tiermem.process import start_thread
from tiermem.registry import registry
from tiermem.runtime.company import leave_directories
from tiermem.runtime.storage import close_all

if TYPE_CHECKING:
    from tiermem.runtime.house import House


class Ending:
    """What is done once, and to its end: on a thread of its own, as interrupts and signal handlers come to the first.

    Who is interrupted while he waits goes on; the program's end waits for it.
    """

    def __init__(self) -> None:
        self._begins = threading.Lock()
        self._over: Future[None] = Future()

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

        if not self._over.done() and start_thread("tiermem-close", carry_out) is not None:
            carry_out()  # no more threads, or the interpreter is ending
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
