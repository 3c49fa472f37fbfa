"""What is assigned to `parameter.data` while a model is lent for writing: plain PyTorch's values, whatever it is."""

from __future__ import annotations

import copy

import pytest
import torch
from doubles_sharded import Sharded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from tiermem.errors import TiermemError

COUNT = 4


def square() -> nn.Module:
    return nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(COUNT)))


# For each parameter whose values it is given, if not new ones, and whether turned.
CHANGES = st.lists(st.tuples(st.integers(0, COUNT), st.booleans()), min_size=COUNT, max_size=COUNT)


def change(model: nn.Module, changes: list[tuple[int, bool]]) -> None:
    before = [*(parameter.data for parameter in model.parameters()), torch.arange(9.0).view(3, 3)]
    for parameter, (source, turned) in zip(model.parameters(), changes, strict=True):
        parameter.data = before[source].t() if turned else before[source]


@settings(max_examples=60)
@given(changes=CHANGES, together=st.booleans(), inference=st.booleans())
@example(changes=[(0, False), (0, False), (3, False), (3, False)], together=False, inference=False)
def test_parameters_are_given_each_others_values(
    changes: list[tuple[int, bool]], together: bool, inference: bool
) -> None:
    plain = square()
    model = copy.deepcopy(plain)
    sharded = Sharded(model, units=[model] if together else None)
    change(plain, changes)
    reported: dict[int, torch.Tensor] = {}
    units = range(len(sharded.layouts))
    with torch.inference_mode(mode=inference):
        with sharded.lend(units, written=lambda _, slot, values: reported.update({slot.parameter: values.clone()})):
            change(model, changes)
    assert sharded.leased() == []
    for number, (name, expected) in enumerate(plain.named_parameters()):
        assert torch.equal(sharded.value(name), expected)
        if not torch.equal(expected, sharded.masters[number].view(3, 3)):
            assert torch.equal(reported[number].view(3, 3), expected)


def alone(values: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(values)
    return model


def test_values_turned_in_some_dimensions_begin_where_their_own_do() -> None:
    values = torch.arange(18.0).view(2, 3, 3)
    model = alone(values.clone())
    sharded = Sharded(model)
    with sharded.lend([0], written=lambda *_: None):
        model.weight.data = model.weight.data.transpose(1, 2)
    assert torch.equal(sharded.value("weight"), values.transpose(1, 2))


def test_the_same_bits_in_another_dtype_are_other_values() -> None:
    model = alone(torch.ones(3, dtype=torch.bfloat16))
    sharded = Sharded(model, dtype=torch.bfloat16)
    with pytest.raises(TiermemError, match=r"torch\.float16 .*expected .*torch\.bfloat16"):
        with sharded.lend([0], written=lambda *_: None):
            model.weight.data = model.weight.data.view(torch.float16)


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1, 3), (0, 3)])
def test_the_stride_of_a_dimension_of_one_says_nothing(shape: tuple[int, ...]) -> None:
    model = alone(torch.ones(shape))
    sharded = Sharded(model)
    with sharded.lend([0]):
        stride = [7 if size == 1 else stride for size, stride in zip(shape, model.weight.stride(), strict=True)]
        model.weight.data = model.weight.data.as_strided(shape, stride)
    assert torch.equal(sharded.value("weight"), torch.ones(shape))
