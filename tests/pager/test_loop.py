"""The loop's mailbox: what is posted, what is left, and the worker's ends."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import functools
import itertools
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType

import pytest
from doubles_garbage import collect
from doubles_signals import has_ended, interrupted

from tiermem.errors import TiermemError
from tiermem.pager.loop import LoopThread
from tiermem.pager.worker import Worker

PATIENCE = 60.0


class Mailbox:
    """A loop that notes what runs on it."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.errors: list[Exception] = []
        self.loop = LoopThread("test-loop", after=lambda: None, failed=self.errors.append)

    def settle(self, *, hungry: bool) -> None:
        self.loop.call(lambda: self.loop.set_hungry(hungry))

    def close(self) -> None:
        if self.loop.shut():
            self.loop.finish(self._last)

    async def _last(self) -> None:
        self.ran.append("last")


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    made = Mailbox()
    yield made
    made.close()


def test_what_is_left_waits_for_the_next_message_and_runs_before_it(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    mailbox.settle(hungry=False)
    with monkeypatch.context() as patch:
        patch.setattr(mailbox.loop.asyncio, "ring", lambda: pytest.fail("nobody was hungry, and the loop was woken"))
        assert mailbox.loop.leave(lambda: mailbox.ran.append("left"))
    assert mailbox.ran == []
    mailbox.loop.call(lambda: mailbox.ran.append("posted"))
    assert mailbox.ran == ["left", "posted"]


def test_what_is_left_runs_at_once_while_somebody_is_hungry(mailbox: Mailbox) -> None:
    mailbox.settle(hungry=True)
    done = threading.Event()
    assert mailbox.loop.leave(done.set)
    assert done.wait(PATIENCE)


def test_who_gets_hungry_in_a_turn_finds_what_was_left_during_it(mailbox: Mailbox) -> None:
    """It came behind the messages of that turn, and nobody else would have it run."""
    mailbox.settle(hungry=False)
    done = threading.Event()

    def turn() -> None:
        assert mailbox.loop.leave(done.set)
        mailbox.loop.set_hungry(True)

    assert mailbox.loop.post(turn)
    assert done.wait(PATIENCE)


def test_whoever_gets_hungry_finds_what_was_left_before(mailbox: Mailbox) -> None:
    mailbox.settle(hungry=False)
    done, started = threading.Event(), threading.Event()

    async def gets_hungry() -> None:  # a task, which no message comes with
        started.set()
        while not mailbox.ran:  # noqa: ASYNC110 - another thread fills it
            await asyncio.sleep(0.001)
        mailbox.loop.set_hungry(True)

    future = mailbox.loop.start_task(gets_hungry())
    assert started.wait(PATIENCE)
    mailbox.loop.leave(done.set)
    mailbox.ran.append("go on")
    future.result()
    assert done.wait(PATIENCE)


class InterruptBehind:
    """A trace function that raises KeyboardInterrupt behind the call of this number, as it has returned."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, _: object) -> InterruptBehind:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_lasti in _behind_calls(frame.f_code):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@functools.cache
def _behind_calls(code: CodeType) -> frozenset[int]:
    found = itertools.pairwise(dis.get_instructions(code))
    return frozenset(after.offset for before, after in found if before.opname.startswith("CALL"))


@pytest.mark.parametrize("how", ["call", "task"])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_wait_that_is_interrupted_anywhere_leaves_the_loop_free(how: str) -> None:
    """Between taking a lock and what gives it back, too: who had the result to tell waited for it for ever."""
    mailbox = Mailbox()  # not the fixture's, which could not be closed

    async def nothing() -> None: ...

    def wait() -> None:
        if how == "call":
            mailbox.loop.call(lambda: None)
        else:
            mailbox.loop.start_task(nothing()).result()

    sys._getframe().f_trace_opcodes = True  # asked for by some frame before, or Python 3.12 has none for the first
    for number in itertools.count(1):
        interrupting = InterruptBehind(number)
        with contextlib.suppress(KeyboardInterrupt):
            try:
                sys.settrace(interrupting)
                wait()
            finally:
                sys.settrace(None)
        asking = threading.Thread(target=lambda: mailbox.loop.call(lambda: None), daemon=True)
        asking.start()
        asking.join(PATIENCE)
        assert not asking.is_alive(), number
        if interrupting.left > 0:  # it was over before
            break
    assert number > 10
    mailbox.close()


# Not as asyncio makes a loop, which nobody could close.
BEGINNING = ("tiermem.pager.loop", "tiermem.process", "tiermem.future", "threading")


@pytest.mark.filterwarnings("ignore:unclosed event loop:ResourceWarning")  # between making it and beginning
def test_a_beginning_that_is_interrupted_anywhere_leaves_no_thread() -> None:
    """Who began it cannot know whether the thread has begun; an error of its own would be reported, and fail this."""
    made: list[LoopThread] = []

    def begin() -> None:
        made.append(LoopThread("interrupted-loop", after=lambda: None, failed=lambda error: None))

    for number in itertools.count(1):
        if not interrupted(begin, number, BEGINNING):
            break
        for thread in [thread for thread in threading.enumerate() if thread.name == "interrupted-loop"]:
            assert has_ended(thread), number
    assert number > 10
    (whole,) = made
    assert whole.shut()

    async def nothing() -> None: ...

    whole.finish(nothing)
    collect()


def test_what_is_left_runs_before_the_end_and_not_behind_it(mailbox: Mailbox) -> None:
    mailbox.settle(hungry=False)
    mailbox.loop.leave(lambda: mailbox.ran.append("left"))
    mailbox.close()
    assert mailbox.ran == ["left", "last"]
    assert not mailbox.loop.leave(lambda: mailbox.ran.append("late"))
    assert mailbox.ran == ["left", "last"]


def test_an_error_of_what_was_left_reaches_the_owner(mailbox: Mailbox) -> None:
    mailbox.settle(hungry=False)

    def fails() -> None:
        raise ValueError("left")

    mailbox.loop.leave(fails)
    mailbox.loop.call(lambda: None)
    assert [str(error) for error in mailbox.errors] == ["left"]


def test_a_worker_runs_in_order_and_hands_over_results_and_errors(mailbox: Mailbox) -> None:
    worker = Worker("test-worker", mailbox.loop.report)
    threads = set()

    def kernel(number: int) -> int:
        threads.add(threading.current_thread().name)
        if number == 2:
            raise ValueError("two")
        return number * number

    async def run() -> list[object]:
        jobs = (worker.run(lambda number=number: kernel(number)) for number in range(4))  # type: ignore[misc]
        return await asyncio.gather(*jobs, return_exceptions=True)

    found = mailbox.loop.start_task(run()).result()
    assert [found[0], found[1], found[3]] == [0, 1, 9]
    assert isinstance(found[2], ValueError)
    assert threads == {"test-worker"}
    mailbox.close()
    worker.close()


def test_cancelling_the_wait_for_a_kernel_waits_for_its_end(mailbox: Mailbox) -> None:
    worker = Worker("test-worker", mailbox.loop.report)
    begun, may_end = threading.Event(), threading.Event()
    order: list[str] = []

    def kernel() -> None:
        begun.set()
        assert may_end.wait(PATIENCE)
        order.append("kernel")

    async def run() -> None:
        task = asyncio.ensure_future(worker.run(kernel))
        while not begun.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.001)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.001)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        order.append("cancelled")

    mailbox.loop.start_task(run()).result()
    assert order == ["kernel", "cancelled"]
    mailbox.close()
    worker.close()


def test_a_thread_that_has_the_number_of_the_one_that_has_ended_is_not_it(mailbox: Mailbox) -> None:
    """What it asked for was done there, on a loop that is closed; and closing once more was said to be a bug."""
    number = mailbox.loop._thread.ident
    mailbox.close()
    told: list[str] = []

    def ask() -> None:
        if threading.get_ident() == number:
            with pytest.raises(TiermemError, match="the pager is closed"):
                mailbox.loop.call(lambda: told.append("ran"))
            mailbox.loop.finish(mailbox._last)
            told.append("refused")

    for _ in range(100):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    if not told:
        pytest.skip("this system gives no number of a thread out again")
    assert set(told) == {"refused"}
