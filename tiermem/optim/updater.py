"""The queue of updates.

Owns the requested updates until they are done, and the errors of those that failed. Does not know when updates are
asked for (the schedules do) nor how one is carried out (the stream does). Guarantees that updates of one unit run in
the order they were asked for, one at a time, that an error fails that unit only and is raised to whoever waits for
it, and that no wait outlives the pager's loop.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tiermem.errors import InvariantError, TiermemError, again
from tiermem.future import Future
from tiermem.optim.kernels import Workspace
from tiermem.optim.stream import DeviceKernels, UnitStream, UpdateStatistics
from tiermem.optim.tiles import UnitState
from tiermem.optim.updates import UnitUpdate
from tiermem.pager.page import PageKey
from tiermem.pager.pager import Pager
from tiermem.pager.protection import Protection

# How many queued updates behind the running one the pager is told of, for it to read ahead and to keep what they need.
ANNOUNCED = 8


@dataclass(slots=True, eq=False)
class _Entry:
    update: UnitUpdate
    keys: Sequence[PageKey]
    future: Future[None]


class Updater:
    """Runs unit updates in order.

    `start`, `pending` and `hurry` never wait; the others may be called from any thread but the pager's loop.
    """

    def __init__(
        self,
        pager: Pager,
        units: Mapping[int, UnitState],
        *,
        depth: int = 2,
        workspace: Workspace | None = None,
        on_device: DeviceKernels | None = None,
    ) -> None:
        """Arguments as for `UnitStream`."""
        self._pager = pager
        self._stream = UnitStream(pager, units, depth=depth, workspace=workspace, on_device=on_device)
        self._lock = threading.Lock()
        # In order; a dictionary, so that moving a unit to the front does not depend on how many are queued.
        self._queue: OrderedDict[_Entry, None] = OrderedDict()
        self._unfinished: dict[int, list[_Entry]] = {}
        self._failed: dict[int, BaseException] = {}
        self._latest: UnitUpdate | None = None
        self._running = False
        self._walking = False  # whether the queue is being carried out; `_running`: or is about to be
        self._loop_thread: int | None = None
        self._closed = False

    def prepare(self) -> None:
        """Do what need only be done once: in the first step it would come on top of the activations.

        Raises TiermemError where no thread can be had for it; nothing is changed then, and it may be tried again.
        """
        self._stream.prepare()

    def start(self, update: UnitUpdate) -> None:
        """Queue an update; it fails, when its turn comes, if an earlier one of the same unit has.

        Does nothing if it is the one that was queued last: whoever is interrupted here cannot know whether it was, and
        says it again. Raises `TiermemError` after `close`.
        """
        if update.unit not in self._stream.units:
            raise InvariantError(f"unit {update.unit} has no optimizer state")
        entry = _Entry(update, self._stream.keys(update), Future())
        with self._lock:
            if self._closed:
                raise TiermemError("the updater is closed; a closed runtime cannot be used again")
            if update is self._latest:
                return
            # All of it or nothing: an interrupt comes where something is called, so nothing is called in between.
            unfinished = [*self._unfinished.get(update.unit, ()), entry]
            self._unfinished[update.unit] = unfinished
            self._queue[entry] = None
            self._latest = update
            must_run = not self._running
            self._running = True
        # At once, so that its gradient is not written to disk for want of anybody who needs it soon: who runs the queue
        # says so only when the loop comes to that, behind what the computation has asked for meanwhile.
        self._pager.extend_agenda(entry.keys)
        if must_run:
            self._start_running()

    def pending(self, unit: int) -> bool:
        """Whether an update of the unit is queued or running, or has failed, so that `wait` has something to say."""
        with self._lock:
            return unit in self._unfinished or unit in self._failed

    def hurry(self, unit: int) -> None:
        """Move the unit's queued updates to the front, in their order."""
        with self._lock:
            for entry in reversed(self._unfinished.get(unit, [])):
                if entry in self._queue:  # else it is running
                    self._queue.move_to_end(entry, last=False)

    def withdraw(self, protection: Protection) -> list[Future[None]]:
        """Give up the updates under this protection that have not begun; return a future for each that has.

        The futures end without an error in any case, as those of `unfinished`.
        """
        with self._lock:
            given_up = [entry for entry in self._queue if entry.update.protection is protection]
            for entry in given_up:
                del self._queue[entry]
        for entry in given_up:
            self._end(entry, None)
        with self._lock:
            begun = self._all_unfinished()
        return [entry.future for entry in begun if entry.update.protection is protection]

    def wait(self, unit: int) -> None:
        """Wait for the unit's updates. Raises the error of one that failed, every time."""
        with self._lock:
            entries = list(self._unfinished.get(unit, ()))
        self._wait_for(entries)
        with self._lock:
            error = self._failed.get(unit)
        if error is not None:
            raise again(error) from error

    def wait_all(self) -> None:
        """Wait for all updates. Raises the first error, after all have ended."""
        with self._lock:
            entries = self._all_unfinished()
        self._wait_for(entries)
        self.raise_failed()

    def unfinished(self) -> list[Future[None]]:
        """One future for each update queued or running; ends without an error in any case, see `raise_failed`."""
        with self._lock:
            entries = self._all_unfinished()
        self._take_up(entries)
        return [entry.future for entry in entries]

    def raise_failed(self) -> None:
        """Raise the first error of an update that failed, if any did; does not wait."""
        with self._lock:
            error = next(iter(self._failed.values()), None)
        if error is not None:
            raise again(error) from error

    def close(self) -> None:
        """Give up what is queued, wait for what is running; call it before the pager is closed. May be called twice.

        Whoever waits for an update that was given up gets a `TiermemError`; use `wait_all` first to finish them all.
        """
        with self._lock:
            self._closed = True
            given_up = list(self._queue)
            self._queue.clear()
            begun = [entry for entry in self._all_unfinished() if entry not in given_up]
        for entry in given_up:
            self._end(entry, TiermemError(f"closed before the update of unit {entry.update.unit} had begun"))
        try:
            for entry in begun:
                self._pager.wait_for(entry.future)
        finally:
            self._stream.close()

    def statistics(self) -> UpdateStatistics:
        """What has been done so far, and what is to be."""
        with self._lock:
            queued = len(self._all_unfinished())
        return replace(self._stream.done, queued=queued)

    # The queue

    def _all_unfinished(self) -> list[_Entry]:
        """The updates queued or running; the lock is held."""
        return [entry for entries in self._unfinished.values() for entry in entries]

    def _wait_for(self, entries: Sequence[_Entry]) -> None:
        if entries and threading.get_ident() == self._loop_thread:
            raise InvariantError("an update was waited for on the pager's loop, which has to carry it out")
        self._take_up(entries)
        for entry in entries:
            self._pager.wait_for(entry.future)

    def _take_up(self, entries: Sequence[_Entry]) -> None:
        """Somebody is about to wait for these: have the queue carried out if nobody does."""
        with self._lock:
            # Nobody has begun yet, or an interrupt came between queueing and starting; the latter cannot be told.
            abandoned = bool(entries and self._queue) and not self._walking
        if abandoned:
            self._start_running()

    def _start_running(self) -> None:
        try:
            task = self._pager.start_task(self._run_queue())
        except TiermemError as error:  # nobody else's, such as a signal handler's: the task may have been started
            self._end_all(error)
            raise
        task.add_done_callback(self._run_ended)

    def _run_ended(self, task: Future[None]) -> None:
        """The runner ends by itself only with an empty queue; otherwise the loop was stopped under it."""
        error = TiermemError("the pager ended before the queued updates") if task.cancelled() else task.exception()
        if error is not None:
            self._end_all(error)

    def _end_all(self, error: BaseException) -> None:
        with self._lock:
            entries = self._all_unfinished()
            self._queue.clear()
            self._running = self._walking = False
        for entry in entries:
            self._end(entry, error)

    def _end(self, entry: _Entry, error: BaseException | None) -> None:
        unit = entry.update.unit
        with self._lock:
            entries = self._unfinished.get(unit, [])
            if entry in entries:
                entries.remove(entry)
            if not entries:
                self._unfinished.pop(unit, None)
            if error is not None:
                self._failed.setdefault(unit, error)
        # Never with the error: whoever waits reads it from `_failed`, however many wait and however late.
        if not entry.future.done():
            entry.future.set_result(None)

    async def _run_queue(self) -> None:
        self._loop_thread = threading.get_ident()
        with self._lock:
            if self._walking:
                return  # it was started twice, see `_take_up`
            self._walking = True
        while True:
            with self._lock:
                if not self._queue:
                    self._running = self._walking = False
                    return
                entry, _ = self._queue.popitem(last=False)
                coming = [entry, *itertools.islice(self._queue, ANNOUNCED)]
                error = self._failed.get(entry.update.unit)
            if error is None:
                self._pager.set_agenda([announced.keys for announced in coming])
                try:
                    await self._stream.run(entry.update)
                except Exception as raised:  # noqa: BLE001 - recorded, and raised to whoever waits for the unit
                    error = raised
            self._end(entry, error)
