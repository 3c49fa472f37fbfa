"""Edges: how bytes get from one tier to its neighbour.

Owns the chain (which tiers there are, and which edge joins two neighbours) and the edges themselves.
Does not know leases, policy or who waits. Guarantees that every started transfer reports its end exactly once, on
whatever thread it ends, and that an error at the start is raised and reported to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from swap.extents import Extent
from swap.requests import Priority, Request
from tiermem.memory.arena import FRAME_ALIGNMENT, Arena
from tiermem.memory.copies import Done
from tiermem.memory.devices import Device
from tiermem.memory.rounding import round_down, round_up
from tiermem.memory.tiers import Tier
from tiermem.pager.extents import Extents
from tiermem.pager.page import Kind, Lane, Page, PageKey, Transfer


class Edge(Protocol):
    """Moves a page's bytes from one tier to the neighbouring one."""

    def start(self, page: Page, priority: Priority, done: Done) -> Transfer:
        """Start the transfer between the page's two copies; `done(error)` is called once when it has ended."""


@dataclass(frozen=True)
class Chain:
    """The tiers of this machine and what joins them.

    Attributes:
        arenas: one arena for each memory tier.
        edges: the edge for each (source, target) pair of neighbours.
        settled: units whose update works on the top tier, and whose pages stay there between uses if they can.
        kept: units whose PARAM pages stay in HOST by choice.
        alignment: frames take whole multiples of this many bytes, on every tier.
        forget: called with the name of a page that is removed for good.
    """

    arenas: Mapping[Tier, Arena]
    edges: Mapping[tuple[Tier, Tier], Edge]
    settled: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    alignment: int = FRAME_ALIGNMENT
    forget: Callable[[PageKey], None] = lambda _: None

    @cached_property  # asked at every change of a page
    def memory_tiers(self) -> tuple[Tier, ...]:
        """Tiers that have frames, from far to near."""
        return tuple(sorted(self.arenas))

    @cached_property
    def top(self) -> Tier:
        """The tier the computation works on."""
        return self.memory_tiers[-1]

    def worked_on(self, lane: Lane, unit: int) -> Tier:
        """The tier on which this lane works on a unit's pages."""
        return self.top if lane is Lane.COMPUTE or unit in self.settled else Tier.HOST

    def settles(self, key: PageKey) -> bool:
        """Whether the page is one of a settled unit."""
        return key.is_of(self.settled)

    def keeps(self, key: PageKey) -> bool:
        """Whether the page stays in HOST by choice."""
        return key.kind is Kind.PARAM and key.unit in self.kept

    def tiers_of(self, key: PageKey) -> Sequence[Tier]:
        """The tiers where a page takes room; what is exchanged among ranks comes, and mostly goes, on the top one.

        State is leased by updates only, so that of a unit which is not settled never lies above HOST.
        """
        if key.kind is Kind.TRANSIT:
            return self.memory_tiers[-1:]
        return self.memory_tiers[:1] if key.kind is Kind.STATE and key.unit not in self.settled else self.memory_tiers

    def room(self, nbytes: int) -> int:
        """Bytes that a frame for `nbytes` bytes takes."""
        return round_up(nbytes, self.alignment)

    def capacity(self, tier: Tier) -> int:
        """Bytes that frames on `tier` may take: the budget without the part too small for a block."""
        return self._capacities[tier]

    @cached_property
    def _capacities(self) -> Mapping[Tier, int]:
        return {tier: round_down(arena.capacity, self.alignment) for tier, arena in self.arenas.items()}

    def towards(self, start: Tier, target: Tier) -> Tier:
        """The neighbour of `start` on the way to `target`."""
        tiers = self._tiers
        index = tiers.index(start)
        return tiers[index + 1] if target > start else tiers[index - 1]

    @cached_property
    def _tiers(self) -> tuple[Tier, ...]:
        return (Tier.SWAP, *self.memory_tiers)


class _SwapTransfer:
    """A request of the swap engine seen as a transfer."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def promote(self) -> None:
        """Treat the rest of the request as a demand."""
        self._request.promote(Priority.DEMAND)

    def stalled(self) -> Exception | None:
        """The request's own opinion: it knows its device and the engine's patience."""
        return self._request.stalled()


def _bytes_for(page: Page, extent: Extent) -> memoryview:
    """The part of the HOST frame that the extent holds; where memory pages exceed 4096 bytes, frames are longer."""
    return page.frames[Tier.HOST].buffer[: extent.nbytes]


class SwapReadEdge:
    """SWAP to HOST: straight from the extent into the frame."""

    def __init__(self, extents: Extents) -> None:
        self._extents = extents

    def start(self, page: Page, priority: Priority, done: Done) -> Transfer:
        """Start reading the page's extent into its HOST frame."""
        extent, expected = self._extents.for_read(page.key)
        request = self._extents.space_of(page.key).start_read(
            extent,
            _bytes_for(page, extent),
            priority=priority,
            on_done=lambda ended: done(ended.error),
            expected=expected,
        )
        return _SwapTransfer(request)


class SwapWriteEdge:
    """HOST to SWAP: straight from the frame into the extent that the next copy of the page goes to."""

    def __init__(self, extents: Extents) -> None:
        self._extents = extents

    def start(self, page: Page, priority: Priority, done: Done) -> Transfer:
        """Start writing the page's HOST frame to its extent."""
        extents, key = self._extents, page.key
        extent = extents.for_write(key, page.nbytes)

        def ended(request: Request) -> None:
            error = request.error
            try:
                if error is None:
                    extents.written(key, extent, request.checksum)
                else:
                    extents.failed(key, extent)
            except Exception as raised:  # noqa: BLE001 - the move has to end, with whatever error
                error = error or raised
            done(error)

        try:
            request = extents.space_of(key).start_write(
                extent,
                _bytes_for(page, extent),
                priority=priority,
                on_done=ended,
                checksum=extents.takes_checksum(key),
            )
        except BaseException:
            extents.failed(key, extent)
            raise
        return _SwapTransfer(request)


class CopyEdge:
    """HOST to DEVICE, or back: from frame to frame, by the device's own engines."""

    def __init__(self, device: Device, source: Tier, target: Tier) -> None:
        self._device = device
        self._source = source
        self._target = target

    def start(self, page: Page, priority: Priority, done: Done) -> Transfer:
        """Start copying the page's bytes between its two frames."""
        return self._device.start_copy(
            page.frames[self._source],
            page.frames[self._target],
            page.nbytes,
            up=self._target > self._source,
            urgent=priority is Priority.DEMAND,
            done=done,
        )


def device_chain(
    host: Arena,
    top: Arena,
    device: Device,
    extents: Extents,
    *,
    settled: frozenset[int] = frozenset(),
    kept: frozenset[int] = frozenset(),
) -> Chain:
    """The chain of a machine with an accelerator: DEVICE over HOST over SWAP. `settled`, `kept`: see `Chain`."""
    below = host_chain(host, extents)
    return Chain(
        arenas={**below.arenas, Tier.DEVICE: top},
        edges={
            **below.edges,
            (Tier.HOST, Tier.DEVICE): CopyEdge(device, Tier.HOST, Tier.DEVICE),
            (Tier.DEVICE, Tier.HOST): CopyEdge(device, Tier.DEVICE, Tier.HOST),
        },
        settled=settled,
        kept=kept,
        forget=below.forget,
    )


def host_chain(arena: Arena, extents: Extents, *, kept: frozenset[int] = frozenset()) -> Chain:
    """The chain of a machine without an accelerator: HOST over SWAP. `kept`: see `Chain`."""
    return Chain(
        arenas={Tier.HOST: arena},
        edges={(Tier.SWAP, Tier.HOST): SwapReadEdge(extents), (Tier.HOST, Tier.SWAP): SwapWriteEdge(extents)},
        kept=kept,
        forget=extents.forget,
    )
