"""One tile: the bits of fused AdamW for any slicing, and of a float32 master for narrow parameters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import InvariantError
from tiermem.optim import kernels
from tiermem.optim.kernels import Run, Workspace, adamw_tile, device_slice_numel
from tiermem.optim.planes import StatePlanes, tile_planes
from tiermem.optim.split import split
from tiermem.optim.tiles import Segment, UnitState
from tiermem.optim.updates import Settings


def a_unit(dtype: torch.dtype, numel: int) -> UnitState:
    return UnitState(0, dtype, (Segment(0, 0, numel),), numel, -(-numel // 2048) * 2048)


def planes_of(dtype: torch.dtype, numel: int, buffer: torch.Tensor | None = None) -> StatePlanes:
    state = a_unit(dtype, numel)
    return tile_planes(torch.zeros(state.state_nbytes(0), dtype=torch.uint8) if buffer is None else buffer, state, 0)


def reference(master: torch.Tensor, lr: float, decay: float, gradients: list[torch.Tensor], dtype: torch.dtype) -> dict:
    parameter = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([parameter], lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay, fused=True)
    for gradient in gradients:
        parameter.grad = gradient.to(torch.float32)
        optimizer.step()
    state = optimizer.state[parameter]
    return {"parameter": parameter.detach().to(dtype), "first": state["exp_avg"], "second": state["exp_avg_sq"]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(
    numel=st.integers(1, 5000),
    slice_numel=st.sampled_from([64, 192, 1024, 8192]),
    lr=st.floats(0.0, 0.1),
    decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=15)
def test_same_bits_for_any_slicing(
    dtype: torch.dtype, numel: int, slice_numel: int, lr: float, decay: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(numel, generator=generator)
    if dtype == torch.bfloat16:  # many exact ties: the hard case of the split
        bits = master.view(torch.int32)
        bits[::3] = (bits[::3] & -0x10000) | 0x8000
    gradients = [torch.randn(numel, generator=generator).to(dtype) for _ in range(4)]
    planes = planes_of(dtype, numel)
    parameter = master.to(dtype, copy=True)
    if dtype == torch.bfloat16:
        scratch = torch.empty(numel, dtype=torch.int32)
        split(master, parameter, planes.remainder, planes.marks, scratch)
    if dtype == torch.float16:
        planes.master.copy_(master)
    workspace = Workspace(slice_numel)
    for step, gradient in enumerate(gradients, 1):
        adamw_tile(parameter, gradient, planes, [Run(0, numel, Settings(lr, 0.9, 0.95, 1e-8, decay, step))], workspace)
    expected = reference(master, lr, decay, gradients, dtype)
    assert torch.equal(parameter, expected["parameter"])
    assert torch.equal(planes.exp_avg, expected["first"])
    assert torch.equal(planes.exp_avg_sq.abs(), expected["second"])


def test_elements_outside_the_runs_are_not_touched() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        buffer = torch.randint(0, 100, (a_unit(dtype, 512).state_nbytes(0),), dtype=torch.uint8)
        parameter, before = torch.ones(512, dtype=dtype), buffer.clone()
        planes, old = planes_of(dtype, 512, buffer), planes_of(dtype, 512, before)
        run = Run(128, 100, Settings(0.1, 0.9, 0.95, 1e-8, 0.1, 1))
        adamw_tile(parameter, torch.ones(512, dtype=dtype), planes, [run], Workspace(64))
        outside = torch.ones(512, dtype=torch.bool)
        outside[128:228] = False
        assert (parameter[outside] == 1).all()
        assert (parameter[~outside] != 1).any()
        for name in ("remainder", "master", "exp_avg", "exp_avg_sq"):
            if getattr(planes, name) is not None:
                assert torch.equal(getattr(planes, name)[outside], getattr(old, name)[outside])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_device_neighbours_with_the_same_settings_are_updated_at_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three parameters side by side, one behind a gap, one with settings of its own: three calls, the same bits."""
    usual, own = Settings(0.1, 0.9, 0.95, 1e-8, 0.1, 3), Settings(0.1, 0.9, 0.95, 1e-8, 0.0, 3)
    runs = [Run(0, 640, usual), Run(640, 64, usual), Run(704, 100, usual), Run(832, 192, usual), Run(1024, 77, own)]
    found, calls = [], []
    fused = kernels._fused
    monkeypatch.setattr(kernels, "_fused", lambda *arguments: (calls.append(len(arguments[0])), fused(*arguments)))
    for workspace in (Workspace(4096, compiled=False), Workspace(4096, device=torch.device("cpu"))):
        generator = torch.Generator().manual_seed(1)
        parameter, gradient = (torch.randn(2048, generator=generator).to(dtype) for _ in range(2))
        planes = planes_of(dtype, 2048)
        planes.exp_avg_sq.copy_(torch.rand(2048, generator=generator))
        calls.clear()
        adamw_tile(parameter, gradient, planes, runs, workspace)
        found.append([parameter, planes.exp_avg, planes.exp_avg_sq, planes.remainder, list(calls)])
    assert [each.pop() for each in found] == [[640, 64, 100, 192, 77], [804, 192, 77]]
    for one, other in zip(*found, strict=True):
        assert one is other or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@given(budget=st.integers(0, 1 << 38))
def test_a_slice_on_a_device_takes_a_small_part_of_its_budget(budget: int) -> None:
    numel = device_slice_numel(budget)
    assert numel % 64 == 0
    assert 1 << 20 <= numel <= 1 << 24
    assert numel == 1 << 20 or numel * 12 <= budget // 32
    assert numel <= device_slice_numel(2 * budget)
    assert device_slice_numel(8 << 30) == 1 << 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaling_happens_in_the_gradients_dtype_and_leaves_them_alone(dtype: torch.dtype) -> None:
    gradient = torch.randn(3000).to(dtype)
    scaled = gradient * 0.3
    results = []
    for grad, scale in ((gradient, 0.3), (scaled, 1.0)):
        planes = planes_of(dtype, 3000)
        parameter, before = torch.ones(3000, dtype=dtype), grad.clone()
        run = Run(0, 3000, Settings(0.1, 0.9, 0.95, 1e-8, 0.1, 1))
        adamw_tile(parameter, grad, planes, [run], Workspace(256), scale)
        assert torch.equal(grad, before)
        results.append((parameter, planes.exp_avg, planes.exp_avg_sq))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_float16_is_scaled_in_float32_so_that_what_a_loss_scale_kept_is_not_lost() -> None:
    gradient, scale = torch.randn(3000).to(torch.float16), 2.0**-30
    planes = planes_of(torch.float16, 3000)
    run = Run(0, 3000, Settings(0.1, 0.9, 0.95, 1e-8, 0.1, 1))
    adamw_tile(torch.ones(3000, dtype=torch.float16), gradient, planes, [run], Workspace(256), scale)
    assert torch.allclose(planes.exp_avg, 0.1 * gradient.float() * scale, rtol=1e-5, atol=0.0)


def test_what_does_not_fit_together_is_refused() -> None:
    planes = planes_of(torch.float32, 64)
    with pytest.raises(InvariantError):
        adamw_tile(torch.zeros(64), torch.zeros(32), planes, [], Workspace(64))
    with pytest.raises(InvariantError):
        Workspace(100)
