"""Fewer than all cases: any two values of several choices meet, each value of two half of the others, of one some."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

EVERY = "TIERMEM_EVERY_COMBINATION"


def pairs_of(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of `choices`, the same each time, in which any two values of two choices meet.

    The first two choices are the longest, so that the others' values can be dealt out over their combinations. All
    combinations where the environment asks for them.
    """
    if EVERY in os.environ:
        return list(itertools.product(*choices))
    first, second, *others = choices
    if any(len(other) > min(len(first), len(second)) for other in others) or len(others) > 1:
        raise ValueError("expected three choices at most, the shortest one last")
    return [
        (one, two, *(other[(row + column) % len(other)] for other in others))
        for row, one in enumerate(first)
        for column, two in enumerate(second)
    ]


def some_of(few: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """`few`; with the others where the environment asks for all."""
    return [*few, *(others if EVERY in os.environ else [])]


def each_of(first: Iterable[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Each value of the first choice with one combination of the others, all of them in turn.

    All combinations where the environment asks for them.
    """
    if EVERY in os.environ:
        return list(itertools.product(first, *others))
    return [(value, *rest) for value, rest in zip(first, itertools.cycle(itertools.product(*others)), strict=False)]


def in_turn(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Each value of each choice once at least: as many combinations as the longest choice has values.

    All combinations where the environment asks for them.
    """
    values = [list(choice) for choice in choices]
    if EVERY in os.environ:
        return list(itertools.product(*values))
    return [tuple(each[number % len(each)] for each in values) for number in range(max(map(len, values)))]


def number_of(few: int, more: int) -> int:
    """`few` examples, rounds and so on; `more` where the environment asks for all combinations."""
    return more if EVERY in os.environ else few


def half_of(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every other combination, like the black squares of a chessboard, the same each time.

    Of two choices each value meets half of the others, of more any two values meet. All combinations where the
    environment asks for them.
    """
    return part_of(2, *choices)


def part_of(share: int, *choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """As `half_of`, the `share`-th part: along each choice every so many of its values, beginning at another one."""
    board = itertools.product(*(list(enumerate(choice)) for choice in choices))
    left = (squares for squares in board if EVERY in os.environ or sum(number for number, _ in squares) % share == 0)
    return [tuple(value for _, value in squares) for squares in left]
