"""A result or an error, set once and from any thread, for whoever waits."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from tiermem.future import Future


@pytest.mark.parametrize("fails", [False, True])
def test_all_who_wait_have_the_result_or_the_error(fails: bool) -> None:
    future: Future[int] = Future()
    found: list[object] = []

    def wait() -> None:
        try:
            found.append(future.result())
        except ValueError as error:
            found.append(error)

    waiting = [threading.Thread(target=wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    assert not future.done()
    error = ValueError("no")
    if fails:
        future.set_exception(error)
    else:
        future.set_result(7)
    for thread in waiting:
        thread.join()
    wait()
    assert found == [error if fails else 7] * 4
    assert future.exception() is (error if fails else None)
    assert future.done()
    assert not future.cancelled()


def test_callbacks_are_called_once_whether_added_before_the_end_or_behind_it() -> None:
    future: Future[int] = Future()
    seen: list[tuple[str, int]] = []
    future.add_done_callback(lambda ended: seen.append(("before", ended.result())))
    assert seen == []
    future.set_result(1)
    future.add_done_callback(lambda ended: seen.append(("behind", ended.result())))
    assert seen == [("before", 1), ("behind", 1)]


def test_an_error_that_was_raised_keeps_nothing_in_a_circle() -> None:
    future: Future[int] = Future()
    future.set_exception(ValueError("no"))
    gone = weakref.ref(future)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no"):
            future.result()
        del future
        assert gone() is None
    finally:
        gc.enable()
