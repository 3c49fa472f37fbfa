"""Parameters made by turning, dividing or joining tensors of a file: which rows go where, and what does not fit."""

from __future__ import annotations

import pytest
import torch

from tiermem.checkpoint.pieces import Assembly, Divide, Join, Operation, Origin, Recipe, Stack, Transpose, assemble
from tiermem.checkpoint.tensor_file import TensorInfo

Shape = tuple[int, ...]


def assembled(operation: Operation, found: Shape, *shapes: Shape, names: tuple[str, ...] = ("x",)) -> list[Assembly]:
    """What becomes of tensors of one shape in bfloat16, each at byte 100; two targets where it is divided."""
    targets = ("a", "b") if isinstance(operation, Divide) else ("a",)
    recipe = Recipe(("x",), targets, (operation,))
    infos = {name: TensorInfo(name, torch.bfloat16, found, 100) for name in names}
    return assemble(recipe, [Origin(name, "a", recipe) for name in names], infos, shapes)


def test_a_square_tensor_is_turned_though_it_would_fit_as_it_is():
    (found,) = assembled(Transpose(0, 1), (3, 3), (3, 3))
    assert found.pieces[0].turned == (0, 1)
    (found,) = assembled(Transpose(0, 1, if_needed=True), (3, 3), (3, 3))
    assert found.pieces[0].turned is None
    (found,) = assembled(Transpose(0, 1, if_needed=True), (2, 3), (3, 2))
    assert (found.pieces[0].turned, found.shapes) == ((0, 1), [])


def test_what_has_not_the_dimensions_is_not_turned():
    (found,) = assembled(Transpose(0, 1), (3,), (3,))
    assert (found.pieces[0].turned, found.shapes) == (None, [])
    (found,) = assembled(Transpose(0, 2), (2, 3, 4), (3, 2))
    assert found.shapes == ["x (expected [3, 2], found [2, 3, 4])"]


def test_rows_of_one_tensor_go_to_each_target():
    first, second = assembled(Divide(equal=False), (5, 2), (2, 2), (3, 2))
    assert [(each.pieces[0].info.shape, each.pieces[0].info.offset) for each in (first, second)] == [
        ((2, 2), 100),
        ((3, 2), 100 + 2 * 2 * 2),
    ]
    assert first.shapes == second.shapes == first.surplus == []


def test_rows_of_another_length_than_a_target_has_are_named():
    first, second = assembled(Divide(equal=False), (5, 2), (2, 2), (3, 4))
    assert first.shapes == []
    assert second.shapes == ["x (expected [3, 4], found [3, 2])"]


@pytest.mark.parametrize(
    ("equal", "found", "shapes", "named"),
    [
        (False, (4, 2), [(2, 2), (3, 2)], "x (expected [5, 2], found [4, 2])"),
        (True, (5, 2), [(2, 2), (3, 2)], "x (expected [5, 2], found [5, 2])"),
    ],
)
def test_rows_that_do_not_go_round_are_named(equal: bool, found: Shape, shapes: list[Shape], named: str):
    first, second = assembled(Divide(equal=equal), found, *shapes)
    assert first.shapes == [named]
    assert first.pieces == second.pieces == ()


@pytest.mark.parametrize("shapes", [[(4, 2)], [(4, 2), ()]])
def test_what_has_not_all_targets_in_the_model_is_left_over(shapes: list[Shape]):
    assert [each.surplus for each in assembled(Divide(equal=False), (4, 2), *shapes)] == [["x"], ["x"]]


@pytest.mark.parametrize("operation", [Transpose(0, 1), Divide(equal=True)])
def test_further_tensors_of_a_recipe_for_one_are_left_over(operation: Operation):
    found = assembled(
        operation, (2, 2), (2, 2) if isinstance(operation, Transpose) else (1, 2), (1, 2), names=("x", "y")
    )
    assert [each.pieces[0].info.name for each in found] == ["x"] * len(found)
    assert found[0].surplus == ["y"]


def merged(operation: Operation, found: Shape, shape: Shape, *further: Operation) -> Assembly:
    """What becomes of two tensors of one shape and without numbers."""
    recipe = Recipe(
        ("x", "y") if isinstance((operation, *further)[-1], Join) else ("x",), ("a",), (operation, *further)
    )
    infos = {name: TensorInfo(name, torch.bfloat16, found, 0) for name in ("x", "y")}
    origins = [Origin(name, "a", recipe, number % len(recipe.sources)) for number, name in enumerate(infos)]
    (assembly,) = assemble(recipe, origins, infos, [shape])
    return assembly


def test_what_is_joined_has_to_fill_the_parameter():
    assert merged(Join(0), (2, 2), (4, 2)).shapes == []
    assert merged(Join(0), (2, 2), (5, 2)).shapes == ["x and others (expected [5, 2] together, found 8 elements)"]

    def named(found: str) -> list[str]:
        return [f"{name} (expected [2, 2], found {found})" for name in "xy"]

    assert merged(Join(0), (2, 3), (4, 2)).shapes == named("[2, 3]")
    assert merged(Join(0), (3, 2), (4, 2)).shapes == named("[3, 2]"), "one behind the other they are too long"
    assert merged(Join(1), (2,), (2, 4)).shapes == named("[2]")


def test_what_is_stacked_without_numbers_is_counted():
    assert merged(Stack(0), (2, 2), (2, 2, 2)).shapes == []
    for count in (1, 3):
        named = merged(Stack(0), (2, 2), (count, 2, 2)).shapes
        assert named == [f"x and those like it (expected {count}, found 2)"]


@pytest.mark.parametrize("operations", [(Stack(1),), (Join(1),), (Stack(1), Join(0)), (Stack(0), Join(1))])
def test_what_has_not_the_dimension_to_merge_along_is_named(operations: tuple[Operation, ...]) -> None:
    assembly = merged(operations[0], (2,), (2,), *operations[1:])
    assert assembly.shapes == ["x (a part of what is to be [2])"]
    assert assembly.pieces == ()


def numbered(operation: Operation, names: list[str], shape: Shape) -> Assembly:
    """What becomes of tensors of two elements with a number in their names."""
    recipe = Recipe((r"x\.*\.w",), ("a",), (operation,))
    found = (2,) if isinstance(operation, Stack) else (1, 2)
    infos = {name: TensorInfo(name, torch.bfloat16, found, 0) for name in names}
    origins = [Origin(name, "a", recipe, 0, int(name.split(".")[1])) for name in names]
    (assembly,) = assemble(recipe, origins, infos, [shape])
    return assembly


@pytest.mark.parametrize("operation", [Stack(0), Join(0)])
@pytest.mark.parametrize("first", [0, 1, 9])
def test_numbers_may_begin_anywhere(operation: Operation, first: int) -> None:
    names = [f"x.{number}.w" for number in range(first, first + 3)]
    assembly = numbered(operation, names, (3, 2))
    assert assembly == Assembly(assembly.pieces)
    values = torch.zeros(3, 2)
    for piece in assembly.pieces:
        piece.place(values).fill_(1 + names.index(piece.info.name))
    assert values[:, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("operation", "numbers", "count", "missing", "surplus"),
    [
        (Stack(0), (0, 1, 3), 3, [2], [3]),
        (Stack(0), (0, 1, 3), 4, [2], []),
        (Stack(0), (1, 2), 3, [0], []),
        (Stack(0), (1, 2, 3), 2, [0], [2, 3]),
        (Join(0), (1, 3), 3, [2], []),
    ],
)
def test_numbers_have_no_gaps(
    operation: Operation, numbers: tuple[int, ...], count: int, missing: list[int], surplus: list[int]
) -> None:
    assembly = numbered(operation, [f"x.{number}.w" for number in numbers], (count, 2))
    assert assembly.missing == [f"x.{number}.w" for number in missing]
    assert assembly.surplus == [f"x.{number}.w" for number in surplus]
    assert assembly.shapes == []


def test_a_number_that_is_there_twice_is_taken_once() -> None:
    assembly = numbered(Stack(0), ["x.0.w", "x.1.w", "y.1.w"], (2, 2))
    assert [piece.info.name for piece in assembly.pieces] == ["x.0.w", "x.1.w"]
    assert assembly.surplus == ["y.1.w"]


@pytest.mark.parametrize(("found", "shapes"), [(3, []), (5, ["x.0.w (expected [2], found [5])"])])
def test_beside_what_is_missing_the_rest_is_looked_at(found: int, shapes: list[str]) -> None:
    recipe = Recipe((r"x\.*\.w", r"x\.*\.(v|u)"), ("a",), (Stack(0), Join(1)))
    infos = {"x.0.w": TensorInfo("x.0.w", torch.bfloat16, (found,), 0)}
    (assembly,) = assemble(recipe, [Origin("x.0.w", "a", recipe, 0, 0)], infos, [(2, 4)])
    assert assembly.missing == ["x.1.w", "x.0.(v|u)", "x.1.(v|u)"]
    assert assembly.shapes == shapes


def test_what_has_no_plain_name_is_said_to_be_of_its_parameter() -> None:
    recipe = Recipe((r"x\.*\.(v|u)",), ("a",), (Stack(0),))
    infos = {"x.0.u": TensorInfo("x.0.u", torch.bfloat16, (2,), 0)}
    (assembly,) = assemble(recipe, [Origin("x.0.u", "a", recipe, 0, 0)], infos, [(2, 2)])
    assert assembly.missing == ["x.1.(v|u) of a"]
