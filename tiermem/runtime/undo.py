"""Undoing updates: where the pager, the copies on disk and the commits meet.

Owns the choice of the schedule, and the question whether the disk has room for a copy that may be taken back (for how
many is said in `planner.reserved`). Does not know optimizers or norms. Guarantees that an early update is never begun
which could run out of room for lack of a copy, and that none begins while a commit is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiermem.future import Future
from tiermem.optim.schedules import UpdateSchedule, make_schedule
from tiermem.optim.service import GradientBook, UpdateQueue
from tiermem.optim.speculation import Speculation
from tiermem.pager.extents import Extents
from tiermem.pager.pager import Pager
from tiermem.pager.protection import Protection
from tiermem.runtime.blueprint import Blueprint
from tiermem.runtime.storage import Storage


def choose_schedule(update: str, blueprint: Blueprint) -> UpdateSchedule:
    """The schedule called `update`.

    Where all pages fit into memory, or updates are not to run beside the computation, updating under backward hides
    nothing and only costs writes: there "auto" is "forward".
    """
    return make_schedule(update, worthwhile=not (blueprint.footprint.serial or blueprint.fits))


class Undo:
    """The `optim.service.Undo` of a runtime."""

    def __init__(self, pager: Pager, extents: Extents, wait_open: Callable[[], None], *, copies: int) -> None:
        """`wait_open`: waits until pages may change, for a commit under way, say.

        `copies`: for how many copies of what training changes the disk has room.
        """
        self._pager = pager
        self._extents = extents
        self._wait_open = wait_open
        self._copies = copies
        self._reverting: tuple[Protection, Future[None]] | None = None  # the latest

    def has_room(self) -> bool:
        """Whether the disk has room for one more copy of everything that is updated. May wait for a commit."""
        if self._copies < 2:
            return False
        self._wait_open()
        return self._extents.generations.alive() < self._copies

    def protection(self) -> Protection:
        """A new protection."""
        return self._pager.protection(self._extents.keep())

    def revert(self, protection: Protection, running: Sequence[Future[None]]) -> None:
        """Wait for the updates that are running, then until everything protected is as it was before.

        Asked a second time, because an interrupt has ended the first wait, it waits for the same.
        """
        for future in running:
            self._pager.wait_for(future)
        if self._reverting is None or self._reverting[0] is not protection:
            self._reverting = protection, self._pager.start_task(protection.revert())
        self._pager.wait_for(self._reverting[1])


def make_speculation(
    storage: Storage,
    wait_open: Callable[[], None],
    queue: UpdateQueue,
    gradients: GradientBook,
    *,
    room_for: Callable[[int], int],
) -> Speculation:
    """The speculation of a run; `wait_open` as for `Undo`.

    `room_for(copies)`: bytes on disk for that many copies of what training changes.
    """
    nbytes = storage.space.statistics().nbytes  # of a run that is resumed: as it was made
    copies = max(copies for copies in (1, 2, 3) if copies == 1 or room_for(copies) <= nbytes)
    undo = Undo(storage.pager, storage.extents, wait_open, copies=copies)
    return Speculation(queue, gradients, undo, storage.counters)
