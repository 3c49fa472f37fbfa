"""Clipping has the bits of torch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import ConfigError
from tiermem.optim.clip import are_finite, clip_coefficient, is_finite, total_norm
from tiermem.zero3.norms import gradient_norm


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.floats(1e-3, 1e3),
    st.integers(0, 1000),
)
@settings(max_examples=50)
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


@given(
    st.lists(st.integers(2, 3000), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.floats(15, 38),
    st.integers(0, 1000),
)
@settings(max_examples=50)
def test_a_norm_too_large_for_squares_is_told_from_an_infinite_one(
    sizes: list[int], dtype: torch.dtype, exponent: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [(torch.rand(n, generator=generator, dtype=torch.float64) * 10**exponent).to(dtype) for n in sizes]
    norms = [gradient_norm(gradient) for gradient in gradients]
    for norm, gradient in zip(norms, gradients, strict=True):
        exact = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        assert float(norm) == pytest.approx(min(exact, torch.finfo(norm.dtype).max), rel=1e-5)
    assert are_finite(norms) == all(map(is_finite, norms))
    if dtype == torch.float32:
        parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for count in (1, len(sizes)):  # also one by itself, of whose norm torch takes no square
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            expected = torch.nn.utils.clip_grad_norm_(parameters[:count], 1.0)
            assert torch.equal(total_norm(norms[:count]), expected)
    gradients[-1][0] = float("inf")
    assert not is_finite(gradient_norm(gradients[-1]))
    assert not are_finite([*norms[:-1], gradient_norm(gradients[-1])])


class Elsewhere(torch.Tensor):
    """A number that says that it is on a device."""

    is_cpu = False


@pytest.mark.parametrize("kind", [torch.Tensor, Elsewhere])
def test_norms_are_finite_each_by_itself_also_on_a_device(kind: type[torch.Tensor]) -> None:
    for norms, finite in (([3.0, 4.0], True), ([3e38, 3e38], True), ([3e38, float("inf")], False)):
        assert are_finite([torch.tensor(norm).as_subclass(kind) for norm in norms]) is finite


def test_no_gradients_at_all() -> None:
    assert total_norm([]) == 0.0


def test_what_is_not_finite_is_seen() -> None:
    assert not is_finite(total_norm([torch.tensor(1.0), torch.tensor(float("inf"))]))
    assert not is_finite(total_norm([torch.tensor(1.0), torch.tensor(float("nan"))]))
    with pytest.raises(ConfigError):
        clip_coefficient(torch.tensor(1.0), -1.0)
    assert clip_coefficient(torch.tensor(1.0), 0.0) == 0.0
