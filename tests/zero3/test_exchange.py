"""Adding gradients up over ranks: in rank order, 16-bit ones in float32, rounded once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiermem.zero3.sums import average


@given(seed=st.integers(0, 1000), ranks=st.integers(1, 5), numel=st.integers(1, 200))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_mean_is_rounded_once(dtype, seed, ranks, numel):
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(numel, generator=generator).to(dtype) for _ in range(ranks)]
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    expected = parts[0].to(exact)
    for part in parts[1:]:
        expected = expected + part.to(exact)
    average(parts, ranks)
    assert torch.equal(parts[0], (expected / ranks).to(dtype))


def test_long_ones_are_the_same_slice_by_slice():
    parts = [torch.randn(200_001), torch.randn(200_001)]
    expected = (parts[0] + parts[1]) / 2
    average(parts, 2)
    assert torch.equal(parts[0], expected)


def test_who_has_no_gradient_counts_as_zeros():
    parts = [torch.full((3,), 6.0)]
    average(parts, 3)
    assert parts[0].tolist() == [2.0, 2.0, 2.0]
