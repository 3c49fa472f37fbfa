"""The decision of several ranks about one commit, with every fault of drives and talk: no two ranks ever disagree."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
from doubles_combinations import number_of
from hypothesis import given, settings
from hypothesis import strategies as st

from swap import SwapError
from tiermem.errors import TiermemError
from tiermem.runtime.commits_agreed import publish_everywhere
from tiermem.zero3.collectives import SingleProcess

ALL, NOBODY, OPEN = "all have it", "nobody has it", "not known"
WAIT = 30


@dataclass
class Part:
    """A rank's part on a drive. `may_have`: what a later start may find there."""

    publishing: str  # "well", "not" (and an error), "happened" (and an error), "unknowable", "late"
    taking_back: bool  # whether it succeeds
    may_have: set[bool] = field(default_factory=lambda: {False})

    def publish(self) -> None:
        outcomes = {"well": {True}, "not": {False}, "happened": {True}}
        self.may_have = outcomes.get(self.publishing, {True, False})
        if self.publishing != "well":
            raise SwapError(f"the drive says: {self.publishing}")

    def is_published(self) -> bool:
        return self.publishing in ("well", "happened")

    def withdraw(self) -> bool:
        if self.publishing == "not":
            return True
        if self.publishing in ("unknowable", "late"):
            return False
        self.may_have = {False} if self.taking_back else {True, False}
        return self.taking_back


class Line(SingleProcess):
    """The ranks' line of talk, between threads; from the talk number `breaks` on it is broken.

    `reached`: the ranks that still get the answer of that one talk: an exchange may end for some and not for others.
    """

    def __init__(self, size: int, breaks: int, reached: set[int]) -> None:
        self._size, self._breaks, self._reached = size, breaks, reached
        self._barrier = threading.Barrier(size)
        self._said: dict[int, object] = {}

    def for_rank(self, rank: int) -> Ear:
        return Ear(self, rank)

    def talk(self, rank: int, number: int, word: object) -> list[object]:
        if number > self._breaks:
            raise TiermemError("the line is broken")
        self._said[rank] = word
        self._barrier.wait(WAIT)
        said = [self._said[each] for each in range(self._size)]
        self._barrier.wait(WAIT)
        if number == self._breaks and rank not in self._reached:
            raise TiermemError("the line is broken")
        return said


class Ear(SingleProcess):
    def __init__(self, line: Line, rank: int) -> None:
        self._line, self._rank, self._count = line, rank, 0

    def _talk(self, word: object) -> list[object]:
        self._count += 1
        return self._line.talk(self._rank, self._count, word)

    def tell(self, numbers):
        return self._talk(list(numbers))

    def tell_text(self, text):
        return self._talk(text)


def decide(parts: list[Part], *, breaks: int = 99, reached: frozenset[int] = frozenset()) -> list[str]:
    """What each rank believes in the end."""
    line = Line(len(parts), breaks, set(reached))
    believed = ["never ended"] * len(parts)

    def rank(number: int) -> None:
        try:
            error = publish_everywhere(parts[number], line.for_rank(number))
            believed[number] = ALL if error is None else NOBODY
        except TiermemError:
            believed[number] = OPEN

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    return believed


PART = st.builds(Part, st.sampled_from(["well", "not", "happened", "unknowable", "late"]), st.booleans())


@settings(max_examples=number_of(150, 400))
@given(st.lists(PART, min_size=2, max_size=4), st.integers(1, 4), st.frozensets(st.integers(0, 3)))
def test_no_two_ranks_disagree_and_nothing_is_given_up_that_a_resume_may_need(parts, breaks, reached):
    believed = decide(parts, breaks=breaks, reached=reached)
    assert set(believed) <= {ALL, NOBODY, OPEN}
    assert not {ALL, NOBODY} <= set(believed)
    some_start_takes_the_new = all(True in part.may_have for part in parts)
    some_start_takes_the_old = any(False in part.may_have for part in parts)
    if ALL in believed:  # those ranks overwrite the commit before
        assert not some_start_takes_the_old
    if NOBODY in believed:  # those ranks overwrite the new one
        assert not some_start_takes_the_new


@settings(max_examples=number_of(100, 200))
@given(st.lists(PART, min_size=2, max_size=4))
def test_as_long_as_the_ranks_can_talk_they_decide_if_one_can_be_sure(parts):
    believed = set(decide(parts))
    assert len(believed) == 1
    there = [part.publishing in ("well", "happened") for part in parts]
    sure = any(part.publishing == "not" or (here and part.taking_back) for part, here in zip(parts, there, strict=True))
    assert believed == {ALL if all(there) else NOBODY if sure else OPEN}


def test_each_is_told_its_own_error_or_whose_it_was():
    parts = [Part("well", True), Part("not", True)]
    line = Line(2, 99, set())
    found: dict[int, BaseException | None] = {}
    threads = [
        threading.Thread(
            target=lambda rank=rank: found.update({rank: publish_everywhere(parts[rank], line.for_rank(rank))})
        )
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert isinstance(found[0], TiermemError)
    assert str(found[0]) == "another rank could not publish a commit: rank 1: SwapError: the drive says: not"
    assert isinstance(found[1], SwapError)


def test_what_nobody_can_be_sure_of_is_an_error_that_says_why():
    with pytest.raises(TiermemError, match=r"it is not known .* rank 0: SwapError: the drive says: unknowable"):
        publish_everywhere(Part("unknowable", True), SingleProcess())
