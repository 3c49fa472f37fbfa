"""Where the bytes of a unit come from when it is gathered.

Owns the leases behind a gathered unit: its own page, or a transient page into which the shards of all ranks have come.
Does not know `param.data` or when a unit is due. Guarantees that a gathered unit's bytes stay where they are until it
is released, that what was written into them is in this rank's page afterwards, and that one unit is fetched ahead at
most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiermem.future import Future
from tiermem.pager.lease import Lease
from tiermem.pager.page import Intent, PageKey
from tiermem.pager.pager import Pager
from tiermem.zero3.conductor import Act, Conductor, Operation
from tiermem.zero3.engine import viewers
from tiermem.zero3.layout import UnitLayout
from tiermem.zero3.shards import Shard

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class UnitSource:
    """Gives out units by number; one that fetches nothing ahead only knows how to take them."""

    _ahead: tuple[int, Future[Any]] | None = None

    def take(self, unit: int, *, writable: bool) -> HeldUnit:
        """Hold a unit; waits. Collective: all ranks take the same units in the same order."""
        raise NotImplementedError

    def start(self, unit: int) -> None:
        """Begin to fetch the unit that will be taken next. Does not wait; another one fetched ahead is given up."""

    @property
    def ahead(self) -> int | None:
        """The unit that is fetched ahead, if there is one."""
        return None if self._ahead is None else self._ahead[0]

    def give_up(self) -> None:
        """Give back what was fetched ahead and not taken: it may change."""

    def changed(self, unit: int) -> None:
        """The ranks update their parts of this unit; all of them say so, for the same units."""


class Leased:
    """A unit whose bytes are one page.

    `base`: all of them, 1-D uint8, beginning their storage. `viewers`: how many hold on to them while nobody but the
    lease does.
    """

    __slots__ = ("_lease", "base", "viewers")

    def __init__(self, lease: Lease, key: PageKey) -> None:
        """Takes the lease over: it is given back if this fails, too."""
        self._lease = lease
        try:
            self.base = lease.tensor(key)
            self.viewers = viewers(self.base)
        except BaseException:
            lease.release()
            raise

    def release(self) -> None:
        """Give it back."""
        self.base = _NOTHING  # the frame is free from here on
        self._lease.release()


class LocalUnits(UnitSource):
    """One rank: the page is the unit, and the pager's own look-ahead, nobody's business, is all there is to fetch."""

    def __init__(
        self, pager: Pager, layouts: Sequence[UnitLayout], *, before: Callable[[int], None] = lambda _: None
    ) -> None:
        """`before(unit)`: called before a unit is taken; lets go of whatever need not be held beside it."""
        self._pager = pager
        self._before = before
        self._keys = tuple(layout.key for layout in layouts)

    def take(self, unit: int, *, writable: bool) -> HeldUnit:
        """Lease the unit's page."""
        self._before(unit)  # on a device, where frames cannot be moved, nothing needless lies in the way of this one
        key = self._keys[unit]
        return Leased(self._pager.lease([key], Intent.WRITE if writable else Intent.READ), key)


class _Gathered:
    """A unit in its transient page; `base` and `viewers` as of `Leased`."""

    def __init__(self, pager: Pager, shard: Shard, lease: Lease) -> None:
        self.base = lease.tensor(shard.gathered_key)
        # Now, before the exchange: the transport may look at the bytes for a moment longer than its answer takes.
        self.viewers = viewers(self.base)
        self._pager = pager
        self._shard = shard
        self._lease = lease
        self.writable = False

    def came(self) -> None:
        """All ranks' parts have been asked for, on the issuer's thread."""
        self._lease.hand_over()

    def arrived(self) -> _Gathered:
        """On the thread that computes: what it asks of a device from now on comes after the gathering."""
        self._lease.tensor(self._shard.gathered_key)
        return self

    def release(self) -> None:
        """Keep this rank's part if it may have been written; every rank keeps its own."""
        try:
            if self.writable:
                key = self._shard.layout.key
                with self._pager.lease([key], Intent.WRITE) as own:
                    for mine, whole in sections(self._shard, own.tensor(key), self.base):
                        start = self._shard.rank * mine.numel()
                        mine.copy_(whole[start : start + mine.numel()])
        finally:
            self.base = _NOTHING
            self._pager.start_discard([self._shard.gathered_key])
            self._lease.release()


HeldUnit = Leased | _Gathered
"""A unit's bytes, held."""


@dataclass(frozen=True, slots=True)
class RankAccess:
    """What a source of units over several ranks works with.

    `needed(unit)` waits until no update of the unit is pending; the issuer calls it too if `roomy`: whether there is
    room for a unit on its way beside the one that is computed.
    """

    pager: Pager
    shards: Sequence[Shard]
    conductor: Conductor
    needed: Callable[[int], None]
    roomy: bool


class RankUnits(UnitSource):
    """Several ranks, each with a shard of every unit, which is gathered anew every time."""

    _ahead: tuple[int, Future[_Gathered]] | None = None

    def __init__(self, access: RankAccess) -> None:
        self._access = access

    def take(self, unit: int, *, writable: bool) -> HeldUnit:
        """Gather the unit from all ranks, or wait for it if that has begun."""
        ahead = self._ahead
        if ahead is not None and ahead[0] == unit and not writable:
            self._ahead = None
            return self._access.conductor.wait(ahead[1]).arrived()
        self.give_up()
        return self._access.conductor.run(self._gathering(unit, writable=writable)).arrived()

    def start(self, unit: int) -> None:
        """Begin to gather a unit ahead, where there is room for that."""
        if self._access.roomy and self.ahead != unit:
            self.give_up()
            self._ahead = unit, self._access.conductor.start(self._gathering(unit, writable=False))

    def give_up(self) -> None:
        """Wait for what is fetched ahead and let go of it: all ranks have begun it, so it cannot be called off."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._access.conductor.ended_well(ahead[1]):
            ahead[1].result().release()

    def _gathering(self, unit: int, *, writable: bool) -> Operation[_Gathered]:
        shard = self._access.shards[unit]
        own = shard.layout.key

        def prepare() -> tuple[Lease, _Gathered]:
            self._access.needed(unit)
            mine = self._access.pager.lease([own], Intent.READ)
            try:
                gathered = self._access.pager.lease([shard.gathered_key], Intent.FRESH)
            except BaseException:
                mine.release()
                raise
            return mine, _Gathered(self._access.pager, shard, gathered)

        def action(held: tuple[Lease, _Gathered]) -> _Gathered:
            mine, gathered = held
            try:
                for part, whole in sections(shard, mine.tensor(own), gathered.base):
                    self._access.conductor.grid.shards.all_gather(whole, part)
            except BaseException:
                gathered.release()
                raise
            finally:
                mine.release()
            gathered.came()
            gathered.writable = writable
            return gathered

        def undo(held: tuple[Lease, _Gathered] | None) -> None:
            for each in held or ():
                each.release()

        return Operation(Act.GATHER, unit, prepare, action, undo)


def sections(shard: Shard, own: torch.Tensor, whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The trainable and the frozen section, where there is one: (this rank's part in its page, the whole)."""
    layout = shard.layout
    trainable = layout.part_numel * layout.dtype.itemsize
    begin, frozen = layout.frozen_begin, layout.frozen_part
    found = []
    if trainable:
        start = shard.page_begin * layout.dtype.itemsize
        found.append((own[start : start + trainable], whole[: trainable * layout.ranks]))
    if frozen:
        start = begin + shard.rank * frozen if shard.whole else shard.frozen_offset
        found.append((own[start : start + frozen], whole[begin : begin + frozen * layout.ranks]))
    return found
