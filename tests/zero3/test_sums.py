"""Gradients of several copies of a model, added up: by threads as ranks, in no more room than was asked for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from doubles_combinations import number_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.zero3.collectives import SingleProcess
from tiermem.zero3.exchange import join
from tiermem.zero3.grid import Grid, one_copy
from tiermem.zero3.layout import ParameterInfo, contiguous_stride, plan_layout
from tiermem.zero3.shards import Shard, bucket_ranges
from tiermem.zero3.sums import exact_dtype, mean_over_ranks


class Line:
    """What threads show each other; `members` come by, all of them, in each operation."""

    def __init__(self, members: int) -> None:
        self.members = members
        self.barrier = threading.Barrier(members, timeout=20)
        self.shown: list[Any] = [None] * members

    def show(self, rank: int, value: Any) -> list[Any]:
        self.shown[rank] = value
        self.barrier.wait()
        found = list(self.shown)
        self.barrier.wait()
        return found


class Threads(SingleProcess):
    """One thread's end of a line."""

    def __init__(self, line: Line, rank: int) -> None:
        self._line, self._rank = line, rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._line.members

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        whole.copy_(torch.cat(self._line.show(self._rank, shard.clone())))

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, senders: Any) -> None:
        shown = self._line.show(self._rank, sent.clone() if senders[self._rank] else None)
        received.view(torch.uint8).fill_(255)  # what a rank does not send is undefined: NaN here
        length = received.numel() // self.size
        for rank, each in enumerate(shown):
            if each is not None:
                theirs = each[self._rank * length : (self._rank + 1) * length]
                received[rank * length : (rank + 1) * length] = theirs


@settings(max_examples=number_of(15, 40))
@given(data=st.data())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_copy_has_the_same_mean_rounded_once(dtype, data):
    copies, parts = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 3))
    numel = data.draw(st.integers(1, 9000))
    senders = data.draw(st.lists(st.booleans(), min_size=copies * parts, max_size=copies * parts).filter(any))
    info = ParameterInfo(0, ("p",), (numel,), contiguous_stride((numel,)), dtype, True)
    layout = plan_layout(0, "u", [info], dtype=dtype, tile_numel=2048, ranks=parts)
    generator = torch.Generator().manual_seed(numel)
    gradients = [torch.randn(numel, generator=generator).to(dtype) for _ in senders]
    order = torch.randperm(copies * parts, generator=generator)
    rows = tuple(tuple(sorted(row)) for row in order.view(copies, parts).tolist())  # numbered in no order of copies
    lines = [Line(parts) for _ in range(copies)], [Line(copies) for _ in range(parts)], Line(copies * parts)
    means: dict[int, dict[int, torch.Tensor]] = {}

    def rank(copy: int, part: int) -> None:
        number = rows[copy][part]
        everyone = Threads(lines[2], number)
        grid = Grid(everyone, Threads(lines[0][copy], part), Threads(lines[1][part], copy), rows)
        if copies == 1:
            grid = one_copy(Threads(lines[0][0], number))
        shard = Shard(layout, grid.shards.rank, copies=copies)
        bucket = torch.zeros(shard.bucket_nbytes // dtype.itemsize, dtype=dtype)
        for cut in bucket_ranges(shard, layout.trainable[0]):
            bucket[cut.start : cut.start + cut.length] = gradients[number][cut.begin : cut.begin + cut.length]
        room = torch.full((shard.received_nbytes,), 255, dtype=torch.uint8)  # not a byte more
        sent = bucket if senders[number] else bucket[:0]
        own = means[number] = {}
        mean_over_ranks(grid, shard, room, sent, senders, lambda tile, mean: own.update({tile: mean.clone()}))

    with ThreadPoolExecutor(copies * parts) as pool:
        for each in [pool.submit(rank, copy, part) for copy in range(copies) for part in range(parts)]:
            each.result(30)

    exact = exact_dtype(dtype)
    of_rows = [row if copies > 1 else tuple(range(parts)) for row in rows]
    sums = [
        sum((gradients[each].to(exact) for each in row if senders[each]), torch.zeros(numel, dtype=exact))
        for row in of_rows
    ]
    expected = (sum(sums, torch.zeros(numel, dtype=exact)) / (copies * parts)).to(dtype)
    for row in of_rows:
        found = torch.cat([means[each][tile] for each in row for tile in sorted(means[each])])
        assert torch.equal(found, expected)


def test_a_parameter_is_completed_with_what_other_ranks_own_and_one_without_elements_is_complete() -> None:
    infos = [
        ParameterInfo(number, (f"p{number}",), (numel,), contiguous_stride((numel,)), torch.float32, True)
        for number, numel in enumerate((5, 0, 5000))
    ]
    layout, line = plan_layout(0, "u", infos, dtype=torch.float32, tile_numel=2048, ranks=3), Line(3)

    def rank(number: int) -> None:
        shard = Shard(layout, number)
        for slot in layout.slots:
            expected, whole = torch.arange(float(slot.numel)), torch.full((slot.numel,), torch.nan)
            for own in (slice(each.begin, each.begin + each.length) for each in shard.owned() if each.slot is slot):
                whole[own] = expected[own]
            join(Threads(line, number), shard, slot, whole)
            assert torch.equal(whole, expected)

    with ThreadPoolExecutor(3) as pool:
        for each in [pool.submit(rank, number) for number in range(3)]:
            each.result(30)
