"""A lease that is asked for before it is needed, so that room is made meanwhile.

Owns the one request that is open. Does not know what it is for, nor when that comes. Guarantees that a request which is
not taken is given up.
"""

from __future__ import annotations

from tiermem.pager.lease import PendingLease


class AskedAhead:
    """The request for a unit whose turn comes; one at a time. Used from the compute thread only."""

    def __init__(self) -> None:
        self._asked: tuple[int, PendingLease] | None = None

    @property
    def is_open(self) -> bool:
        """Whether something was asked for and not taken."""
        return self._asked is not None

    def put(self, unit: int, pending: PendingLease) -> None:
        """`pending` was asked for the unit; nothing else may be open."""
        self._asked = unit, pending

    def take(self, unit: int) -> PendingLease | None:
        """What was asked for the unit, to be waited for; what was asked for another one is given up."""
        asked, self._asked = self._asked, None
        if asked is None:
            return None
        if asked[0] != unit:
            asked[1].give_up()
            return None
        return asked[1]

    def give_up(self) -> None:
        """What was asked for is not wanted."""
        if self._asked is not None:
            self._asked[1].give_up()
            self._asked = None
