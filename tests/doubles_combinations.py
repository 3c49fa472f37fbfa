"""Fewer than all combinations of several choices: of three any two values meet, of two each one half of the others."""

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


def half_of(first: Iterable[Any], second: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Every other combination of the two, like the black squares of a chessboard, the same each time.

    Each value meets half of the others. All combinations where the environment asks for them.
    """
    board = [(row, column) for row in enumerate(first) for column in enumerate(second)]
    return [(one, two) for (row, one), (column, two) in board if EVERY in os.environ or (row + column) % 2 == 0]
