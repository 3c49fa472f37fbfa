"""Fewer than all combinations of several choices, and yet each two of them together."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
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
