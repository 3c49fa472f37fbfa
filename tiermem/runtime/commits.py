"""Commits: durable copies of a step, made beside the next one.

Owns the commit in flight, the mark that protects the last durable one, and the record of it. Does not capture the
record and does not know models. Guarantees that the pages of a commit are those of one step, that updates of the next
step do not begin before it is durable or has failed, and that its error reaches whoever asks next.

Why updates wait until it is durable, and not only until the mark is taken: the next step's writes go to the other slot
of each page, which the commit before holds until this one is durable. Two slots are enough that way. In every schedule
a forward or a backward lies between a commit and the next update, so there is little to wait for.

Several ranks commit all or none. Each makes its part durable under a name that does not count; when all have, each
publishes it; when all have, each removes the commit before. As long as a rank may lack the new commit, every rank has
the old one, and its bytes: a resume takes the newest that all have. What they do when one cannot publish its part is in
`commits_agreed.py`.

A commit that fails where it is not known whether it happened keeps both copies of every page. Before pages change
again, a look at the drive decides which commit holds, and the copies of the other are given up; as long as it cannot be
decided both are kept. Several ranks decide together and at once, so that none goes on from what another has given up.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from swap import Mark, SwapError, take_checksums
from tiermem.future import Future
from tiermem.interrupts import refuse_amid
from tiermem.optim.updater import Updater
from tiermem.pager.extents import DURABLE, page_name, to_rows
from tiermem.pager.pager import Pager
from tiermem.process import start_thread
from tiermem.runtime.commits_agreed import publish_everywhere
from tiermem.runtime.company import Company, refuse, together
from tiermem.runtime.storage import Storage

_PREPARE = "prepare a commit"


class PendingCommit:
    """A commit on its way to the disk. Made by `Runtime.commit`."""

    def __init__(self, pager: Pager) -> None:
        self.future: Future[None] = Future()
        self._ended: Future[None] = Future()  # also where it has failed: what a wait for this raises is no error of it
        self.future.add_done_callback(lambda _: self._ended.set_result(None))
        self.seen = False
        self._pager = pager
        self._begins = threading.Lock()

    def start(
        self,
        thread: str,
        prepare: Callable[[], Callable[[], None]],
        *,
        dropped: Callable[[], None],
        refused: Callable[[BaseException], BaseException],
    ) -> None:
        """Have a thread do what `prepare` returns, which ends `future`. What has begun goes on after an interrupt.

        Args:
            thread: its name.
            prepare: called first, here; may have others find this and wait for it.
            dropped: called where the work will not be done, before `future` ends.
            refused: makes the error that `future` ends with of the one of a system that has no thread.
        """
        try:
            work = prepare()
            # Not a daemon: a program that ends with a commit or a snapshot under way finishes it.
            refusal = start_thread(thread, self._do, work)
        except BaseException:
            if self._is_first():
                dropped()
                self.seen = True  # by whoever was interrupted
                self.future.set_result(None)
            raise
        if refusal is not None:
            dropped()
            self.future.set_exception(refused(refusal))

    def _do(self, work: Callable[[], None]) -> None:
        if self._is_first():
            work()

    def _is_first(self) -> bool:
        """Whether the other has not asked: the thread that does the work, or whoever was interrupted in starting it.

        The second to ask leaves it alone.
        """
        return self._begins.acquire(blocking=False)

    @property
    def done(self) -> bool:
        """Whether it is durable, or has failed."""
        return self.future.done()

    @property
    def failed(self) -> bool:
        """Whether it has failed; `wait`, and the next one, say how."""
        return self.done and self.future.exception() is not None

    def wait(self) -> None:
        """Wait until it is durable. Raises the error if it failed: the commit before holds then.

        swap.SwapError: the drive has failed, or is full; training may go on. Exception: an update of the step failed.
        TiermemError: a signal handler calls this in the middle of something that it may be waiting for.
        """
        refuse_amid()
        self.wait_ended()
        self.seen = True  # only now: whoever is interrupted before has been told nothing
        self.future.result()

    def wait_ended(self) -> None:
        """Wait until it is durable or has failed; whoever asks for the error gets it later."""
        if not self.done:
            self._pager.wait_for(self._ended)

    def finish(self) -> None:
        """Wait until it is durable or has failed. Raises its error unless somebody has been told."""
        self.wait_ended()
        self.raise_unseen()

    def raise_unseen(self) -> None:
        """Raise its error unless somebody has been told already."""
        if self.done and not self.seen:
            self.wait()


class Commits:
    """The commits of one run. Used from the compute thread."""

    def __init__(
        self, storage: Storage, updates: Updater, company: Company, *, origin: Mapping[str, Any] | None = None
    ) -> None:
        """`origin`: the record of the snapshot that the run began from."""
        self._storage = storage
        self._updates = updates
        self._company = company
        recovered = storage.recovered
        self._mark: Mark | None = recovered.mark if recovered else None
        self._generation = recovered.manifest.generation if recovered else 0
        self._record: Mapping[str, Any] | None = recovered.manifest.user if recovered else origin
        self._asked = self._record, 0  # of the latest commit asked for, durable or not; with `calls` of `start`
        self._last: PendingCommit | None = None
        self._doubtful: tuple[Mark, Mapping[str, Any]] | None = None  # a commit of which it is not known if it holds

    @property
    def record(self) -> Mapping[str, Any] | None:
        """The record of the last durable commit or of what the run resumed; None: there is none."""
        return self._record

    def extra_of(self, step: int, calls: int) -> Any:
        """What the caller keeps (extra.py) of the commit asked for last, or resumed, if it is of this state; else {}.

        `step`, `calls`: as that was given.
        """
        record, before = self._asked
        return record["extra"] if record is not None and (record["step"], before) == (step, calls) else {}

    @property
    def mark(self) -> Mark | None:
        """What protects the last durable commit; None: there is none in these directories."""
        return self._mark

    @property
    def hold_nothing(self) -> bool:
        """Whether there is no commit in these directories, and none that the other ranks may believe in."""
        return self._mark is None and not self._storage.store.in_doubt

    def start(self, record: Mapping[str, Any], *, calls: int = 0) -> PendingCommit:
        """Commit the updates queued so far, with `record`. Waits for an earlier commit, and raises its error once.

        `calls`: of optimizers' `step()`, which have updated something since the step that the record is of.
        """
        self.wait_open()
        if self._last is not None:
            self._last.raise_unseen()
        self._generation += 1
        self._asked = record, calls
        pending = PendingCommit(self._storage.pager)

        def prepare() -> Callable[[], None]:
            self._last = pending
            self._storage.rhythm.commit_begins()
            return partial(self._run, pending, record, self._generation, self._updates.unfinished())

        pending.start(
            "tiermem-commit",
            prepare,
            dropped=self._storage.rhythm.commit_written,
            refused=partial(refuse, self._company.committing, _PREPARE),
        )
        return pending

    def wait_open(self) -> None:
        """Wait until no commit is under way: pages may change. Raises nothing that a commit has met.

        If the last one left it in doubt which commit holds, it is found out now, where that can be.
        """
        if self._last is not None:
            self._last.wait_ended()
        if self._doubtful is not None:
            with contextlib.suppress(SwapError):  # both copies are kept, and the next commit says why
                self._resolve(*self._doubtful)

    def close(self) -> None:
        """Wait for the commit under way. Raises its error unless somebody has been told."""
        if self._last is not None:
            self._last.finish()

    def _run(
        self, pending: PendingCommit, record: Mapping[str, Any], generation: int, updates: Sequence[Future[None]]
    ) -> None:
        try:
            mark, full = together(
                self._company.committing,
                _PREPARE,
                lambda: self._prepare(record, generation, updates),
                undo=self._withdraw,
                doubt=lambda _, lost: self._storage.store.fail(lost),  # another rank may have heard all, and publish
            )
            if self._company.size > 1:
                self._publish_with_others(mark, full)
            else:
                self._publish_alone(mark, full)
        except BaseException as error:  # noqa: BLE001 - kept in the future for whoever asks
            pending.future.set_exception(error)
        else:
            pending.future.set_result(None)

    def _publish_alone(self, mark: Mark, record: Mapping[str, Any]) -> None:
        store = self._storage.store
        try:
            store.publish()
            store.retire()
        except BaseException:
            if store.in_doubt:
                self._doubtful = (mark, record)
            raise
        self._adopt(mark, record)

    def _publish_with_others(self, mark: Mark, record: Mapping[str, Any]) -> None:
        store = self._storage.store
        try:
            failure = publish_everywhere(store, self._company.committing)
        except BaseException as error:
            store.fail(error)  # both copies stay
            raise
        if failure is not None:  # it is nobody's, wherever its name may still lie
            self._storage.extents.generations.release(mark)
            raise failure
        self._record = record  # all have it, whatever becomes of the one before it here
        try:
            store.retire()
        except SwapError:  # tried again before pages change; as long as it fails, the next commit says why
            self._doubtful = (mark, record)
        else:
            self._adopt(mark, record)

    def _adopt(self, mark: Mark, record: Mapping[str, Any]) -> None:
        """This commit holds; the one before is gone."""
        if self._mark is not None:
            self._storage.extents.generations.release(self._mark)
        self._mark, self._record = mark, record

    def _resolve(self, mark: Mark, record: Mapping[str, Any]) -> None:
        """Find out whether a commit holds that raised an error. Raises SwapError if that is not to be known yet."""
        holds = self._storage.store.resolve() is not None
        self._doubtful = None
        if holds:
            self._adopt(mark, record)
        else:
            self._storage.extents.generations.release(mark)

    def _prepare(
        self, record: Mapping[str, Any], generation: int, updates: Sequence[Future[None]]
    ) -> tuple[Mark, Mapping[str, Any]]:
        """Wait for the updates of the step, and make it durable without committing it yet."""
        storage, generations = self._storage, self._storage.extents.generations
        try:
            for update in updates:
                update.result()
            self._updates.raise_failed()
            mark = storage.pager.start_save(DURABLE, generations.mark).result()
        finally:
            storage.rhythm.commit_written()
        try:
            take_checksums(storage.space, mark.copies.values())
            spares, plain = storage.extents.beside(mark)
            full = {**record, "spares": to_rows(spares), "plain": to_rows(plain)}
            storage.store.prepare(generation, mark.entries(page_name), full, space=storage.space)
        except BaseException:
            generations.release(mark)
            raise
        return mark, full

    def _withdraw(self, prepared: tuple[Mark, Mapping[str, Any]]) -> None:
        """Another rank could not prepare its part: the commit before holds."""
        self._storage.store.withdraw()  # it was not published, so nothing can have gone wrong with it
        self._storage.extents.generations.release(prepared[0])
