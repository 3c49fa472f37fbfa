"""Where the bytes of a unit come from where every rank has all parameters.

Owns which units other ranks have updated since they were last completed here. Does not know `param.data` or when a unit
is due. Guarantees that a unit which was updated is completed from the other ranks before it is used again, once.
"""

from __future__ import annotations

from tiermem.pager.lease import Lease
from tiermem.pager.page import Intent
from tiermem.zero3.conductor import Act, Operation
from tiermem.zero3.sources import HeldUnit, Leased, RankAccess, UnitSource, sections


class WholeUnits(UnitSource):
    """Several ranks that each have all parameters, and update a part of them (ZeRO's stages 1 and 2)."""

    def __init__(self, access: RankAccess) -> None:
        self._access = access
        self._stale: set[int] = set()

    def changed(self, unit: int) -> None:
        """The ranks update their parts of this unit; all of them say so, for the same units."""
        self._stale.add(unit)

    def take(self, unit: int, *, writable: bool) -> HeldUnit:
        """Lease the unit's page, completed if it was updated."""
        ahead = self._ahead
        if ahead is not None and ahead[0] == unit:
            self._ahead = None
            self._access.conductor.wait(ahead[1])
        else:
            self.give_up()
            if unit in self._stale:
                self._access.conductor.run(self._completing(unit))
        key = self._access.shards[unit].layout.key
        return Leased(self._access.pager.lease([key], Intent.WRITE if writable else Intent.READ), key)

    def start(self, unit: int) -> None:
        """Begin to complete a unit ahead, where there is room for that."""
        if self._access.roomy and unit in self._stale and self.ahead != unit:
            self.give_up()
            self._ahead = unit, self._access.conductor.start(self._completing(unit))

    def give_up(self) -> None:
        """Wait for what is completed ahead: all ranks have begun it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._access.conductor.ended_well(ahead[1])

    def _completing(self, unit: int) -> Operation[None]:
        shard, key = self._access.shards[unit], self._access.shards[unit].layout.key
        self._stale.discard(unit)

        def prepare() -> Lease:
            self._access.needed(unit)
            return self._access.pager.lease([key], Intent.WRITE)

        def action(lease: Lease) -> None:
            try:
                page = lease.tensor(key)
                for part, full in sections(shard, page, page)[:1]:  # what is frozen is everywhere already
                    self._access.conductor.grid.shards.all_gather(full, part)
            except BaseException as error:
                lease.fail(error)
                raise
            lease.release()

        return Operation(Act.GATHER, unit, prepare, action, lambda lease: lease.release() if lease else None)
