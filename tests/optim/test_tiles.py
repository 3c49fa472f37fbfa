"""Tiles: planes lie apart and aligned, layouts that break a rule are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import ConfigError, InvariantError
from tiermem.optim.planes import tile_planes
from tiermem.optim.tiles import Segment, UnitState

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@given(st.sampled_from(DTYPES), st.integers(1, 5000))
@settings(max_examples=50)
def test_planes_are_aligned_and_apart(dtype: torch.dtype, numel: int) -> None:
    state = UnitState(0, dtype, (Segment(0, 0, numel),), numel, 8192)
    buffer = torch.zeros(state.state_nbytes(0), dtype=torch.uint8)
    planes = tile_planes(buffer, state, 0)
    views = [v for v in (planes.remainder, planes.master, planes.exp_avg, planes.exp_avg_sq) if v is not None]
    end = buffer.data_ptr()
    for view in views:
        assert view.numel() == numel
        assert view.data_ptr() >= end
        assert (view.data_ptr() - buffer.data_ptr()) % 64 == 0
        end = view.data_ptr() + view.nbytes
    assert end <= buffer.data_ptr() + buffer.numel()


@pytest.mark.parametrize(("dtype", "per_element"), [(torch.float32, 8), (torch.bfloat16, 10), (torch.float16, 12)])
def test_bytes_per_element(dtype: torch.dtype, per_element: int) -> None:
    state = UnitState(0, dtype, (Segment(0, 0, 2048),), 2048, 2048)
    assert state.state_nbytes(0) == 2048 * per_element


def test_the_last_tile_is_short() -> None:
    state = UnitState(0, torch.bfloat16, (Segment(0, 0, 2000), Segment(1, 2048, 300)), 2348, 2048)
    assert state.tiles == 2
    assert [state.tile_length(k) for k in range(2)] == [2048, 300]
    with pytest.raises(InvariantError):
        state.tile_length(2)


@pytest.mark.parametrize(
    ("dtype", "segments", "numel", "tile_numel"),
    [
        (torch.float64, (), 64, 2048),
        (torch.float32, (), 64, 1000),
        (torch.float32, (Segment(0, 32, 10),), 64, 2048),
        (torch.float32, (Segment(0, 0, 100), Segment(1, 64, 10)), 128, 2048),
        (torch.float32, (Segment(0, 0, 100),), 64, 2048),
    ],
)
def test_broken_layouts_are_refused(dtype: torch.dtype, segments: tuple, numel: int, tile_numel: int) -> None:
    with pytest.raises(ConfigError):
        UnitState(0, dtype, segments, numel, tile_numel)


def test_a_buffer_too_small_is_refused() -> None:
    with pytest.raises(InvariantError):
        tile_planes(torch.zeros(100, dtype=torch.uint8), UnitState(0, torch.float32, (), 64, 2048), 0)
