"""What the next step is like where steps of several kinds take turns, such as a discriminator's and a generator's.

Owns the last example of each kind, and in which order the last steps came. Does not know what steps are, but asks
whether two are of a kind. Guarantees that the step behind one whose turn is unknown is expected to be like it, and that
what is kept are examples of a few steps, however many come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

# Steps that a round has at most; each has to be seen twice in its place.
_ROUND = 8

Step = TypeVar("Step")


class Turns(Generic[Step]):
    """Of steps that end: `expected` is what the next one is like; None: nobody knows."""

    def __init__(self, kind: Callable[[Step], object]) -> None:
        """`kind(step)`: what is equal of steps of a kind."""
        self.expected: Step | None = None
        self._kind = kind
        self._numbers: deque[int] = deque(maxlen=2 * _ROUND)  # of the kinds of the last steps
        self._latest: dict[int, tuple[object, Step]] = {}  # with its kind, by number

    def end(self, step: Step) -> None:
        """This one has ended. A round that has gone twice in a row goes on, else the next is of the same kind."""
        kind, unused = self._kind(step), max(self._latest, default=0) + 1
        number = next((known for known, (other, _) in self._latest.items() if other == kind), unused)
        self._numbers.append(number)
        self._latest[number] = kind, step
        self._latest = {known: latest for known, latest in self._latest.items() if known in self._numbers}
        numbers = list(self._numbers)
        for length in range(len(numbers) // 2, 1, -1):
            if numbers[-length:] == numbers[-2 * length : -length]:
                _, self.expected = self._latest[numbers[-length]]
                return
        self.expected = step
