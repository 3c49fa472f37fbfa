"""Which tensor of a file belongs to which parameter: the rules one by one, and what is said where none applies."""

from __future__ import annotations

import pytest
import torch

from tiermem.checkpoint.naming import Expected, Match, Rules, fits, match
from tiermem.checkpoint.pieces import Divide, Origin, Recipe
from tiermem.checkpoint.tensor_file import TensorInfo

WHOLE, HALF, NUMBERS = torch.float32, torch.float16, torch.int64


def wanted(*names: str, shape: tuple[int, ...] = (2,), dtype: torch.dtype = WHOLE) -> Expected:
    return Expected(names, shape, dtype)


def file(*names: str, shape: tuple[int, ...] = (2,), dtype: torch.dtype = WHOLE) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, dtype, shape, 0) for name in names}


def taken(found: Match) -> dict[str, list[str]]:
    return {name: [piece.info.name for piece in pieces] for name, pieces in found.found.items()}


def test_what_is_there_in_part_is_missing_even_where_parameters_may_be() -> None:
    found = Match()
    found.missing, found.incomplete, found.renamed, found.surplus = ["m"], ["i"], ["r for m"], ["s"]
    assert found.problems() == "missing from the file: m, i; not in the model: s; perhaps renamed: r for m"
    assert found.problems(partial=True) == "missing from the file: i; not in the model: s"


@pytest.mark.parametrize(("count", "end"), [(6, "5"), (7, "5 and 1 more"), (18, "5 and 12 more")])
def test_some_are_named_and_the_rest_counted(count: int, end: str) -> None:
    found = match([wanted(str(number)) for number in range(count)], {}, Rules())
    assert found.problems() == f"missing from the file: 0, 1, 2, 3, 4, {end}"


def test_what_a_model_says_may_be_missing_is_not_missed() -> None:
    expected = [wanted("a.table"), wanted("b")]
    assert match(expected, {}, Rules(may_miss=("table$",))).missing == ["b"]
    assert match(expected, {}, Rules()).missing == ["a.table", "b"]


@pytest.mark.parametrize(("pattern", "surplus"), [("^old", []), ("^new", []), ("^other", ["old.a"])])
def test_what_may_be_left_over_is_known_by_either_name(pattern: str, surplus: list[str]) -> None:
    origins = {"old.a": Origin("old.a", "new.a")}
    assert match([], file("old.a"), Rules(may_be_left_over=(pattern,)), origins).surplus == surplus


@pytest.mark.parametrize(("shape", "renamed"), [((2,), ["layer.weights for layer.weight"]), ((3,), [])])
def test_only_what_has_the_shape_may_have_been_renamed(shape: tuple[int, ...], renamed: list[str]) -> None:
    found = match([wanted("layer.weight")], file("layer.weights", shape=shape), Rules())
    assert (found.missing, found.surplus, found.renamed) == (["layer.weight"], ["layer.weights"], renamed)


def test_of_a_tied_parameter_the_first_name_is_taken_and_the_others_are_compared() -> None:
    both = wanted("a", "b")
    found = match([both], file("b", "a"), Rules())
    assert taken(found) == {"a": ["a"]}
    assert [(of, one.name, other.name) for of, one, other in found.copies] == [(both, "a", "b")]
    assert found.problems() == ""
    assert "b" in match([both], file("a") | file("b", shape=(3,)), Rules()).problems()


@pytest.mark.parametrize(
    ("there", "here", "fit"),
    [
        (WHOLE, HALF, True),
        (HALF, WHOLE, True),
        (NUMBERS, NUMBERS, True),
        (NUMBERS, WHOLE, False),
        (HALF, NUMBERS, False),
    ],
)
def test_numbers_are_converted_within_their_kind(there: torch.dtype, here: torch.dtype, fit: bool) -> None:
    assert (match([wanted("a", dtype=here)], file("a", dtype=there), Rules()).kinds == []) is fit


@pytest.mark.parametrize(
    ("name", "known", "prefix", "there"),
    [
        ("a", "a", "base", True),
        ("a", "base.a", "base", True),
        ("base.a", "a", "base", True),
        ("a", "base.a", "", False),
        ("basea", "a", "base", False),
        ("other.a", "a", "base", False),
    ],
)
def test_a_name_fits_with_the_prefix_added_or_removed(name: str, known: str, prefix: str, there: bool) -> None:
    assert fits(name, {known}, prefix) is there


@pytest.mark.parametrize(
    ("model", "names", "expected", "surplus"),
    [
        (["base.a", "head"], ["a", "head"], {"base.a": ["a"], "head": ["head"]}, []),
        (
            ["a", "b", "base.x"],
            ["base.a", "base.b", "base.x"],
            {"a": ["base.a"], "b": ["base.b"], "base.x": ["base.x"]},
            [],
        ),
        (["a"], ["base.a", "other_head"], {"a": ["base.a"]}, []),
        (["a"], ["a", "other_head"], {"a": ["a"]}, ["other_head"]),
        (["a"], ["z"], {}, ["z"]),
    ],
)
def test_a_head_has_a_prefix_that_its_base_has_not(
    model: list[str], names: list[str], expected: dict[str, list[str]], surplus: list[str]
) -> None:
    found = match([wanted(name) for name in model], file(*names), Rules("base"))
    assert (taken(found), found.surplus) == (expected, surplus)


@pytest.mark.parametrize(
    ("names", "heads", "surplus"),
    [
        (["base.a", "other.a", "other.b"], ["other.a", "other.b"], []),
        (["base.a", "head.b", "base.b"], [], ["head.b", "base.b"]),
        (["other.a"], [], ["other.a"]),  # of another model altogether
        (["a", "other.a"], [], ["other.a"]),  # of a base alone
    ],
)
def test_the_head_of_another_model_is_too_much_only_where_nothing_may_be_missing(
    names: list[str], heads: list[str], surplus: list[str]
) -> None:
    found = match([wanted("base.a"), wanted("head.a")], file(*names), Rules("base"))
    assert (found.heads, found.surplus) == (heads, surplus)
    assert all(name in found.problems() for name in heads)
    assert found.problems(partial=True) == (f"not in the model: {', '.join(surplus)}" if surplus else "")


def test_of_several_that_become_a_parameter_its_own_name_is_taken_and_what_is_as_it_is() -> None:
    renamed = {"old": Origin("old", "w"), "w": Origin("w", "w")}
    found = match([wanted("w")], file("old", "w"), Rules(), renamed)
    assert (taken(found), found.surplus) == ({"w": ["w"]}, ["old"])
    recipe = Recipe(("w",), ("w",), obstacle="a rotation")
    found = match([wanted("w")], file("w", "old"), Rules(), {"w": Origin("w", "w", recipe), "old": renamed["old"]})
    assert (taken(found), found.surplus, found.obstacles) == ({"w": ["old"]}, ["w"], [])


def test_what_cannot_be_streamed_is_named_if_any_of_what_it_becomes_is_wanted() -> None:
    recipe = Recipe(("qkv",), ("q", "k"), obstacle="a rotation")
    found = match([wanted("k")], file("qkv"), Rules(), {"qkv": Origin("qkv", "q", recipe)})
    assert found.obstacles == ["qkv (a rotation, for q)"]
    assert found.missing == []


@pytest.mark.parametrize("rules", [Rules(), Rules(may_be_left_over=("^qkv",))])
@pytest.mark.parametrize("there", ["q", "k"])
def test_rows_for_two_of_which_the_model_has_one_are_a_problem_whatever_may_be_left_over(
    rules: Rules, there: str
) -> None:
    origins = {"qkv": Origin("qkv", "q", Recipe(("qkv",), ("q", "k"), (Divide(equal=False),)))}
    assert match([wanted(there)], file("qkv", shape=(4,)), rules, origins).problems() == "not in the model: qkv"
