"""How many copies of what training changes have room on disk.

Owns the rule, which the run, its plan and the check of free disk space before it ask alike. Does not know pages, files
or who writes. Guarantees that what is planned to fit is what a run reserves.
"""

from __future__ import annotations

from collections.abc import Sequence

# The part of what training takes on disk, one in so many, up to which what is not trained has as many copies.
_LITTLE = 5


def wanted_copies(update: str, *, commits: bool) -> int:
    """How many copies of PARAM and STATE a new space has room for, with `Config(update=)`.

    The current one; one more for the commit before, if there are to be commits; and one more for what is updated early
    and may be taken back, if that is asked for. "backward" is taken to ask for it, since it is not known yet whether an
    optimizer will clip; where none does, that room is never written to. "auto" asks for none: it updates early only
    where the others leave room, which is before the first commit and after a commit that was made of the step before.
    """
    return 1 + commits + (update == "backward")


def copied_nbytes(copies: int, *, total: int, changing: int, frozen: Sequence[int]) -> int:
    """Bytes on disk of pages that take `total` once, with `copies` of those that training changes.

    `changing`: of the total what PARAM and STATE pages take, without `frozen`: the parameters of each unit that is not
    trained. They may be written all the same (a teacher that follows), and have as many copies where that takes little.
    A base much larger than what is trained has one, and room for another of its largest unit.
    """
    if copies == 1:
        return total
    wanted = total + (copies - 1) * changing
    little = sum(frozen) <= wanted // _LITTLE
    return wanted + ((copies - 1) * sum(frozen) if little else max(frozen))
