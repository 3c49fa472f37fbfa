"""Undoing updates: there is room for a copy when a commit has given its own up, and one undoing is waited for twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiermem.runtime.undo import Undo


@pytest.mark.parametrize(("copies", "expected"), [(1, False), (2, True), (3, True)])
def test_whether_there_is_room_is_known_when_a_commit_has_given_its_copies_up(copies: int, expected: bool) -> None:
    alive = [2]
    extents: Any = SimpleNamespace(generations=SimpleNamespace(alive=lambda: alive[-1]))
    pager: Any = None
    assert Undo(pager, extents, lambda: alive.append(1), copies=copies).has_room() is expected
    assert (len(alive) == 1) == (copies == 1), "where there is never any nobody waits"


def test_an_undoing_whose_wait_was_interrupted_is_not_begun_again() -> None:
    begun: list[Any] = []
    waited: list[Any] = []

    class Pager:
        def start_task(self, task: Any) -> str:
            begun.append(task)
            return f"the end of {task}"

        def wait_for(self, future: Any) -> None:
            waited.append(future)
            if len(waited) == 2:
                raise KeyboardInterrupt

    pager: Any = Pager()
    extents: Any = None
    protections: Any = [SimpleNamespace(revert=lambda name=name: name) for name in ("one", "other")]
    running: Any = ["an update"]
    undo = Undo(pager, extents, print, copies=2)
    with pytest.raises(KeyboardInterrupt):
        undo.revert(protections[0], running)
    undo.revert(protections[0], running)
    undo.revert(protections[1], [])
    assert begun == ["one", "other"]
    assert waited == ["an update", "the end of one"] * 2 + ["the end of other"]
