"""What a script has told torch to make by default, `torch.set_default_dtype` and `set_default_device`, changes nothing.

Many scripts do: bfloat16 for what they compute with, a GPU for what they make. Here "meta" stands for the GPU: what the
runtime made there would have no values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_combinations import in_turn
from torch import nn

import tiermem
from tiermem.optim import codebook, compiled

MIB = 1 << 20
WIDTH = 128


@contextlib.contextmanager
def defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    """With nothing known that was made under others."""
    for cached in (codebook.signed_book, codebook.unsigned_book, compiled.compiled_loops, compiled._find):
        cached.cache_clear()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def train(directory: Path, dtype: torch.dtype, device: str | None, **settings: Any) -> list[torch.Tensor]:
    """Some steps, all that may be asked of a run, and what it has then, from a snapshot on."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    again = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    batch = torch.randn(4, WIDTH)
    config = tiermem.Config(
        device="simulated", device_memory=8 * MIB, host_memory=16 * MIB, swap_dirs=[directory], **settings
    )

    def steps(model: nn.Module, optimizer: tiermem.AdamW) -> None:
        for _ in range(3):
            model(batch.to(next(model.parameters()).dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with defaults(dtype, device):
        with tiermem.offload(model, config) as runtime:
            optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, max_grad_norm=0.05)
            steps(model, optimizer)
            noted = [optimizer.grad_norm]
            with runtime.gathered(model[0], write=True), torch.no_grad():
                model[0].bias.mul_(0.5)
            state = optimizer.full_state_dict()
            optimizer.load_state_dict(state)
            runtime.snapshot(directory / "snapshot").wait()
            noted += [moments[name] for moments in state["state"].values() for name in ("exp_avg", "exp_avg_sq")]
        with tiermem.offload(again, config, resume=directory / "snapshot") as runtime:
            optimizer = tiermem.AdamW(again.parameters(), lr=1e-3, max_grad_norm=0.05)
            steps(again, optimizer)
            noted += [runtime.master(parameter) for parameter in again.parameters()]
        assert settings["param_dtype"] == "float16" or compiled.compiled_loops() is not None
    return noted


@pytest.mark.parametrize(
    ("default", "given"),
    in_turn(
        [(torch.bfloat16, None), (torch.float64, None), (torch.float32, "meta")],
        [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "int8"), ("float16", "int8")],
    ),
    ids=str,
)
def test_other_defaults_have_the_same_bits(default, given, tmp_path):
    settings = dict(zip(("param_dtype", "moments"), given, strict=True))
    (tmp_path / "plain").mkdir()
    (tmp_path / "other").mkdir()
    expected = train(tmp_path / "plain", torch.float32, None, **settings)
    found = train(tmp_path / "other", *default, **settings)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert one.device.type == "cpu"
        assert torch.equal(one, other)
