"""Whether "auto" updates under backward.

Owns the rule, as a value that is replaced at the end of each step. Does not know updates, norms or why a step could not
be kept. Guarantees that frequent redoing ends soon, that calm is waited for before it is tried again, and that the
waiting grows when trying fails at once, so that a run which always clips loses next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# A step that is redone reads and writes the state once more, about as much as the whole update hides behind backward
# at best. So more than one in eight is not worth it.
_WINDOW, _TOLERATED = 8, 1
# Calm steps before it is tried again: at first, and at most.
_PATIENCE, _MOST_PATIENCE = 16, 1024


@dataclass(frozen=True, slots=True)
class Choice:
    """What has been seen, and what follows from it.

    Attributes:
        early: whether the next step's updates begin under backward.
        spoiled: for the last few steps since it was turned on, whether each had to be redone.
        calm: steps in a row, since it was turned off, that would not have been redone.
        patience: how many of these turn it on again.
        age: steps since it was turned on.
    """

    early: bool = True
    spoiled: tuple[bool, ...] = ()
    calm: int = 0
    patience: int = _PATIENCE // 2
    age: int = 0

    def after(self, *, kept: bool) -> Choice:
        """The choice for the next step, given whether an early update of this one was, or would have been, kept."""
        if not self.early:
            calm = self.calm + 1 if kept else 0
            if calm >= self.patience:
                return Choice(early=True, patience=self.patience)
            return replace(self, calm=calm)
        spoiled = (*self.spoiled, not kept)[-_WINDOW:]
        age = self.age + 1
        if sum(spoiled) <= _TOLERATED:
            return replace(self, spoiled=spoiled, age=age)
        hasty = age <= 2 * self.patience
        patience = min(2 * self.patience, _MOST_PATIENCE) if hasty else _PATIENCE
        return Choice(early=False, patience=max(patience, _PATIENCE))
