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

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from swap import Mark
from tiermem.checkpoint.draft import Draft
from tiermem.checkpoint.shard import MarkedPages, MarkedState
from tiermem.checkpoint.tensor_file import read_text
from tiermem.checkpoint.writing import Part, finish_snapshot, write_buffers, write_part
from tiermem.future import Future
from tiermem.memory.heap import trim_heap
from tiermem.optim.updater import Updater
from tiermem.pager.extents import DURABLE
from tiermem.runtime.blueprint import Blueprint
from tiermem.runtime.commits import Commits, PendingCommit
from tiermem.runtime.company import Company, refuse, together
from tiermem.runtime.storage import Storage

_SAVE = "write its pages back"


class PendingSnapshot(PendingCommit):
    """A snapshot on its way to the disk. Made by `Runtime.snapshot`; `wait` raises its error, training may go on."""


class Snapshots:
    """The snapshots of one run. Used from the compute thread."""

    def __init__(
        self,
        storage: Storage,
        updates: Updater,
        commits: Commits,
        blueprint: Blueprint,
        company: Company,
        *,
        second_copy: bool,
    ) -> None:
        """`second_copy`: whether there is room for two copies of each page."""
        self._storage = storage
        self._updates = updates
        self._commits = commits
        self._blueprint = blueprint
        self._company = company
        self._second_copy = second_copy
        self._last: PendingSnapshot | None = None
        self._marked: Future[Mark | None] = Future()

    def begin(self, path: str | os.PathLike[str], *, stall_seconds: float) -> Draft:
        """The folder of the next snapshot, one for all ranks; waits for the one before, and for a commit if need be.

        Commits and snapshots of several ranks speak over one line, so one follows the other.
        """
        self.close()
        company = self._company
        if company.size > 1:
            self._commits.wait_open()

        def first() -> Draft | None:
            return Draft(path, stall_seconds=stall_seconds) if company.rank == 0 else None

        def abandon(begun: Draft | None) -> None:
            if begun is not None:
                begun.abandon()

        draft = company.together("begin a snapshot", first, undo=abandon)
        try:
            name = company.computing.tell_text(draft.folder.name if draft else "")[0]
        except BaseException:
            abandon(draft)
            raise
        folder = Path(os.path.abspath(os.path.expanduser(os.fspath(path)))).parent / name
        return draft or Draft(path, stall_seconds=stall_seconds, folder=folder)

    def wait_line(self) -> None:
        """Wait until the ranks' line for commits is free."""
        if self._company.size > 1 and self._last is not None:
            self._last.wait_ended()

    def start(self, draft: Draft, record: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]) -> PendingSnapshot:
        """Write the state after the updates queued so far into what `begin` gave. `buffers` are copies."""
        pending, marked = PendingSnapshot(self._storage.pager), Future[Mark | None]()

        def prepare() -> Callable[[], None]:
            self._last, self._marked = pending, marked
            return partial(self._run, pending, marked, draft, record, buffers, self._updates.unfinished())

        def dropped() -> None:
            draft.abandon()
            marked.set_result(None)

        pending.start(
            "tiermem-snapshot",
            prepare,
            dropped=dropped,
            refused=partial(refuse, self._company.committing, _SAVE),
        )
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
            self._last.finish()

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

        def take_mark() -> Mark:
            for update in updates:
                update.result()
            self._updates.raise_failed()
            taken = self._storage.pager.start_save(DURABLE, generations.mark).result()
            marked.set_result(taken)
            return taken

        error: BaseException | None = None
        try:
            with draft:
                mark = together(self._company.committing, _SAVE, take_mark, undo=generations.release)
                self._write(draft, mark, record, buffers)
        except BaseException as raised:  # noqa: BLE001 - kept in the future for whoever asks
            error = raised
        trim_heap()  # what joining masters needed lies outside the budget, and would stay with this thread's heap
        if mark is not None:
            generations.release(mark)
        if not marked.done():
            marked.set_result(None)
        if error is not None:
            pending.future.set_exception(error)
        else:
            pending.future.set_result(None)

    def _write(self, draft: Draft, mark: Mark, record: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]) -> None:
        blueprint, line, rank = self._blueprint, self._company.committing, self._company.rank
        grid = self._company.grid
        state = MarkedState(MarkedPages(self._storage.space, mark), blueprint.shards, blueprint.states)
        count = sum(len(layout.slots) for layout in blueprint.layouts)
        known = line.tell([int(number in state.moments) for number in range(count)])
        state.moments = {number for number in range(count) if any(own[number] for own in known)}

        def write() -> None:
            part = Part((), ())  # of several copies of the model the first is written
            if grid.copies.rank == 0:
                part = write_part(draft, state, rank=grid.shards.rank)
            if rank == 0:
                parts.append(part)
            else:  # too long to be told: the first rank reads it, and takes it away
                told = {"part": part.to_text(), "random": record["random"][0], "extra": record["extra"]}
                draft.text(_part_file(rank), json.dumps(told))

        def finish() -> None:
            for other in range(1, self._company.size) if rank == 0 else ():
                found = json.loads(read_text(draft.folder / _part_file(other)))
                (draft.folder / _part_file(other)).unlink()
                parts.append(Part.from_text(found["part"]))
                states.append(found["random"])
                extras.append(found["extra"])
            if rank == 0:
                parts.append(write_buffers(draft, buffers))
                whole = {**record, "random": states}
                if any(extra != extras[0] for extra in extras):
                    whole["extras"] = extras
                finish_snapshot(draft, parts, whole, seconds=time.time(), world_size=grid.shards.size)

        parts: list[Part] = []
        states, extras = list(record["random"]), [record["extra"]]
        together(line, "write its part of the snapshot", write)
        together(line, "finish the snapshot", finish)


def _part_file(rank: int) -> str:
    """Where a rank leaves word of its part for the first one."""
    return f"rank-{rank:05d}.json"
