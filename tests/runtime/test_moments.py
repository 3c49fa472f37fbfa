"""What the budget is told of optimizer state is never less than the tiles take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tiermem.planner.footprint import UnitSize, state_tile_nbytes
from tiermem.runtime.moments import state_size, unit_state
from tiermem.zero3.layout import ParameterInfo, contiguous_stride, plan_layout
from tiermem.zero3.shards import Shard


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(
    parameters=st.lists(st.tuples(st.integers(1, 3000), st.booleans()), min_size=1, max_size=12),
    ranks=st.integers(1, 3),
)
# Short parameters take whole segments in the plane of their moments, which are wider here than the rest.
@example(parameters=[(1, False), (1, True), (65, False), (65, False)], ranks=1)
@settings(max_examples=60)
def test_the_budget_never_takes_a_tile_for_smaller_than_it_is(
    dtype: torch.dtype, parameters: list[tuple[int, bool]], ranks: int
) -> None:
    infos = [
        ParameterInfo(number, (f"p{number}",), (numel,), contiguous_stride((numel,)), dtype, True)
        for number, (numel, _) in enumerate(parameters)
    ]
    quantized = {number for number, (_, coded) in enumerate(parameters) if coded}
    layout = plan_layout(0, "unit", infos, dtype=dtype, tile_numel=2048, ranks=ranks)
    told = state_size(layout, quantized)
    size = UnitSize(
        "unit",
        param_nbytes=1,
        trainable_numel=layout.part_numel,
        grad_itemsize=dtype.itemsize,
        state_itemsize=told.itemsize,
        ranks=ranks,
        wide_numel=told.wide_numel,
        wide_itemsize=told.wide_itemsize,
    )
    for rank in range(ranks):
        state = unit_state(Shard(layout, rank), quantized)
        for tile in range(state.tiles):
            assert state.state_nbytes(tile) <= state_tile_nbytes(size, state.tile_numel)
