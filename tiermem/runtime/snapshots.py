"""Snapshots made beside training.

Owns the snapshot under way and the mark that protects its pages. Does not know the format (`checkpoint`) and captures
nothing. Guarantees that a snapshot is of one step, that updates go on beside it as long as two copies of a page are
enough and wait for it otherwise, that training goes on after its failure, and that its error reaches whoever asks next.

When two copies are enough. The snapshot's mark holds one copy of each page, the next updates write the other. A commit
holds a mark too: while it is of the same step, it holds the same copies. As soon as it is of another (an older commit,
or one made while the snapshot is being written), a third copy would be needed, and updates wait for the snapshot. So it
costs least just after a commit of the same step. With `Config(commits=False)` there is room for one copy, and updates
always wait; forward and backward do not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from swap import Mark
from tiermem.checkpoint.draft import Draft
from tiermem.checkpoint.shard import MarkedPages, MarkedShard
from tiermem.checkpoint.writing import finish_snapshot, write_buffers, write_part
from tiermem.memory.heap import trim_heap
from tiermem.optim.tiles import UnitState
from tiermem.pager.extents import DURABLE
from tiermem.runtime.commits import Commits, PendingCommit, UpdateWaiter
from tiermem.runtime.storage import Storage
from tiermem.zero3.layout import UnitLayout


class PendingSnapshot(PendingCommit):
    """A snapshot on its way to the disk. Made by `Runtime.snapshot`; `wait` raises its error, training may go on."""


class Snapshots:
    """The snapshots of one run. Used from the compute thread."""

    def __init__(
        self,
        storage: Storage,
        updates: UpdateWaiter,
        commits: Commits,
        layouts: Sequence[UnitLayout],
        states: Mapping[int, UnitState],
        *,
        second_copy: bool,
    ) -> None:
        """`second_copy`: whether there is room for two copies of each page."""
        self._storage = storage
        self._updates = updates
        self._commits = commits
        self._layouts = layouts
        self._states = states
        self._second_copy = second_copy
        self._last: PendingSnapshot | None = None
        self._marked: Future[Mark | None] = Future()

    def start(self, draft: Draft, record: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]) -> PendingSnapshot:
        """Write the state after the updates queued so far. Waits for an earlier snapshot, and raises its error once.

        `buffers` are copies.
        """
        self.close()
        pending = self._last = PendingSnapshot(self._storage.pager)
        self._marked = Future()
        arguments = (pending, self._marked, draft, record, buffers, self._updates.unfinished())
        # Not a daemon: a program that ends with a snapshot under way finishes it.
        threading.Thread(target=self._run, args=arguments, name="tiermem-snapshot").start()
        return pending

    def wait_open(self) -> None:
        """Wait until pages may change, for commits too. Raises nothing that a commit or a snapshot has met."""
        self._commits.wait_open()
        pending = self._last
        if pending is None or pending.done:
            return
        mark = self._storage.pager.wait_for(self._marked)
        held = self._commits.mark
        shared = mark is not None and (held is None or held.copies == mark.copies)
        if not (self._second_copy and shared):
            pending.wait_ended()

    def close(self) -> None:
        """Wait for the snapshot under way. Raises its error unless somebody has been told."""
        if self._last is not None:
            self._last.wait_ended()
            self._last.raise_unseen()

    def _run(
        self,
        pending: PendingSnapshot,
        marked: Future[Mark | None],
        draft: Draft,
        record: Mapping[str, Any],
        buffers: Mapping[str, torch.Tensor],
        updates: Sequence[Future[None]],
    ) -> None:
        generations, mark = self._storage.extents.generations, None
        error: BaseException | None = None
        try:
            with draft:
                for update in updates:
                    update.result()
                self._updates.raise_failed()
                mark = self._storage.pager.start_save(DURABLE, generations.mark).result()
                marked.set_result(mark)
                shard = MarkedShard(MarkedPages(self._storage.space, mark), self._layouts, self._states)
                parts = [write_part(draft, shard), write_buffers(draft, buffers)]
                finish_snapshot(draft, parts, record, seconds=time.time())
        except BaseException as raised:  # noqa: BLE001 - kept in the future for whoever asks
            error = raised
        trim_heap()  # what joining masters needed lies outside the budget, and would stay with this thread's heap
        if mark is not None:
            generations.release(mark)
        else:
            marked.set_result(None)
        if error is not None:
            pending.future.set_exception(error)
        else:
            pending.future.set_result(None)
