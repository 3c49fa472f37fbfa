"""How a snapshot begins, on a line that fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiermem.errors import TiermemError
from tiermem.runtime.company import Company
from tiermem.runtime.snapshots import Snapshots
from tiermem.zero3.collectives import SingleProcess
from tiermem.zero3.grid import one_copy

NONE: Any = None
COMMITS: Any = SimpleNamespace(wait_open=lambda: None)


class Broken(SingleProcess):
    """Of two ranks the first; the other one is gone after `said` words."""

    size = 2

    def __init__(self, said: int) -> None:
        self.said = said

    def tell_text(self, text: str) -> list[str]:
        self.said -= 1
        if self.said < 0:
            raise TiermemError("the other rank is gone")
        return [text, ""]


@pytest.mark.parametrize("said", [0, 1])
def test_a_snapshot_that_cannot_begin_on_every_rank_leaves_nothing_behind(tmp_path: Path, said: int) -> None:
    line = Broken(said)
    snapshots = Snapshots(NONE, NONE, COMMITS, NONE, Company(one_copy(line), line), second_copy=True)
    with pytest.raises(TiermemError, match="the other rank is gone"):
        snapshots.begin(tmp_path / "step", stall_seconds=10)
    assert list(tmp_path.iterdir()) == []
