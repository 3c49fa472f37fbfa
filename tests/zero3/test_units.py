"""How a model is divided."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tiermem.errors import ConfigError
from tiermem.zero3.units import find_units


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8)
        self.head.weight = self.embed.weight


def names(model, wanted=None):
    return [unit.name for unit in find_units(model, wanted).units]


def test_children_of_module_lists_and_what_is_left():
    assert names(Tied()) == ["embed", "layers.0", "layers.1", "norm", "head"]


def borrowed(divided, number):
    """What the module of a unit reads besides its own."""
    (units,) = [point.units for point in divided.points if point.module is divided.units[number].root]
    return tuple(unit for unit in units if unit != number)


def test_tied_parameter_belongs_to_the_first_and_is_borrowed():
    divided = find_units(Tied())
    assert divided.units[0].members[0].names == ("embed.weight", "head.weight")
    assert borrowed(divided, 4) == (0,)
    assert [member.names[0] for member in divided.units[4].members] == ["head.bias"]


def test_every_parameter_belongs_to_one_unit_in_the_order_of_the_model():
    model = Tied()
    divided = find_units(model)
    numbers = [member.number for _, member in divided.members()]
    assert sorted(numbers) == list(range(len(list(model.parameters()))))
    by_number = {member.number: member.parameter for _, member in divided.members()}
    assert [id(by_number[number]) for number in sorted(numbers)] == [id(p) for p in model.parameters()]


def test_wishes():
    model = Tied()
    assert names(model, ["Sequential", model.norm]) == names(model)
    assert names(model, lambda module: module is model.layers[1]) == [
        "embed",
        "layers.0.0",
        "layers.0.2",
        "layers.1",
        "norm",
        "head",
    ]
    assert names(model, [model]) == ["Tied"]
    for wrong in (["Missing"], ["Sequential", "Missing"], [nn.ReLU()], [model.norm, nn.ReLU()], lambda module: False):
        with pytest.raises(ConfigError):
            find_units(model, wrong)


def test_wishes_in_every_form():
    model = Tied()
    assert names(model, model.layers) == names(model, list(model.layers)) == names(model)
    assert names(model, nn.Sequential) == names(model, "Sequential") == names(model, [nn.Sequential]) == names(model)
    assert names(model, model.layers[1]) == names(model, [model.layers[1]]) == names(model, {model.layers[1]})
    assert "layers.0" not in names(model, model.layers[1])


@pytest.mark.parametrize("wanted", [5, [5], [int], int, object(), [None]])
def test_what_is_no_wish_is_refused(wanted):
    with pytest.raises(ConfigError, match="expects modules, classes or their names, or a predicate, found"):
        find_units(Tied(), wanted)


def test_a_unit_inside_another_is_gathered_for_its_own_calls():
    model = Tied()
    divided = find_units(model, [model, model.layers[1]])
    assert [unit.name for unit in divided.units] == ["Tied", "layers.1"]
    assert [borrowed(divided, number) for number in range(2)] == [(), ()]


def test_hints_are_of_the_outermost_modules():
    model = Tied()
    model._no_split_modules = ["Sequential", "Linear"]
    assert names(model) == ["embed", "layers.0", "layers.1", "norm", "head"]


class Called(nn.ModuleList):
    def forward(self, x):
        return x


def test_a_list_that_is_called_is_a_module_like_others():
    model = nn.Module()
    model.blocks = nn.ModuleList([Called([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.ReLU()])
    assert names(model) == ["blocks.0"]
    layers = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))]
    assert names(nn.Sequential(Called(layers))) == ["0.0.0", "0.0.1"]
    assert names(nn.Sequential(nn.ModuleList(layers))) == ["0.0"]


def test_composites_of_torch_inside_a_unit_belong_to_it():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4)) for _ in range(2))
    assert names(model) == ["layers.0", "layers.1"]


def test_composites_of_torch_are_atomic():
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.TransformerEncoderLayer(4, 2, 8), nn.Linear(4, 4))
    assert names(model) == ["0", "1", "2"]
    assert names(model, ["Linear"]) == ["0", "1", "2"]
    assert len(names(nn.Transformer(4, 2, 2, 3, 8, batch_first=True))) == 2 + 3 + 2


def test_module_shared_by_two_layers():
    shared = nn.Linear(4, 4)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Sequential(shared, nn.Linear(4, 4)), nn.Sequential(shared, nn.Linear(4, 4))])
    divided = find_units(model)
    assert borrowed(divided, 1) == (0,)


def test_hook_points_cover_every_module_that_owns_parameters():
    model = Tied()
    points = {id(point.module): point.units for point in find_units(model).points}
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            assert id(module) in points
    assert points[id(model.head)] == (0, 4)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList(nn.ParameterList([torch.ones(2)]) for _ in range(2))


def test_parameters_registered_in_lists():
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.ParameterList([torch.ones(2), torch.ones(3)])

    assert names(Holder()) == ["items"]

    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), Nested()) for _ in range(2))
    model.apart = Nested()
    divided = find_units(model)
    points = {id(point.module): point.units for point in divided.points}
    for layer, units in zip(model.layers, [(0,), (1,)], strict=True):
        assert points[id(layer[1])] == units, "called by itself it reads what its lists hold"
    assert {divided.units[unit].name for unit in points[id(model.apart)]} == {"apart.items.0", "apart.items.1"}


def test_a_frozen_part_that_is_larger_than_what_is_trained_is_a_unit_of_its_own():
    model = Tied()
    model.layers[0][0].requires_grad_(False)  # as much as is trained: it stays
    assert names(model) == names(Tied())
    model.layers[0][2].weight.requires_grad_(False)
    divided = find_units(model)
    assert names(model) == ["embed", "layers.0", "layers.0 (frozen)", "layers.1", "norm", "head"]
    trained, frozen = divided.units[1:3]
    assert [member.names[0] for member in trained.members] == ["layers.0.2.bias"]
    assert [member.names[0] for member in frozen.members] == [
        "layers.0.0.weight",
        "layers.0.0.bias",
        "layers.0.2.weight",
    ]
    assert trained.root is frozen.root is model.layers[0]
    assert (borrowed(divided, trained.number), borrowed(divided, frozen.number)) == ((2,), (1,))
    points = {id(point.module): point.units for point in divided.points}
    assert points[id(model.layers[0])] == (2, 1)
    assert points[id(model.layers[0][0])] == (2,)
    assert points[id(model.layers[0][2])] == (2, 1)
    model.requires_grad_(False)
    assert names(model) == names(Tied())


def test_what_is_frozen_is_measured_in_bytes():
    model = nn.Linear(4, 4)  # 16 elements, of 4 bytes, and 4
    model.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    assert names(model) == ["Linear"]
    model.weight = nn.Parameter(torch.ones(4, 5, dtype=torch.int8), requires_grad=False)
    assert names(model) == ["Linear", "Linear (frozen)"]
