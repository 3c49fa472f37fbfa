"""16-bit parameters train like plain 16-bit training with float32 masters, bit for bit.

The plain way: forward and backward on parameters that are the masters rounded, gradients widened to float32, fused
AdamW on the masters. That the bits are equal, and not only close, has reasons: the split of a master into a bfloat16
parameter and a remainder is lossless; a 16-bit gradient is widened exactly before the same kernel; the parameter is the
master rounded to nearest, as `Tensor.to` rounds. Clipping is the exception: see the last test.
"""

from __future__ import annotations

import copy
import sysconfig
from pathlib import Path

import pytest
import torch
from doubles_combinations import number_of, some_of
from doubles_models import small_llama
from doubles_scenarios import Wide
from doubles_training import budget_for, config_for, within_budgets

import tiermem

pytest.importorskip("transformers")

STEPS = number_of(14, 50)


def text() -> torch.Tensor:
    """The beginning of the standard library, as bytes: on every machine the same kind of English and Python."""
    library = Path(sysconfig.get_path("stdlib"))
    raw = b"".join((library / name).read_bytes() for name in ("argparse.py", "ast.py"))
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()


def llama(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return small_llama(words=256, max_position_embeddings=64).train()


class PlainLowPrecision:
    """Masters beside a model of rounded parameters."""

    def __init__(self, model, dtype, **settings) -> None:
        self.masters = [parameter.detach().clone() for parameter in model.parameters()]
        for master in self.masters:
            master.requires_grad_()
        self.model = copy.deepcopy(model)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **settings)

    def step(self) -> None:
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            parameter.data.copy_(master)


def batches(corpus):
    generator = torch.Generator().manual_seed(5)
    while True:
        start = torch.randint(0, len(corpus) - 33, (4,), generator=generator)
        yield torch.stack([corpus[begin : begin + 32] for begin in start.tolist()])


def train(model, step, dtype, steps) -> list[float]:
    losses, stream = [], batches(text())
    for _ in range(steps):
        tokens = next(stream)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("param_dtype", "update", "budget", "steps"),
    some_of(
        [
            ("bfloat16", "backward", "least", STEPS),
            ("bfloat16", "step", "generous", 5),
            ("float16", "forward", "tight", 8),
        ],
        [("bfloat16", "forward", "tight", STEPS), ("float16", "backward", "least", 8)],
    ),
)
def test_the_same_loss_curve_and_masters(param_dtype, update, budget, steps, tmp_path):
    dtype = getattr(torch, param_dtype)
    model = llama(dtype)
    plain = PlainLowPrecision(model, dtype, lr=1e-2)
    expected = train(plain.model, plain.step, dtype, steps)
    nbytes = budget_for(model, tmp_path, budget, param_dtype=param_dtype)
    with tiermem.offload(model, config_for(tmp_path, nbytes, update, param_dtype=param_dtype)) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-2)
        found = train(model, optimizer.step, dtype, steps)
        assert found == expected
        if steps == STEPS:
            assert sum(found[-5:]) < 0.8 * sum(found[:5])
        for parameter, master, rounded in zip(model.parameters(), plain.masters, plain.model.parameters(), strict=True):
            assert torch.equal(runtime.master(parameter), master.detach())
            assert torch.equal(runtime.parameter(parameter), rounded.detach())
        within_budgets(runtime.statistics())


def test_masters_are_not_the_parameters(tmp_path):
    """The comparison above would be empty if masters were what the parameters hold."""
    model = llama(torch.bfloat16)
    with tiermem.offload(model, config_for(tmp_path, "64MiB", "step", param_dtype="bfloat16")) as runtime:
        parameter = model.lm_head.weight
        assert not torch.equal(runtime.master(parameter), runtime.parameter(parameter).float())
        assert torch.equal(runtime.master(parameter).bfloat16(), runtime.parameter(parameter))


def test_clipping_is_within_rounding_of_clipping_float32_gradients(tmp_path):
    """Gradients are multiplied by the coefficient in their own dtype: one rounding to bfloat16 more than in float32."""
    torch.manual_seed(0)
    model = Wide()
    plain = PlainLowPrecision(model, torch.bfloat16, lr=1e-3)
    with tiermem.offload(model, config_for(tmp_path, "64MiB", "forward", param_dtype="bfloat16")) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, max_grad_norm=0.01)
        for number in range(4):
            for side in (plain.model, model):
                torch.manual_seed(number)
                side(torch.randn(3, 48).bfloat16()).float().square().mean().backward()
            gradients = [parameter.grad.float() for parameter in plain.model.parameters()]
            norm = torch.nn.utils.get_total_norm(gradients)
            for parameter in plain.model.parameters():
                parameter.grad = parameter.grad * (0.01 / (norm + 1e-6)).clamp(max=1.0)
            optimizer.step()
            assert torch.allclose(optimizer.grad_norm, norm, rtol=1e-2)
            plain.step()
        for parameter, master in zip(model.parameters(), plain.masters, strict=True):
            assert torch.allclose(runtime.master(parameter), master, atol=1e-4)
