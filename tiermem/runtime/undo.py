"""Undoing updates: where the pager, the copies of old bytes and the commits meet.

Owns the rule for how many copies of what training changes the disk must hold, where the one is that may be taken back,
and the question whether there is room for it. Does not know optimizers or norms. Guarantees that an early update is
never begun which could run out of room for lack of a copy, and that none begins while a commit is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from tiermem.config import Config
from tiermem.optim.schedules import UpdateSchedule, make_schedule
from tiermem.optim.shares import Shares
from tiermem.optim.undolog import UndoLog
from tiermem.optim.updates import Protector
from tiermem.pager.pager import Pager
from tiermem.runtime.blueprint import Blueprint
from tiermem.runtime.snapshots import Snapshots
from tiermem.runtime.storage import Storage


def wanted_copies(config: Config, update: str) -> int:
    """How many copies of PARAM and STATE a new space has room for.

    The current one; one more for the commit before, if there are to be commits; and one more for what is updated early
    and may be taken back, if that is asked for. "backward" is taken to ask for it, since it is not known yet whether an
    optimizer will clip; where none does, that room is never written to. "auto" asks for none: it updates early only
    where the others leave room, which is before the first commit and after a commit that was made of the step before.
    """
    return 1 + config.commits + (update == "backward")


def choose_schedule(blueprint: Blueprint, update: str) -> UpdateSchedule:
    """The schedule called `update`.

    Where all pages fit into host memory, or updates are not to run beside the computation, updating under backward
    hides nothing and only costs writes: there "auto" is "forward", unless there is memory for an undo log.
    """
    pages = blueprint.swap_nbytes(1) > blueprint.host_nbytes
    worthwhile = not blueprint.footprint.serial and (pages or bool(blueprint.logged))
    return make_schedule(update, worthwhile=worthwhile)


class Undo:
    """The `optim.service.Undo` of a runtime."""

    def __init__(self, pager: Pager, protection: Callable[[], Protector], has_room: Callable[[], bool]) -> None:
        """`protection` makes one; `has_room`: whether what it needs is there."""
        self._pager = pager
        self._protection = protection
        self._has_room = has_room
        self._reverting: tuple[Protector, Future[None]] | None = None  # the latest

    def has_room(self) -> bool:
        """Whether an update that may be taken back can begin. May wait for a commit."""
        return self._has_room()

    def protection(self) -> Protector:
        """A new protection."""
        return self._protection()

    def revert(self, protection: Protector, running: Sequence[Future[None]]) -> None:
        """Wait for the updates that are running, then until everything protected is as it was before.

        Asked a second time, because an interrupt has ended the first wait, it waits for the same.
        """
        for future in running:
            self._pager.wait_for(future)
        if self._reverting is None or self._reverting[0] is not protection:
            self._reverting = protection, self._pager.start_task(protection.revert())
        self._pager.wait_for(self._reverting[1])


def make_undo(storage: Storage, blueprint: Blueprint, snapshots: Snapshots, shares: Shares) -> Undo:
    """How the updates of a run are undone: with old bytes in an undo log, or, where none was drawn, in SWAP.

    `shares`: the threads of the update's worker.
    """
    if blueprint.logged:
        log = UndoLog(storage.pager, blueprint.logged, shares)
        # While a commit is made pages may not change: no update waits for it here, since each may begin in `step()`.
        return Undo(storage.pager, log.protection, lambda: not snapshots.under_way)
    nbytes = storage.space.statistics().nbytes  # of a run that is resumed: as it was made
    copies = max(copies for copies in (1, 2, 3) if copies == 1 or blueprint.swap_nbytes(copies) <= nbytes)
    pager, extents = storage.pager, storage.extents

    def has_room() -> bool:
        """Whether the disk has room for one more copy of everything that is updated. May wait for a commit."""
        if copies < 2:
            return False
        snapshots.wait_open()
        return extents.generations.alive() < copies

    return Undo(pager, lambda: pager.protection(extents.keep()), has_room)
