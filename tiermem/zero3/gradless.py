"""What calls from outside use without gradients, from one thing computed with them to the next.

Owns whether that is an evaluation, which uses something again, and what this goes round in. Does not know whether what
is used once each belongs to the step (`order.py`). Guarantees that it does not grow with what is evaluated.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Used = TypeVar("Used", bound=Hashable)


class Gradless(Generic[Used]):
    """What is used in a row without gradients."""

    def __init__(self) -> None:
        # In order, each once. In an evaluation: what is not of its round, and was used since anything of the round was.
        self._used: dict[Used, None] = {}
        self._round: frozenset[Used] = frozenset()
        self.evaluates = False
        self.rested = False  # whether units were written by hand since the last of it

    def __bool__(self) -> bool:
        return self.evaluates or bool(self._used)

    @property
    def used(self) -> tuple[Used, ...]:
        """In order, each once; nothing in an evaluation."""
        return () if self.evaluates else tuple(self._used)

    def note(self, used: Used) -> Sequence[Used]:
        """Note what is used; returns what the evaluation goes round in from now on, if that begins with it.

        What is used again goes round, until others are used again and none of these in between.
        """
        if used in self._round:
            self._used.clear()
        elif used in self._used:
            before = list(self._used)
            again = before[before.index(used) :]
            self._round = frozenset(again)
            self._used.clear()
            self.evaluates = True
            return again
        else:
            self._used[used] = None
        return ()

    def end(self) -> None:
        """Something is computed with gradients."""
        self._used.clear()
        self._round = frozenset()
        self.evaluates = False
