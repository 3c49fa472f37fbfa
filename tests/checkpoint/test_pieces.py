"""State held in any number of uneven pieces, written by each holder, joined, and read in any steps."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_combinations import number_of
from hypothesis import given, settings
from hypothesis import strategies as st

import tiermem
from tiermem.checkpoint.draft import Draft
from tiermem.checkpoint.manifest import FIRST, MASTER, SECOND
from tiermem.checkpoint.reading import open_snapshot
from tiermem.checkpoint.shard import Holding
from tiermem.checkpoint.writing import finish_snapshot, join, write_part
from tiermem.zero3.layout import Slot

RECORD: dict[str, Any] = {
    "step": 1,
    "random": [{}],
    "optimizers": [],
    "extra": None,
    "param_dtype": "float32",
    "pretrained": {},
}


@dataclass
class Held:
    """One rank's ranges (first, count) of each parameter."""

    values: list[dict[str, torch.Tensor]]
    ranges: list[tuple[int, int] | None]
    step: int

    def holdings(self) -> list[Holding]:
        found = []
        for number, (planes, held) in enumerate(zip(self.values, self.ranges, strict=True)):
            if held is not None:
                numel = planes[MASTER].numel()
                slot = Slot(number, (f"p{number}",), (numel,), (1,), torch.float32, True, 0)
                found.append(Holding(0, slot, *held, 0, FIRST in planes))
        return found

    def blocks(self, holding: Holding) -> Iterator[tuple[str, torch.Tensor]]:
        end = holding.first + holding.count
        for begin in range(holding.first, end, self.step):
            for plane in holding.planes:
                yield plane, self.values[holding.slot.parameter][plane][begin : min(begin + self.step, end)]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[dict[str, torch.Tensor]], list[Held], int]:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    ranks = draw(st.integers(1, 4))
    values, cuts = [], []
    for number, size in enumerate(sizes):
        planes = (MASTER, FIRST, SECOND) if draw(st.booleans()) else (MASTER,)
        values.append({plane: torch.arange(size) + 100.0 * number + 0.1 * len(plane) for plane in planes})
        inner = sorted(draw(st.lists(st.integers(0, size), min_size=ranks - 1, max_size=ranks - 1)))
        cuts.append([0, *inner, size])
    step = draw(st.integers(1, 17))
    held = []
    for rank in range(ranks):
        own = [(cut[rank], cut[rank + 1] - cut[rank]) for cut in cuts]
        held.append(Held(values, [each if each[1] else None for each in own], step))
    return values, held, draw(st.integers(1, 400))


@settings(max_examples=number_of(12, 40))
@given(world=worlds(), data=st.data())
def test_what_uneven_ranks_have_written_is_read_in_any_steps(world: Any, data: st.DataObject) -> None:
    values, held, file_nbytes = world
    with tempfile.TemporaryDirectory() as folder:
        with Draft(Path(folder) / "copy") as draft:
            parts = [write_part(draft, each, rank=rank, file_nbytes=file_nbytes) for rank, each in enumerate(held)]
            finish_snapshot(draft, parts, RECORD, seconds=0.0, world_size=len(held))
        snapshot = open_snapshot(Path(folder) / "copy")
        assert snapshot.manifest.world_size == len(held)
        assert list(snapshot.verify()) == []
        for kept, planes in zip(snapshot.manifest.parameters, values, strict=True):
            assert kept.planes.keys() == planes.keys()
            for plane, expected in planes.items():
                assert torch.equal(snapshot.whole(kept, plane), expected)
                begin = data.draw(st.integers(0, kept.numel - 1))
                reader = snapshot.reader(kept, plane, first=begin)
                while begin < kept.numel:
                    out = torch.empty(data.draw(st.integers(1, kept.numel - begin)))
                    reader.take(out)
                    assert torch.equal(out, expected[begin : begin + out.numel()])
                    begin += out.numel()


@pytest.mark.parametrize("ranges", [[(0, 4), (5, 5)], [(0, 6), (5, 5)], [(0, 4), (4, 5)]])
def test_pieces_that_leave_gaps_are_a_bug(tmp_path: Path, ranges: list[tuple[int, int]]) -> None:
    values = [{MASTER: torch.arange(10.0)}]
    with Draft(tmp_path / "copy") as draft:
        parts = [write_part(draft, Held(values, [each], 3), rank=rank) for rank, each in enumerate(ranges)]
        with pytest.raises(tiermem.InvariantError, match="leave gaps or overlap"):
            join(parts, RECORD, seconds=0.0, world_size=2)
    assert list(tmp_path.iterdir()) == []
