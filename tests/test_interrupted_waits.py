"""Waits that Ctrl-C ends anywhere: what was waited for goes on, and can be waited for again.

Python's own `threading.Condition`, and what is made of it, may stay locked behind that, for ever.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
from doubles_signals import has_ended, interrupted_everywhere

import swap
from swap.watch import WatchedThread
from tiermem.memory.copies import CopyLine
from tiermem.process import begin
from tiermem.stats import Counters
from tiermem.timeline import Timeline
from tiermem.zero3 import fibers
from tiermem.zero3.collectives import SingleProcess
from tiermem.zero3.conductor import Act, Conductor, Operation
from tiermem.zero3.fibers import OwnThread
from tiermem.zero3.grid import one_copy

pytestmark = pytest.mark.timeout(200, method="thread")


def test_for_what_ranks_do_together() -> None:
    conductor = Conductor(one_copy(SingleProcess()), ["a"], Timeline(), Counters())
    done: list[int] = []

    def operation() -> None:
        conductor.run(Operation(Act.LOOK, action=lambda _: done.append(1)))

    conductor.run(Operation(Act.LOOK))  # the thread is there
    for _ in interrupted_everywhere(lambda: operation):
        before = len(done)
        operation()
        assert len(done) > before
    assert len(done) > 10
    conductor.close()


def test_for_micro_batches_on_threads() -> None:
    made: list[OwnThread] = []
    turns = 0

    def live() -> None:
        nonlocal turns
        for _ in range(2):
            turns += 1
            made[-1].stop()

    def make():
        made.append(OwnThread(live))
        made[-1].go()

        def go() -> None:
            for _ in range(2):
                made[-1].go()

        return go

    for _ in interrupted_everywhere(make):
        made[-1].end(), made[-1].end()
        assert not any(thread.name == "tiermem-micro-batch" for thread in threading.enumerate())
    assert turns > 5


def test_a_micro_batch_whose_start_was_interrupted_does_not_begin_behind_its_end(monkeypatch) -> None:
    """It ran beside the training that went on, and its gradients were added to the next ones."""
    threads: list[threading.Thread] = []
    ran: list[int] = []

    def interrupt(thread: threading.Thread) -> None:
        threads.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(fibers, "begin", interrupt)
    fiber = OwnThread(lambda: ran.append(1))
    with pytest.raises(KeyboardInterrupt):
        fiber.go()
    fiber.end()
    threads[0].start()
    threads[0].join()
    assert ran == []


def test_for_the_end_of_copies() -> None:
    lines: list[CopyLine] = []

    def make():
        lines.append(CopyLine("test-copies", lambda copy: pytest.fail(str(copy))))
        return lines[-1].close

    for _ in interrupted_everywhere(make):
        lines[-1].close()
        assert not any(thread.name == "test-copies" for thread in threading.enumerate())
    assert len(lines) > 3


def test_for_the_beginning_of_copies() -> None:
    """Nobody has a line that he could close then."""
    lines: list[CopyLine] = []

    def make():
        return lambda: lines.append(CopyLine("test-copies", lambda copy: pytest.fail(str(copy))))

    tries = 0
    for _ in interrupted_everywhere(make):
        tries += 1
        for thread in threading.enumerate():
            if thread.name == "test-copies":
                assert has_ended(thread)
    assert tries > 3
    (whole,) = lines
    whole.close()


def test_for_a_transfer(tmp_path: Path) -> None:
    with swap.SwapSpace.open([tmp_path], name="r0", nbytes=1 << 20) as space:
        extent, buffer, requests = space.allocate(4096), swap.AlignedBuffer(4096), []

        def make():
            requests.append(space.start_write(extent, buffer.view))
            return requests[-1].wait

        for _ in interrupted_everywhere(make):
            requests[-1].wait()
        assert len(requests) > 3


@pytest.mark.parametrize("watched", [False, True])
def test_for_the_beginning_of_a_thread(watched: bool) -> None:
    """One that never began kept what it was given, and the program's end waited for it."""
    threads: list[threading.Thread] = []
    done: list[int] = []

    def make():
        work = partial(done.append, len(threads))
        threads.append(WatchedThread(work, name="test-begun") if watched else threading.Thread(target=work))
        return threads[-1].start if watched else partial(begin, threads[-1])

    for _ in interrupted_everywhere(make):
        if threads[-1].ident is not None:  # else the interrupt came before the system was asked
            assert has_ended(threads[-1])
            assert len(threads) - 1 in done
    assert len(done) > 3


def test_for_a_thread_that_a_drive_may_keep() -> None:
    threads: list[WatchedThread] = []

    def make():
        threads.append(WatchedThread(lambda: None, name="test-watched"))
        threads[-1].start()
        return lambda: threads[-1].join(60)

    for _ in interrupted_everywhere(make):
        threads[-1].join()
        assert not threads[-1].is_alive()
    assert len(threads) > 3
