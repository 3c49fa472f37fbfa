"""What keep= means, which units that makes, and what is refused."""

from __future__ import annotations

import pytest
import torch
from doubles_models import Block, Stack
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tiermem.errors import ConfigError
from tiermem.zero3.keep import Keeping
from tiermem.zero3.materialize import plan_layouts
from tiermem.zero3.units import find_units


def names_of(model: nn.Module, keep: object, dtype: torch.dtype = torch.float32) -> set[str]:
    kept = Keeping(keep).find(model, dtype)  # type: ignore[arg-type]
    return {name for name, parameter in model.named_parameters() if id(parameter) in kept}


def divided(model: nn.Module, keep: object, units: object = None) -> dict[str, set[str]]:
    """The names of units, each with its parameters; of those that are kept."""
    found = find_units(model, units, Keeping(keep).find(model, torch.float32))  # type: ignore[arg-type]
    return {unit.name: {member.names[0] for member in unit.members} for unit in found.units if unit.kept}


def test_the_ways_to_say_it():
    model = Stack()
    norms = {name for name, _ in model.named_parameters() if "norm" in name}
    assert norms
    assert names_of(model, lambda name, parameter: "norm" in name) == norms
    assert names_of(model, ["LayerNorm"]) == norms
    assert names_of(model, "LayerNorm") == norms
    assert names_of(model, [layer.norm for layer in model.layers]) == norms
    assert names_of(model, model.layers[0].norm) == {"layers.0.norm.weight", "layers.0.norm.bias"}
    assert names_of(model, lambda name, parameter: parameter.ndim == 2 and parameter.shape[0] == 40) == {"embed.weight"}
    assert names_of(model, None) == set()


def test_a_size_is_of_the_dtype_that_is_kept():
    model = nn.Sequential(nn.Linear(16, 4, bias=False), nn.Linear(4, 4, bias=False))
    assert names_of(model, 4 * 4 * 4) == {"1.weight"}
    assert names_of(model, "128B", torch.bfloat16) == {"0.weight", "1.weight"}
    assert {id(model[1].weight)} == Keeping("128B", torch.float32).find(model, torch.bfloat16)


def test_one_of_several_names_is_enough():
    assert names_of(Stack(), lambda name, parameter: name == "head.weight") == {"embed.weight"}


@given(st.integers(0, 4000))
def test_a_size_keeps_all_that_are_not_larger(size: int):
    model = Block(12)
    nbytes = {name: parameter.numel() * 4 for name, parameter in model.named_parameters()}
    if size < min(nbytes.values()):
        with pytest.raises(ConfigError, match="the smallest, scale, takes 48 bytes"):
            names_of(model, size)
    else:
        assert names_of(model, size) == {name for name, taken in nbytes.items() if taken <= size}


@pytest.mark.parametrize(
    ("keep", "says"),
    [
        (lambda name, parameter: False, "is true for none of .* named shift, embed.weight"),
        (["LayreNorm"], "the class 'LayreNorm', which the model lacks; it has LayerNorm"),
        ("LayreNorm", "the class 'LayreNorm'"),
        (nn.Linear(1, 1), "a Linear that is not part of the model"),
        (["GELU"], "the class 'GELU'"),
        (0, "the smallest, shift, takes 48 bytes"),
        (-1, "keep=-1: expected a size of zero bytes or more"),
        (True, "keep=True: expected a size"),
        ("12Gigs", "keep='12Gigs': .*one of the units"),
        ([1, 2], "found 1 among them"),
        (1.5, "a number of bytes, .*found 1.5 among them"),
        (nn.Linear, "names of their classes; found <class"),
        ([], "names modules without parameters"),
    ],
)
def test_a_wish_that_cannot_be_meant_is_refused(keep, says):
    with pytest.raises(ConfigError, match=says):
        names_of(Stack(), keep)


def test_a_model_without_parameters_is_refused_as_without_the_wish():
    with pytest.raises(ConfigError, match="ReLU has no parameters"):
        divided(nn.ReLU(), "100KiB")


def test_a_dtype_for_nothing_is_refused():
    with pytest.raises(ConfigError, match="say with keep= which"):
        Keeping(None, torch.float32).find(Stack(), torch.float32)


def test_what_is_kept_is_a_unit_beside_the_rest_of_its_root():
    model = Stack()
    norms = {
        f"layers.{number} (kept)": {f"layers.{number}.norm.{which}" for which in ("weight", "bias")}
        for number in range(3)
    }
    assert divided(model, ["LayerNorm"]) == norms
    points = {
        id(point.module): point.units
        for point in find_units(model, None, Keeping(["LayerNorm"]).find(model, torch.float32)).points
    }
    for layer in model.layers:
        assert len(points[id(layer)]) == 2, "a layer's call brings both"
        assert len(points[id(layer.up)]) == len(points[id(layer.norm)]) == 1


def test_beside_units_of_ones_own():
    model = Stack()
    assert divided(model, ["LayerNorm"], units=["Stack"]) == {
        "Stack (kept)": {f"layers.{number}.norm.{which}" for number in range(3) for which in ("weight", "bias")}
    }


def test_more_frozen_than_trained_is_apart_there_too():
    model = Block(12)
    model.up.requires_grad_(False)
    assert set(divided(model, lambda name, parameter: True, units=[model])) == {"Block (kept)"}
    model.down.requires_grad_(False)
    assert set(divided(model, lambda name, parameter: True, units=[model])) == {"Block (kept)", "Block (kept, frozen)"}


def test_layouts_have_the_dtype_of_what_is_kept():
    model = Stack()
    units = find_units(model, None, Keeping(["LayerNorm"]).find(model, torch.bfloat16))
    for layout in plan_layouts(units, dtype=torch.bfloat16, tile_numel=2048, kept_dtype=torch.float32):
        expected = torch.float32 if layout.kept else torch.bfloat16
        assert layout.dtype == expected
        assert {slot.dtype for slot in layout.slots} == {expected}
        assert layout.kept == layout.name.endswith("(kept)")
