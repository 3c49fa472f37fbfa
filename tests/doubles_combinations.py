"""Fewer than all cases: of several choices any two values meet, of two each one half of the others, of one some."""

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


def half_of(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every other combination, like the black squares of a chessboard, the same each time.

    Of two choices each value meets half of the others, of more any two values meet. All combinations where the
    environment asks for them.
    """
    board = itertools.product(*(list(enumerate(choice)) for choice in choices))
    black = (squares for squares in board if EVERY in os.environ or sum(number for number, _ in squares) % 2 == 0)
    return [tuple(value for _, value in squares) for squares in black]
