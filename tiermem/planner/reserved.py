"""How many copies of what training changes have room on disk.

Owns the rule, which the run, its plan and the check of free disk space before it ask alike. Does not know sizes, files
or who writes. Guarantees that what is planned to fit is what a run reserves.
"""

from __future__ import annotations


def wanted_copies(update: str, *, commits: bool) -> int:
    """How many copies of PARAM and STATE a new space has room for, with `Config(update=)`.

    The current one; one more for the commit before, if there are to be commits; and one more for what is updated early
    and may be taken back, if that is asked for. "backward" is taken to ask for it, since it is not known yet whether an
    optimizer will clip; where none does, that room is never written to. "auto" asks for none: it updates early only
    where the others leave room, which is before the first commit and after a commit that was made of the step before.
    """
    return 1 + commits + (update == "backward")
