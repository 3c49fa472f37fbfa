"""What ranks do together: in one order, each told when they are about to do different things, nobody waits for ever."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tiermem.errors import TiermemError
from tiermem.stats import Counters
from tiermem.timeline import Timeline
from tiermem.zero3 import conductor
from tiermem.zero3.collectives import SingleProcess
from tiermem.zero3.conductor import Act, Conductor, Operation
from tiermem.zero3.grid import one_copy

WAIT = 20
MADE: list[Rank] = []  # by the test that runs


class Line:
    """The talk of several ranks, each on a thread of its own; who waits for one that has left gets an error."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.left: dict[int, str | None] = {}
        self._said: dict[int, dict[int, Any]] = {}
        self._heard = threading.Condition()

    def talk(self, rank: int, number: int, word: Any) -> list[Any]:
        with self._heard:
            said = self._said.setdefault(number, {})
            said[rank] = word
            self._heard.notify_all()
            assert self._heard.wait_for(lambda: len(said) == self.size or self.left, WAIT), "a rank waits for ever"
            if len(said) < self.size:
                raise TiermemError(f"a rank is missing: {self.left}")
            return [said[each] for each in range(self.size)]

    def leave(self, rank: int, reason: str | None) -> None:
        with self._heard:
            self.left.setdefault(rank, reason)
            self._heard.notify_all()


class Ear(SingleProcess):
    """One rank's end of the line."""

    def __init__(self, line: Line, rank: int) -> None:
        self._line, self._rank, self._talks = line, rank, 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._line.size

    def tell(self, numbers: Any) -> list[Any]:
        self._talks += 1
        return self._line.talk(self._rank, self._talks, list(numbers))

    def tell_text(self, text: str) -> list[Any]:
        self._talks += 1
        return self._line.talk(self._rank, self._talks, text)

    def close(self, reason: str | None = None) -> None:
        self._line.leave(self._rank, reason)


class Rank:
    """A rank and what it has done. `play`: its part; what that raises is kept."""

    def __init__(self, line: Line, number: int) -> None:
        self.number = number
        self.done: list[Any] = []
        self.served: list[tuple[int, Any, list[bool]]] = []
        self.undone: list[Any] = []
        self.error: BaseException | None = None
        self.counters = Counters()
        self.begin: Callable[[], None] = lambda: self.began.append(threading.current_thread().name)
        self.began: list[str] = []
        self.conductor = Conductor(
            one_copy(Ear(line, number)), ["first", "second"], Timeline(0), self.counters, lambda: self.begin()
        )
        MADE.append(self)
        self.conductor.connect(lambda unit, bucket, senders: self.served.append((unit, bucket, list(senders))))

    def do(self, act: Act, unit: int = -1, **further: Any) -> Any:
        return self.conductor.run(self.operation(act, unit, **further))

    def operation(self, act: Act, unit: int = -1, **further: Any) -> Operation[Any]:
        def action(prepared: Any) -> Any:
            self.done.append((act, unit))
            return prepared

        settings = {"prepare": lambda: "prepared", "action": action, "undo": self.undone.append, **further}
        return Operation(act, unit, **settings)


@pytest.fixture(autouse=True)
def _all_leave() -> Iterator[None]:
    """The threads of conductors that a test leaves open are not there in the tests after it."""
    MADE.clear()
    yield
    for rank in MADE:
        rank.conductor.close(TiermemError("the test is over"))
    assert not [thread for thread in threading.enumerate() if thread.name == "tiermem-ranks"]


def together(*parts: Callable[[Rank], Any]) -> list[Rank]:
    """Have each rank play its part."""
    line = Line(len(parts))
    ranks = [Rank(line, number) for number in range(len(parts))]

    def play(rank: Rank, part: Callable[[Rank], Any]) -> None:
        try:
            part(rank)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            rank.error = error

    threads = [threading.Thread(target=play, args=each) for each in zip(ranks, parts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
    return ranks


def fail(error: BaseException) -> Callable[..., Any]:
    def failing(*_: Any) -> Any:
        raise error

    return failing


def test_all_do_the_same_in_the_order_in_which_it_was_asked_for():
    def part(rank: Rank) -> None:
        queued = [rank.conductor.start(rank.operation(Act.GATHER, unit)) for unit in (0, 1, 0)]
        rank.do(Act.SETTLE)
        assert [each.result() for each in queued] == ["prepared"] * 3
        assert rank.conductor.announced() == 4

    for rank in together(part, part, part):
        assert rank.error is None
        assert rank.began == ["tiermem-ranks"]
        assert rank.done == [(Act.GATHER, 0), (Act.GATHER, 1), (Act.GATHER, 0), (Act.SETTLE, -1)]
        assert rank.undone == []


def test_what_is_on_its_way_is_waited_for_before_announcements_are_counted():
    """By such a count ranks agree whether there is anything to line up for: one of them did, and one did not."""
    asked, counts = threading.Event(), dict[int, int]()

    def part(rank: Rank) -> None:
        rank.conductor.start(rank.operation(Act.GATHER, 0, prepare=lambda: asked.wait(WAIT)))
        if rank.number == 1:
            threading.Timer(0.1, asked.set).start()
        counts[rank.number] = rank.conductor.announced()

    assert [rank.error for rank in together(part, part)] == [None, None]
    assert counts == {0: 1, 1: 1}


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ((Act.GATHER, 0), (Act.GATHER, 1), r"rank 0 gathers unit 0 \(first\), rank 1 gathers unit 1 \(second\)"),
        ((Act.STEP, -1), (Act.DROP, -1), r"rank 0 steps .*rank 1 forgets gradients .*the same order"),
        ((Act.GATHER, 1), (Act.CLOSE, -1), r"rank 1 closes its runtime.*the same number of steps"),
    ],
)
def test_ranks_that_do_different_things_are_all_told_who_does_what(one, other, told):
    for rank in together(lambda rank: rank.do(*one), lambda rank: rank.do(*other)):
        with pytest.raises(TiermemError, match=told):
            raise rank.error
        assert rank.done == []
        assert rank.undone == ["prepared"]
        with pytest.raises(TiermemError, match=told):
            rank.do(Act.SETTLE)
        assert rank.undone == ["prepared", None], "what was not prepared is not given back"


def test_where_no_thread_can_be_started_nothing_is_done_then_nor_later(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("tiermem-ranks"):
            raise RuntimeError("can't start new thread")
        start(thread)

    def part(rank: Rank) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(TiermemError, match=r"no thread can be started for tiermem-ranks .*ulimit -u"):
                rank.do(Act.GATHER, 0)
        rank.do(Act.SETTLE)

    (rank,) = together(part)
    with pytest.raises(TiermemError, match="no thread can be started"):
        raise rank.error
    assert rank.done == []
    assert rank.undone == [None, None]
    rank.conductor.close()


def test_what_has_to_be_alike_is_compared_in_words():
    parts = [lambda rank, words=words: rank.do(Act.STEP, alike=words) for words in ("lr=1", "lr=2", "")]
    for rank in together(*parts):
        with pytest.raises(TiermemError, match="rank 0 with lr=1; rank 1 with lr=2; rank 2 with nothing yet"):
            raise rank.error
        assert rank.done == []


def test_a_rank_that_cannot_prepare_raises_its_error_and_the_others_its_name():
    mine = ValueError("no room")
    failed, other = together(
        lambda rank: rank.do(Act.GATHER, 0, prepare=fail(mine)),
        lambda rank: rank.do(Act.GATHER, 0),
    )
    assert failed.error is mine
    with pytest.raises(TiermemError, match=r"rank 1 stops because .*: rank 0: ValueError: no room"):
        raise other.error
    assert (failed.undone, other.undone) == ([None], ["prepared"])
    assert failed.done == other.done == []


def test_a_rank_whose_thread_cannot_ask_its_device_raises_that_and_the_others_its_name():
    mine = RuntimeError("no stream")

    def part(rank: Rank) -> None:
        rank.begin = fail(mine)
        with pytest.raises(RuntimeError, match="no stream"):
            rank.do(Act.GATHER, 0)
        rank.do(Act.SETTLE)

    failed, other = together(part, lambda rank: rank.do(Act.GATHER, 0))
    assert failed.error is mine
    with pytest.raises(TiermemError, match=r"rank 1 stops because .*: rank 0: RuntimeError: no stream"):
        raise other.error
    assert (failed.undone, other.undone) == ([None, None], ["prepared"])
    assert failed.done == other.done == []
    failed.conductor.close()


def test_after_an_error_in_the_middle_nothing_is_done_any_more():
    mine = ValueError("torn")

    def part(rank: Rank) -> None:
        with pytest.raises(ValueError, match="torn"):
            rank.do(Act.GATHER, 0, action=fail(mine))
        rank.do(Act.GATHER, 1)

    for rank in together(part, part):
        assert rank.error is mine
        assert rank.done == []
        assert rank.undone == [None], "what the action was given is its own"


def test_gradients_that_some_have_are_added_up_by_all():
    def some(rank: Rank) -> None:
        rank.do(Act.REDUCE, 1, bucket="mine")
        rank.do(Act.REDUCE, 0, bucket="more")
        rank.do(Act.STEP, alike="lr=1")

    def none(rank: Rank) -> None:
        rank.do(Act.STEP, alike="lr=1")

    def one(rank: Rank) -> None:
        rank.do(Act.REDUCE, 0, bucket="its own")
        rank.do(Act.STEP, alike="lr=1")

    ranks = together(some, none, one)
    assert [rank.error for rank in ranks] == [None] * 3
    first, second = [False, False, True], [True, False, False]
    assert ranks[0].served == [(0, None, first), (1, "mine", second), (0, "more", second)]
    assert ranks[1].served == [(0, None, first), (1, None, second), (0, None, second)]
    assert ranks[2].served == [(0, "its own", first), (1, None, second), (0, None, second)]
    assert [rank.done for rank in ranks] == [
        [(Act.REDUCE, 1), (Act.REDUCE, 0), (Act.STEP, -1)],
        [(Act.STEP, -1)],
        [(Act.REDUCE, 0), (Act.STEP, -1)],
    ]
    assert {rank.conductor.announced() for rank in ranks} == {3}


def test_gradients_excuse_no_other_difference():
    ranks = together(
        lambda rank: rank.do(Act.REDUCE, 0, bucket="mine"),
        lambda rank: rank.do(Act.STEP),
        lambda rank: rank.do(Act.CLIP),
    )
    for rank in ranks:
        with pytest.raises(TiermemError, match=r"rank 0 adds up gradients of unit 0 .*rank 1 steps.*rank 2 clips"):
            raise rank.error
        assert rank.served == []


def test_who_leaves_together_says_so_and_who_leaves_alone_says_why():
    line = Line(2)
    ranks = [Rank(line, number) for number in range(2)]
    threads = [threading.Thread(target=rank.conductor.close) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert line.left == {0: "closed its runtime", 1: "closed its runtime"}

    line = Line(2)
    ranks = [Rank(line, number) for number in range(2)]
    ranks[0].conductor.close(ValueError("had enough"))
    assert line.left == {0: "closed its runtime because of ValueError: had enough"}
    assert not ranks[1].conductor.ended_well(ranks[1].conductor.start(ranks[1].operation(Act.SETTLE)))
    with pytest.raises(TiermemError, match="had enough"):
        ranks[1].do(Act.SETTLE)
    for rank in ranks:
        rank.conductor.close()
        assert rank.conductor.is_closed
    assert list(line.left) == [0, 1]

    line = Line(2)
    rank = Rank(line, 1)
    with pytest.raises(KeyError), contextlib.closing(rank.conductor):
        raise KeyError("batch")
    assert line.left == {1: "closed its runtime because of KeyError: 'batch'"}


def test_after_closing_everything_says_so_and_closing_again_does_nothing():
    rank = Rank(Line(1), 0)
    assert rank.do(Act.SETTLE) == "prepared"
    assert not rank.conductor.is_closed
    rank.conductor.close()
    rank.conductor.close()
    assert rank.conductor.is_closed
    with pytest.raises(TiermemError, match="this runtime is closed"):
        rank.do(Act.SETTLE)


def test_waiting_for_others_is_counted_as_a_stall(monkeypatch: pytest.MonkeyPatch):
    late, waits, moments = threading.Event(), list[int](), itertools.count(1.0)

    def moment() -> float:
        if threading.get_ident() not in waits:
            return time.perf_counter()
        late.set()  # not before the wait has begun
        return next(moments)

    def early(rank: Rank) -> None:
        waits.append(threading.get_ident())
        rank.do(Act.SETTLE)

    monkeypatch.setattr(conductor, "time", SimpleNamespace(perf_counter=moment))
    ranks = together(early, lambda rank: late.wait(WAIT) and rank.do(Act.SETTLE))
    assert [rank.error for rank in ranks] == [None, None]
    counted = ranks[0].counters.step()
    assert counted.stall_seconds == counted.rank_seconds == 1.0
