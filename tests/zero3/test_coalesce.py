"""Which small units become one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from doubles_combinations import number_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from tiermem.errors import ConfigError
from tiermem.zero3.coalesce import Part, coalesced, small_nbytes
from tiermem.zero3.units import Member, Place, find_units

KIB, MIB = 1 << 10, 1 << 20


def part(name: str, numels: list[int], *, trained: bool, root: nn.Module | None = None, kept: bool = False):
    owner = nn.Module()
    for index, numel in enumerate(numels):
        owner.register_parameter(f"p{index}", nn.Parameter(torch.empty(numel, device="meta"), requires_grad=trained))
    members = tuple(Member(index, (Place(owner, f"p{index}", f"{name}.p{index}"),)) for index in range(len(numels)))
    return Part(name, root or owner, members, "", kept)


PARTS = st.lists(
    st.tuples(st.lists(st.integers(1, 300), min_size=1, max_size=3), st.booleans(), st.booleans(), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(max_examples=number_of(80, 200))
@given(PARTS, st.integers(0, 4000))
@example([([1], trained, False, False) for trained in (True, False, False, True)], 4000)
def test_groups_are_rows_of_one_kind_within_the_size(drawn, most):
    parts = [part(str(n), numels, trained=trained, kept=kept) for n, (numels, trained, kept, _) in enumerate(drawn)]
    asked = {id(each.root) for each, (*_, wish) in zip(parts, drawn, strict=True) if wish}
    groups = coalesced(parts, most, torch.bfloat16, asked=asked)
    assert [each for group in groups for each in group] == parts
    for group in groups:
        if len(group) > 1:
            members = [member.parameter for each in group for member in each.members]
            assert sum(2 * parameter.numel() for parameter in members) <= most
            assert len({parameter.requires_grad for parameter in members}) == 1
            assert not any(each.kept or id(each.root) in asked for each in group)
    # As few as a walk along the row makes: no two neighbours that could have been one.
    for one, other in pairwise(groups):
        both = [*one, other[0]]
        free = all(not each.kept and id(each.root) not in asked for each in both)
        kinds = {member.parameter.requires_grad for each in both for member in each.members}
        nbytes = sum(2 * member.parameter.numel() for each in both for member in each.members)
        assert not free or len(kinds) > 1 or nbytes > most


def test_parts_that_are_trained_and_frozen_stay_apart():
    parts = [part(name, [4, 4], trained=True) for name in "abc"]
    for each in parts[:2]:
        each.members[1].parameter.requires_grad_(False)
    assert [[each.name for each in group] for group in coalesced(parts, MIB, None, asked=())] == [["a"], ["b"], ["c"]]


def test_parts_of_one_root_stay_apart():
    root = nn.Module()
    parts = [
        part("a", [4], trained=True, root=root),
        part("b", [4], trained=True, root=root),
        part("c", [4], trained=True),
    ]
    assert [len(group) for group in coalesced(parts, MIB, None, asked=set())] == [1, 1, 1]


@pytest.mark.parametrize(
    ("coalesce", "budget", "committed", "expected"),
    [
        ("auto", 512 * MIB, None, MIB),
        ("auto", 8 * MIB, None, 64 * KIB),
        ("auto", 8 * MIB, 0, 0),
        ("auto", 8 * MIB, 5 * KIB, 5 * KIB),
        (0, 512 * MIB, MIB, 0),
        ("3MiB", 8 * MIB, None, 3 * MIB),
        (77, 8 * MIB, 5, 77),
    ],
)
def test_how_small(coalesce, budget, committed, expected):
    assert small_nbytes(coalesce, budget, committed) == expected


@pytest.mark.parametrize("wrong", ["many", True, -1, 1.5, None])
def test_what_is_no_size_is_refused(wrong):
    with pytest.raises(ConfigError, match="coalesce"):
        small_nbytes(wrong, MIB)


def convolutions() -> nn.Sequential:
    """A row of modules that no ModuleList holds: each would be a unit."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 64, 3), nn.Linear(64, 5))


def test_a_model_of_small_modules():
    names = [unit.name for unit in find_units(convolutions()).units]
    assert names == ["0", "1", "3", "4"]
    divided = find_units(convolutions(), small=MIB)
    assert [unit.name for unit in divided.units] == ["0, 1, 3, 4"]
    assert [type(module).__name__ for module, _ in divided.units[0].parts] == [
        "Conv2d",
        "BatchNorm2d",
        "Conv2d",
        "Linear",
    ]
    assert {point.units for point in divided.points} == {(0,)}
    assert divided.small == MIB


def test_the_size_is_counted_in_the_dtype_of_pages():
    model = convolutions().double()
    bfloat16 = sum(2 * parameter.numel() for parameter in model.parameters())
    assert len(find_units(model, small=bfloat16, dtype=torch.bfloat16).units) == 1
    assert len(find_units(model, small=bfloat16 - 1, dtype=torch.bfloat16).units) == 2
    assert len(find_units(model, small=bfloat16).units) > 1


def test_numbers_that_are_not_floating_keep_their_size():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).requires_grad_(False)
    model[1].weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    nbytes = 16 * 2 + 16
    assert len(find_units(model, small=nbytes, dtype=torch.bfloat16).units) == 1
    assert len(find_units(model, small=nbytes - 1, dtype=torch.bfloat16).units) == 2


def test_small_layers_are_coalesced_unless_the_user_asks_for_them():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    assert [unit.name for unit in find_units(model, small=MIB).units] == ["layers.0, layers.1, layers.2"]
    assert len(find_units(model, "Linear", small=MIB).units) == 3


def test_what_the_user_asks_for_stays():
    model = convolutions()
    assert [unit.name for unit in find_units(model, [model[1]], small=MIB).units] == ["0", "1", "3, 4"]
