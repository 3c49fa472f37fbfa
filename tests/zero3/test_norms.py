"""Norms of gradients, with compiled loops and without."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiermem.zero3 import norms
from tiermem.zero3.norms import gradient_norm, measuring_copy


@pytest.fixture(params=["compiled", "by torch"])
def form(request, monkeypatch):
    """Both ways of adding up."""
    if request.param == "by torch":
        monkeypatch.setattr(norms, "compiled_loops", lambda: None)
    elif norms.compiled_loops() is None:
        pytest.skip("numba cannot compile the loops here")
    return request.param


@pytest.mark.parametrize("numel", [0, 1, 1000, 3 << 16, (3 << 16) + 1, 1_000_003])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_gradient_s_norm_is_as_exact_as_its_dtype(numel, dtype, form):
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    norm = gradient_norm(gradient)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert norm.shape == ()
    if dtype == torch.float32:
        assert torch.equal(norm, torch.linalg.vector_norm(gradient))  # the bits of torch, which are less exact
    else:
        torch.testing.assert_close(norm.double(), torch.linalg.vector_norm(gradient.double()), rtol=3e-6, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_s_norm_tells_what_is_not_finite(value, form):
    gradient = torch.zeros(1_000_000, dtype=torch.bfloat16)
    gradient[999_999] = value
    assert not torch.isfinite(gradient_norm(gradient))


@pytest.mark.parametrize("value", [1e30, -3e38])
def test_a_norm_is_finite_where_all_elements_are(value, form):
    gradient = torch.full((10_000,), value, dtype=torch.bfloat16)
    exact = abs(float(gradient[0])) * 100.0
    norm = float(gradient_norm(gradient))
    assert math.isclose(norm, exact, rel_tol=1e-6) if exact < torch.finfo(torch.float32).max else math.isinf(norm)


def _narrow(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@given(numel=st.integers(0, 30_000), cuts=st.lists(st.integers(0, 30_000), max_size=6))
def test_where_a_copy_is_cut_changes_no_bit_of_its_squares(numel, cuts):
    gradient = _narrow(numel)
    copying, target = measuring_copy(gradient), torch.zeros(numel, dtype=torch.bfloat16)
    if copying is None:
        pytest.skip("numba cannot compile the loops here")
    ends = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    for begin, end in itertools.pairwise(ends):
        copying.copy(begin, target[begin:end])
    assert torch.equal(target, gradient)
    assert torch.equal(gradient_norm(gradient, copying.squares), gradient_norm(gradient))


@pytest.mark.parametrize(
    "gradient",
    [torch.zeros(5, dtype=torch.float16), torch.zeros(5), torch.zeros(5, dtype=torch.bfloat16, device="meta")],
)
def test_what_is_not_bfloat16_in_host_memory_is_left_to_torch(gradient):
    assert measuring_copy(gradient) is None


def test_loops_that_add_up_wrongly_are_not_used(monkeypatch):
    loops = norms.compiled_loops()
    if loops is None:
        pytest.skip("numba cannot compile the loops here")

    class Wrong:
        copy_and_add = staticmethod(loops.copy_and_add)

        @staticmethod
        def sum_of_squares(bits):
            return loops.sum_of_squares(bits) * (1 + 1e-9)

    assert norms._add_up(loops)
    assert not norms._add_up(Wrong)
