"""Clipping has the bits of torch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import ConfigError
from tiermem.optim.clip import clip_coefficient, is_finite, total_norm


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.floats(1e-3, 1e3),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=50)
def test_same_bits_as_torch(sizes: list[int], dtype: torch.dtype, max_norm: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes]
    for p in parameters:
        p.grad = torch.randn(p.numel(), generator=generator).to(dtype)
    before = [p.grad.clone() for p in parameters]
    total = total_norm([torch.linalg.vector_norm(g) for g in before])
    coefficient = clip_coefficient(total, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    assert torch.equal(total, expected)
    for p, g in zip(parameters, before, strict=True):
        assert torch.equal(g * coefficient, p.grad)


def test_no_gradients_at_all() -> None:
    assert total_norm([]) == 0.0


def test_what_is_not_finite_is_seen() -> None:
    assert not is_finite(total_norm([torch.tensor(1.0), torch.tensor(float("inf"))]))
    assert not is_finite(total_norm([torch.tensor(1.0), torch.tensor(float("nan"))]))
    with pytest.raises(ConfigError):
        clip_coefficient(torch.tensor(1.0), -1.0)
