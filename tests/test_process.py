"""Promises of `tiermem/process.py`: what another thread is in can be asked for while it goes on."""

import gc
import sys
import threading
from collections.abc import Callable

import pytest

from tiermem.process import frames_of


@pytest.fixture
def within_ten() -> Callable[[], list]:
    """Ask for the frames of a thread that is in ten calls of one function, and waits."""
    going_on, waits = threading.Event(), threading.Event()

    def call(depth: int) -> None:
        if depth > 1:
            return call(depth - 1)
        waits.set()
        going_on.wait(60)
        return None

    thread = threading.Thread(target=call, args=(10,))
    thread.start()
    assert waits.wait(60)
    yield lambda: [frame for frame in frames_of(thread.ident) if frame.f_code is call.__code__]
    going_on.set()
    thread.join(60)


def test_the_calls_another_thread_is_in_the_innermost_first(within_ten):
    assert [frame.f_locals["depth"] for frame in within_ten()] == [*range(1, 11)]


def test_nobody_is_in_nothing():
    assert frames_of(0) == []


@pytest.mark.parametrize("collected", [False, True])
def test_no_garbage_is_collected_while_the_frames_are_asked_for(collected, within_ten):
    """A finalizer would let the thread go on, out of the frame that is being asked for."""
    amid: list[str] = []
    before, collecting = gc.get_threshold(), gc.isenabled()

    def note(phase: str, _: dict) -> None:
        if sys._getframe(1).f_code is frames_of.__code__:
            amid.append(phase)

    (gc.enable if collected else gc.disable)()
    gc.callbacks.append(note)
    try:
        gc.set_threshold(1)
        frames = within_ten()
        enabled = gc.isenabled()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
        (gc.enable if collecting else gc.disable)()
    assert (amid, len(frames)) == ([], 10)
    assert enabled is collected


def test_a_generator_that_is_left_while_it_is_looked_at_hides_nobody():
    """Once left, it no longer says by whom it was called; so a thread inside a model was taken for one outside."""
    inside, looked, left, going_on = (threading.Event() for _ in range(4))

    def waits():
        inside.set()
        yield looked.wait(60)

    def call() -> None:
        for _ in waits():
            left.set()
            going_on.wait(60)

    def let_go_on(_frame: object, event: str, called: object) -> None:
        if event == "c_call" and getattr(called, "__name__", "") == "append" and not looked.is_set():
            looked.set()
            left.wait(60)

    thread = threading.Thread(target=call)
    thread.start()
    assert inside.wait(60)
    try:
        sys.setprofile(let_go_on)
        frames = frames_of(thread.ident)
    finally:
        sys.setprofile(None)
        looked.set()
        going_on.set()
        thread.join(60)
    assert left.is_set()
    assert call.__code__ in [frame.f_code for frame in frames]
