"""What a run takes of its host budget beside pages.

Owns two measured sizes and how much of a budget may go to them. Guarantees that a budget of 64 MiB or less is all for
pages, and no more than an eighth of what is beyond goes to others.
"""

from __future__ import annotations

from tiermem.memory.arena import FRAME_ALIGNMENT
from tiermem.memory.rounding import round_down

# Resident memory, measured on x86-64 with numba 0.66: importing it takes 14 MB, its registries 15, the loops and their
# tables 5, the code of its and LLVM's libraries 10. The record of the latest moves is 13 MB (`tiermem.timeline`).
_LOOPS_NBYTES = 44 << 20
_RECORD_NBYTES = 12 << 20
_ALL_PAGES = 64 << 20
_SHARE = 8


def beside_pages(budget: int, *, compiled: bool) -> int:
    """Bytes of a host budget that are not for pages; `compiled`: whether the update has machine code of its own."""
    taken = _RECORD_NBYTES + (_LOOPS_NBYTES if compiled else 0)
    return round_down(min(taken, max(0, budget - _ALL_PAGES) // _SHARE), FRAME_ALIGNMENT)


def split_budget(budget: int, least: int, *, compiled: bool) -> tuple[int, int]:
    """Bytes of a host budget for pages (whole frame alignments), and those beside them.

    `least`: what pages must have; of a budget that is just enough for them all is theirs.
    """
    beside = beside_pages(budget, compiled=compiled)
    if budget - beside < least:
        beside = 0
    return round_down(budget - beside, FRAME_ALIGNMENT), beside


def budget_with(pages: int, *, compiled: bool) -> int:
    """The smallest host budget of which so many bytes are for pages (whole frame alignments)."""
    budget = pages
    while (missing := pages - (budget - beside_pages(budget, compiled=compiled))) > 0:
        budget += missing
    return budget
