"""How often a run commits, and so whether what is written now is likely to be committed.

Owns the guess. Does not know pages or drives. Guarantees nothing: where the guess is wrong, checksums are taken for
nothing, or a commit has to read again what was written without one. Any thread may ask.

Why. A checksum costs a pass over memory at each write, and a program that commits every hundred steps needs that of the
hundredth step only: 5 to 8 % of a step where processors or memory are the limit (benchmarks/MEASURED.md).
"""

from __future__ import annotations

from collections.abc import Callable


class CommitRhythm:
    """Steps from commit to commit. Of one that is not known yet, the next is taken to be after the first step."""

    def __init__(self, steps: Callable[[], int], *, rereads: bool = True) -> None:
        """`steps()`: how many steps are done.

        `rereads`: whether a commit may take as long as reading everything again; if not, any step may be committed.
        """
        self._rereads = rereads
        self._steps = steps
        self._last = steps()
        self._interval = 1
        self._committing = False

    def commit_begins(self) -> None:
        """What is written from now on is written for a commit."""
        self._committing = True

    def commit_written(self) -> None:
        """All that is part of it has been written, or it has failed."""
        done = self._steps()
        self._interval, self._last = max(1, done - self._last), done
        self._committing = False

    def likely(self) -> bool:
        """Whether the next commit is about to come, of what the step under way writes; an eighth early or late."""
        if self._committing or not self._rereads:
            return True
        since, margin = self._steps() - self._last, self._interval // 8
        return self._interval - margin - 1 <= since <= self._interval + margin
