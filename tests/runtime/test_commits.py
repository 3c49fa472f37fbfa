"""One run's commits on a drive and a line that fail as told: what holds, what is kept, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from swap import SwapError
from swap.extents import Extent, Piece
from tiermem.errors import TiermemError
from tiermem.pager.extents import to_rows
from tiermem.pager.page import Kind, PageKey
from tiermem.runtime import commits
from tiermem.runtime.commits import Commits, PendingCommit
from tiermem.runtime.company import Company, alone
from tiermem.zero3.collectives import SingleProcess
from tiermem.zero3.grid import one_copy

LOST = SwapError("the drive says no")
SPARE = [(PageKey(0, Kind.PARAM), Extent((Piece(0, 4096, 4096),), 1))]
PLAIN = [(PageKey(1, Kind.GRAD), Extent((Piece(0, 8192, 4096),), 0))]


class Drive:
    """A store of which `fails` names the calls that fail, each once; what was called is in `calls`."""

    def __init__(self, *fails: str) -> None:
        self.fails, self.in_doubt, self.holds = list(fails), False, True
        self.calls: list[str] = []
        self.prepared: list[tuple[int, Any]] = []

    def _call(self, name: str, *, doubt: bool) -> None:
        self.calls.append(name)
        if name in self.fails:
            self.fails.remove(name)
            self.in_doubt = self.in_doubt or doubt
            raise LOST

    def prepare(self, generation: int, _: Any, record: Any, **__: Any) -> None:
        self.prepared.append((generation, record))
        self._call("prepare", doubt=False)

    def publish(self) -> None:
        self._call("publish", doubt=True)

    def retire(self) -> None:
        self._call("retire", doubt=True)

    def is_published(self) -> bool:
        return "publish" in self.calls and not self.in_doubt

    def withdraw(self) -> bool:
        self.calls.append("withdraw")
        self.in_doubt = False
        return True

    def resolve(self) -> object | None:
        self._call("resolve", doubt=True)
        self.in_doubt = False
        return self if self.holds else None

    def fail(self, _: BaseException) -> None:
        self.in_doubt = True


class Line(SingleProcess):
    """The talk with one other rank, which answers `said` in turn; an error is raised in its place."""

    size = 2

    def __init__(self, *said: Any) -> None:
        self.said = list(said)

    def _answer(self, word: Any) -> list[Any]:
        answer = self.said.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return [word, answer]

    def tell_text(self, text: str) -> list[str]:
        return self._answer(text)

    def tell(self, numbers: Any) -> list[list[int]]:
        return self._answer(list(numbers))


class Marks:
    """The marks that are live."""

    def __init__(self) -> None:
        self.live: list[Any] = []

    def mark(self) -> Any:
        self.live.append(SimpleNamespace(copies={}, entries=lambda _: []))
        return self.live[-1]

    def release(self, mark: Any) -> None:
        self.live.remove(mark)


class Pager:
    """Who waits has the `work` of other threads done meanwhile; `interrupts` waits end before that."""

    def __init__(self, interrupts: int = 0) -> None:
        self.interrupts = interrupts
        self.work: list[Callable[[], None]] = []

    def start_save(self, _: Any, then: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(then())
        return future

    def wait_for(self, future: Future[Any]) -> Any:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        while self.work:
            self.work.pop(0)()
        return future.result()


class Run:
    """Commits that are made when somebody waits. `origin`, `resumed`: a record that the run begins from."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        drive: Drive,
        line: Line | None = None,
        *,
        origin: Any = None,
        resumed=None,
    ) -> None:
        def start(_: str, work: Any, *arguments: Any) -> None:
            self.pager.work.append(lambda: work(*arguments))

        monkeypatch.setattr(commits, "start_thread", start)
        monkeypatch.setattr(commits, "take_checksums", lambda *_: drive.calls.append("take checksums"))
        self.rhythm: list[str] = []
        self.marks, self.failed, self.pager = Marks(), None, Pager()
        self.updates: list[Any] = []
        manifest = SimpleNamespace(generation=7, user=resumed)
        storage: Any = SimpleNamespace(
            recovered=SimpleNamespace(mark=self.marks.mark(), manifest=manifest) if resumed else None,
            store=drive,
            space=None,
            pager=self.pager,
            rhythm=SimpleNamespace(
                commit_begins=lambda: self.rhythm.append("begins"), commit_written=lambda: self.rhythm.append("written")
            ),
            extents=SimpleNamespace(generations=self.marks, beside=lambda _: (SPARE, PLAIN)),
        )
        company = alone() if line is None else Company(one_copy(line), line)
        self.commits = Commits(storage, self, company, origin=origin)

    def unfinished(self) -> list[Any]:
        return self.updates

    def raise_failed(self) -> None:
        if self.failed is not None:
            raise self.failed

    def commit(self, step: int) -> str:
        """Commit a step; what became of it."""
        try:
            self.commits.start({"step": step}).wait()
        except Exception as error:  # noqa: BLE001 - told apart by the test
            return str(error)
        return ""

    @property
    def held(self) -> int:
        return self.commits.record["step"] if self.commits.record is not None else 0


def test_an_interrupted_wait_has_told_nobody() -> None:
    pager: Any = Pager(interrupts=1)
    pending = PendingCommit(pager)
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    pending.future.set_exception(LOST)
    pending.wait_ended()
    with pytest.raises(SwapError):
        pending.raise_unseen()
    pending.raise_unseen()


def test_a_commit_that_fails_as_its_wait_is_interrupted_is_told_of_once_more() -> None:
    pager: Any = Pager()
    pending = PendingCommit(pager)

    def fail() -> None:
        pending.future.set_exception(LOST)
        raise KeyboardInterrupt

    pager.work.append(fail)
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    with pytest.raises(SwapError, match="the drive says no"):
        pending.raise_unseen()
    pending.raise_unseen()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("then", ["start", "close"])
def test_what_nobody_has_asked_for_is_raised_by_the_next_and_only_once(
    monkeypatch: pytest.MonkeyPatch, then: str, waits: bool
) -> None:
    run = Run(monkeypatch, Drive("prepare"))
    pending = run.commits.start({"step": 1})
    if waits:  # pages may change, and whoever changes them is not told
        run.commits.wait_open()
        assert pending.done
    with pytest.raises(SwapError):
        run.commits.start({"step": 2}) if then == "start" else run.commits.close()
    assert run.rhythm == ["begins", "written"]
    assert run.commit(2) == ""
    assert (run.held, len(run.marks.live)) == (2, 1)
    run.commits.close()


def test_an_update_that_failed_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive()
    run = Run(monkeypatch, drive)
    run.failed = ValueError("an update failed")
    assert run.commit(1) == "an update failed"
    assert (drive.calls, run.marks.live, run.rhythm) == ([], [], ["begins", "written"])


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("at", ["publish", "retire"])
def test_in_doubt_both_are_kept_until_it_is_known_which_holds(
    monkeypatch: pytest.MonkeyPatch, at: str, holds: bool
) -> None:
    drive = Drive()
    run = Run(monkeypatch, drive)
    assert run.commits.hold_nothing
    drive.fails, drive.holds = [at, "resolve"], holds
    assert run.commit(1) == str(LOST)
    assert not run.commits.hold_nothing, "the first commit may be there"
    run.commits.wait_open()  # it is not known yet
    assert (run.held, len(run.marks.live)) == (0, 1)
    run.commits.wait_open()
    assert (run.held, len(run.marks.live)) == (int(holds), int(holds))
    assert run.commits.hold_nothing is not holds
    run.commits.wait_open()
    assert drive.calls.count("resolve") == 2, "nothing is in doubt any more"
    assert run.commit(2) == ""
    assert (run.held, len(run.marks.live)) == (2, 1)
    assert [generation for generation, _ in drive.prepared] == [1, 2]


def test_a_commit_is_of_all_updates_and_has_what_a_resume_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive()
    run = Run(monkeypatch, drive)
    run.updates = [SimpleNamespace(result=lambda: drive.calls.append("wait for an update"))] * 2
    assert run.commit(1) == ""
    assert drive.calls[:2] == ["wait for an update"] * 2
    assert drive.calls[2:] == ["take checksums", "prepare", "publish", "retire"]
    assert drive.prepared == [(1, {"step": 1, "spares": to_rows(SPARE), "plain": to_rows(PLAIN)})]


def test_a_run_begins_with_the_record_it_goes_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Run(monkeypatch, Drive(), origin={"step": 3})
    assert (fresh.held, fresh.commits.hold_nothing) == (3, True)
    drive = Drive()
    run = Run(monkeypatch, drive, origin={"step": 3}, resumed={"step": 5})
    assert (run.held, run.marks.live, run.commits.hold_nothing) == (5, [run.commits.mark], False)
    assert run.commit(6) == ""
    assert (run.held, run.marks.live) == (6, [run.commits.mark]), "the one before is given up"
    assert drive.prepared[0][0] == 8


# Several ranks. The other one says: what kept it from preparing, what kept it from publishing, and what it has.


def test_what_another_rank_could_not_prepare_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive()
    run = Run(monkeypatch, drive, Line("OSError: full", "", ""))
    assert run.commit(1) == "another rank could not prepare a commit: rank 1: OSError: full"
    assert (drive.calls[-2:], run.held, run.marks.live) == (["prepare", "withdraw"], 0, [])
    assert run.commit(2) == ""
    assert (run.held, len(run.marks.live)) == (2, 1)


@pytest.mark.parametrize("said", [[], [""]], ids=["preparing", "publishing"])
def test_when_the_ranks_lose_each_other_both_are_kept(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """Another rank may have heard all, and have the new commit."""
    drive = Drive()
    run = Run(monkeypatch, drive, Line("", "", *said, TiermemError("rank 1 is gone")))
    assert run.commit(1) == ""
    assert run.commit(2) == "rank 1 is gone"
    assert (run.held, len(run.marks.live)) == (1, 2)
    assert drive.in_doubt
    assert not run.commits.hold_nothing


def test_what_another_rank_could_not_publish_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive()
    run = Run(monkeypatch, drive, Line("", "", "", "OSError: no", [0], [1]))
    assert run.commit(1) == ""
    assert run.commit(2) == "another rank could not publish a commit: rank 1: OSError: no"
    assert drive.calls[-1] == "withdraw"
    assert (run.held, len(run.marks.live)) == (1, 1)


def test_a_commit_that_all_have_holds_though_the_one_before_is_not_gone_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive()
    run = Run(monkeypatch, drive, Line("", "", "", ""))
    assert run.commit(1) == ""
    drive.fails = ["retire"]
    assert run.commit(2) == ""
    assert (run.held, len(run.marks.live)) == (2, 2), "the one before may come back, and has its bytes"
    run.commits.wait_open()
    assert (run.held, len(run.marks.live)) == (2, 1)


def test_where_no_thread_may_be_started_nothing_is_written_for_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive()
    run = Run(monkeypatch, drive)
    monkeypatch.setattr(commits, "start_thread", lambda *_: TiermemError("no thread"))
    assert run.commit(1) == "no thread"
    assert (drive.calls, run.rhythm) == ([], ["begins", "written"])


def test_the_other_ranks_are_told_that_no_thread_may_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line("")
    run = Run(monkeypatch, Drive(), line)
    monkeypatch.setattr(commits, "start_thread", lambda *_: TiermemError("no thread"))
    assert run.commit(1) == "no thread"
    assert line.said == [], "they wait for a word"
