"""What a file has twice for one parameter has to be the same: transformers would not tie it otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tiermem


class Tied(nn.Module):
    """A table that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(700, 1000)  # a few MiB: more than is compared at a time
        self.head = nn.Linear(1000, 700, bias=False)
        self.head.weight = self.table.weight


def offloaded(folder: Path, values: dict[str, torch.Tensor]) -> tiermem.Runtime:
    save_file(values, folder / "model.safetensors")
    (folder / "swap").mkdir()
    config = tiermem.Config(device="cpu", host_memory="16MiB", swap_dirs=[folder / "swap"], param_dtype="float32")
    with tiermem.deferred_init():
        model = Tied()
    return tiermem.offload(model, config, weights=folder / "model.safetensors")


def test_values_that_differ_are_an_error_before_anything_is_made(tmp_path: Path) -> None:
    table = torch.randn(700, 1000)
    other = table.clone()
    other[-1, -1] += 1
    message = "different values: table.weight and head.weight; build the model untied"
    with pytest.raises(tiermem.ConfigError, match=message):
        offloaded(tmp_path, {"table.weight": table, "head.weight": other})
    assert list((tmp_path / "swap").iterdir()) == []


def test_another_shape_is_an_error(tmp_path: Path) -> None:
    values = {"table.weight": torch.zeros(700, 1000), "head.weight": torch.zeros(7, 1000)}
    with pytest.raises(tiermem.ConfigError, match=r"of another shape: head\.weight"):
        offloaded(tmp_path, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_twice_is_read_once_also_in_another_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    table = torch.randn(700, 1000).bfloat16()
    table[0, 0] = torch.nan  # compared as bits
    with offloaded(tmp_path, {"table.weight": table.clone(), "head.weight": table.to(dtype)}) as runtime:
        assert torch.equal(runtime.parameter(runtime.model.head.weight).nan_to_num(), table.float().nan_to_num())
