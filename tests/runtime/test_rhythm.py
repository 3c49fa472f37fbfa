"""Whether what is written will be committed: the guess, and what a run with a wrong one has to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles_combinations import half_of
from doubles_commit import Training, check_equal, make_config, undisturbed
from hypothesis import given
from hypothesis import strategies as st

import swap
from tiermem.pager.extents import Extents
from tiermem.pager.page import Kind, PageKey
from tiermem.runtime import commits
from tiermem.runtime.rhythm import CommitRhythm


class Steps:
    """A run that only counts."""

    def __init__(self) -> None:
        self.done = 0
        self.rhythm = CommitRhythm(lambda: self.done)

    def commit(self) -> None:
        self.rhythm.commit_begins()
        assert self.rhythm.likely()
        self.rhythm.commit_written()

    def take(self, count: int) -> list[bool]:
        """So many steps; what was likely in each."""
        found = []
        for _ in range(count):
            found.append(self.rhythm.likely())
            self.done += 1
        return found


@given(st.integers(1, 500), st.integers(2, 5))
def test_what_a_regular_commit_is_of_is_known_beforehand(interval: int, commits_made: int) -> None:
    run = Steps()
    run.take(interval)
    run.commit()
    for _ in range(commits_made):
        likely = run.take(interval)
        assert likely[-1]
        assert sum(likely) <= interval // 8 + 1
        # Updates carried out under the next forward are of this step, too.
        assert run.rhythm.likely()
        run.commit()


@given(st.integers(8, 500), st.data())
def test_a_commit_may_come_an_eighth_early_or_late(interval: int, draw: st.DataObject) -> None:
    run = Steps()
    run.take(interval)
    run.commit()
    margin = interval // 8
    assert run.take(draw.draw(st.integers(interval - margin, interval + margin)))[-1]


@given(st.integers(1, 100))
def test_a_run_that_does_not_commit_any_more_stops_taking_checksums(interval: int) -> None:
    run = Steps()
    run.take(interval)
    run.commit()
    assert not any(run.take(4 * interval)[interval + interval // 8 + 1 :])


def test_a_run_that_never_commits_takes_those_of_its_beginning_only() -> None:
    assert Steps().take(100) == [True, True, *[False] * 98]


def test_where_others_wait_for_a_commit_any_step_may_be_committed() -> None:
    rhythm = CommitRhythm(lambda: 100, rereads=False)
    assert rhythm.likely()
    rhythm.commit_begins()
    rhythm.commit_written()
    assert rhythm.likely()


@pytest.fixture
def read_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that each commit has read because nobody had expected it."""
    found: list[int] = []
    take: Callable[..., int] = swap.take_checksums

    def note(space: swap.SwapSpace, copies: Any) -> int:
        found.append(take(space, copies))
        return found[-1]

    monkeypatch.setattr(commits, "take_checksums", note)
    return found


@pytest.mark.parametrize("update", ["step", "forward", "backward", "auto"])
def test_committing_every_step_reads_nothing_again(tmp_path: Path, read_again: list[int], update: str) -> None:
    training = Training(make_config(tmp_path, update=update))
    for _ in range(5):
        training.step()
        training.commit().wait()
    training.close()
    assert read_again == [0] * 5


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_every_fifth_step_is_learnt_from_the_first_commit(tmp_path: Path, read_again: list[int], update: str) -> None:
    training = Training(make_config(tmp_path, update=update))
    for _ in range(3):
        for _ in range(5):
            training.step()
        training.commit().wait()
    training.close()
    assert read_again[0] > 0
    assert read_again[1:] == [0, 0]


@pytest.mark.parametrize(("update", "memory"), half_of(["step", "forward", "backward", "auto"], ["72KiB", "2MiB"]))
def test_commits_that_nobody_expected_resume_bit_for_bit(
    tmp_path: Path, read_again: list[int], update: str, memory: str
) -> None:
    settings: dict[str, Any] = {"update": update, "host_memory": memory}
    losses, state = undisturbed(tmp_path / "plain", 15)  # in any schedule and budget
    (tmp_path / "run").mkdir()
    config = make_config(tmp_path / "run", verify="resume", **settings)
    found: list[float] = []
    training = Training(config)
    for number in range(1, 16):
        found.append(training.step())
        if number in (4, 6, 11):
            training.commit()
        if number in (6, 11):
            training.close()
            training = Training(config, resume=True)
    check_equal(training.state(), state)
    training.close()
    assert found == losses
    if memory == "72KiB":  # what stays in memory is written for the commit, with its checksum
        assert all(read_again)


def flip_a_bit(directory: Path, offset: int) -> None:
    with open(next(directory.glob("*.swapfile")), "r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize(
    ("likely", "compare", "taken"),
    [(False, False, set()), (True, False, {Kind.PARAM, Kind.STATE}), (False, True, set(Kind)), (True, True, set(Kind))],
)
def test_whose_checksum_is_taken(tmp_path: Path, likely: bool, compare: bool, taken: set[Kind]) -> None:
    with swap.SwapSpace.open([tmp_path], name="r0", nbytes=1 << 20) as space:
        extents = Extents(space, likely=lambda: likely, compare=compare)
        assert {kind for kind in Kind if extents.takes_checksum(PageKey(0, kind, 0))} == taken


def test_what_is_damaged_after_such_a_commit_is_found(tmp_path: Path, read_again: list[int]) -> None:
    training = Training(make_config(tmp_path, host_memory="72KiB"))
    for _ in range(6):
        training.step()
    training.commit().wait()
    assert read_again[0] > 0
    mark = training.runtime._house.commits.mark
    pieces = [copy.extent.pieces[0] for copy in mark.copies.values()]
    training.close()
    for piece in (pieces[0], pieces[-1]):
        flip_a_bit(tmp_path, piece.offset + 100)
        with pytest.raises(swap.ChecksumError, match=f"offset {piece.offset}"):
            Training(make_config(tmp_path, host_memory="72KiB"), resume=True)
        flip_a_bit(tmp_path, piece.offset + 100)
    Training(make_config(tmp_path, host_memory="72KiB"), resume=True).close()


def test_bytes_that_cannot_be_read_again_are_an_error_of_the_commit_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, state = undisturbed(tmp_path / "plain", 9, host_memory="72KiB")
    (tmp_path / "run").mkdir()
    training = Training(make_config(tmp_path / "run", host_memory="72KiB"))
    found = [training.step() for _ in range(6)]

    def fail(*_: object) -> int:
        raise swap.SwapIOError("read", "run/r0.swapfile", offset=0, length=4096, errno=5)

    with monkeypatch.context() as patched:
        patched.setattr(commits, "take_checksums", fail)
        with pytest.raises(swap.SwapIOError):
            training.commit().wait()
    assert training.runtime.committed is None
    found += [training.step() for _ in range(2)]
    training.commit().wait()
    training.close()
    training = Training(make_config(tmp_path / "run", host_memory="72KiB"), resume=True)
    found.append(training.step())
    check_equal(training.state(), state)
    training.close()
    assert found == losses
