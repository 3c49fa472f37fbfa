"""How far a run looks ahead, as people are told.

Owns the record and its one line of text. Does not know who chose the number. Guarantees that what was planned at first
is in it as well as what is in use.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiermem.memory.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Bytes fetched ahead of the computation into host memory at most: now, as planned at first, why it is so."""

    nbytes: int
    planned: int
    reason: str

    def describe(self) -> str:
        """Return the record as a line of text."""
        before = "" if self.nbytes == self.planned else f", planned {format_bytes(self.planned)}"
        return f"{format_bytes(self.nbytes)}{before} ({self.reason})"
