"""A chain of tiers whose transfers end only when the test says so, and whose bytes are version numbers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from swap.requests import Priority
from tiermem.memory.copies import Done
from tiermem.memory.ranges import Range, RangeAllocator, cheapest_window
from tiermem.memory.tiers import Tier
from tiermem.pager.edges import Chain
from tiermem.pager.page import Page


@dataclass(eq=False)
class SteppedFrame:
    """A frame that holds one number instead of bytes."""

    nbytes: int
    contents: int | None = None
    fences: tuple[Any, ...] = ()

    def fence(self, fence: Any) -> None:
        if fence is not None:
            self.fences = (*(known for known in self.fences if not known.passed()), fence)


class SteppedArena:
    """Counts bytes; has no fragmentation."""

    def __init__(self, tier: Tier, capacity: int) -> None:
        self.tier = tier
        self.capacity = capacity
        self.reserved = 0
        self.high_water = 0

    def allocate(self, nbytes: int) -> Any:
        if self.reserved + nbytes > self.capacity:
            return None
        self.reserved += nbytes
        self.high_water = max(self.high_water, self.reserved)
        return SteppedFrame(nbytes)

    def clearing(self, nbytes: int, candidates: Any) -> Any:
        missing, going = nbytes - (self.capacity - self.reserved), []
        for frame in candidates:
            if missing <= 0:
                break
            going.append(frame)
            missing -= frame.nbytes
        return going if missing <= 0 else None

    def fence(self) -> None:
        return None

    def free(self, frame: Any) -> None:
        if frame.contents == -1:
            raise RuntimeError("freed twice")
        frame.contents = -1
        self.reserved -= frame.nbytes


class SteppedCopies:
    """What was in the swap of `stepped_chain` when it was protected."""

    def __init__(self, store: dict[Any, Any]) -> None:
        self.store = store
        self.kept: dict[Any, Any] = {}

    def protect(self, key: Any) -> None:
        if key in self.kept:
            raise RuntimeError("protected twice")
        self.kept[key] = self.store[key]

    def restore(self, key: Any) -> None:
        self.store[key] = self.kept.get(key)

    def release(self) -> None:
        self.kept.clear()


class NextEvent:
    """Awaitable that gives control back once, so that a coroutine of the loop can be driven by hand."""

    def __await__(self) -> Any:
        yield


class SteppedSlab(SteppedArena):
    """As a device's memory: frames lie in one piece and do not move, so there may be room only in bytes."""

    def __init__(self, tier: Tier, capacity: int) -> None:
        super().__init__(tier, capacity)
        self.ranges = RangeAllocator(limit=capacity)
        self.ranges.extend(0, capacity)
        self.places: dict[Any, int] = {}

    def allocate(self, nbytes: int) -> Any:
        if self.reserved + nbytes > self.capacity:
            return None
        placement = self.ranges.allocate(nbytes)
        if placement is None:
            return None
        frame = super().allocate(nbytes)
        self.places[frame] = placement.start
        return frame

    def clearing(self, nbytes: int, candidates: Any) -> Any:
        taken = [Range(self.places[frame], self.places[frame] + frame.nbytes) for frame in candidates]
        chosen = cheapest_window(self.ranges.holes(), taken, nbytes)
        return None if chosen is None else [candidates[index] for index in chosen]

    def free(self, frame: Any) -> None:
        super().free(frame)
        self.ranges.release(self.places.pop(frame))


@dataclass(eq=False)
class SteppedTransfer:
    """A transfer under way."""

    page: Page
    source: Tier
    target: Tier
    done: Done
    store: dict[Any, int | None]
    priority: Priority
    promoted: bool = False
    frames: dict[Tier, Any] = field(default_factory=dict)
    stall: Exception | None = None

    def stalled(self) -> Exception | None:
        return self.stall

    def promote(self) -> None:
        self.promoted = True

    def finish(self, error: BaseException | None = None) -> None:
        """The bytes are there now (or, with an error, are not)."""
        if error is None:
            value = self.store[self.page.key] if self.source is Tier.SWAP else self.frames[self.source].contents
            if self.target is Tier.SWAP:
                self.store[self.page.key] = value
            else:
                self.frames[self.target].contents = value
        elif self.target is Tier.SWAP:
            self.store[self.page.key] = -2  # torn
        self.done(error)


class SteppedEdge:
    """An edge whose transfers wait in `flying` for the test to finish them."""

    def __init__(self, source: Tier, target: Tier, flying: list[SteppedTransfer], store: dict[Any, Any]) -> None:
        self.source, self.target, self.flying, self.store = source, target, flying, store
        self.refuse: BaseException | None = None

    def start(self, page: Page, priority: Priority, done: Done) -> SteppedTransfer:
        if self.refuse is not None:
            raise self.refuse
        transfer = SteppedTransfer(page, self.source, self.target, done, self.store, priority, False, dict(page.frames))
        self.flying.append(transfer)
        return transfer


def stepped_chain(
    host: int,
    device: int | None = None,
    arena: type[SteppedArena] = SteppedArena,
    *,
    kept: frozenset[int] = frozenset(),
    settled: frozenset[int] = frozenset(),
) -> tuple[Chain, list[SteppedTransfer], dict[Any, Any]]:
    """A chain with budgets in bytes, the list of its transfers in flight, what its swap has. The rest: see `Chain`."""
    flying: list[SteppedTransfer] = []
    store: dict[Any, Any] = {}
    tiers = [Tier.SWAP, Tier.HOST] + ([Tier.DEVICE] if device is not None else [])
    arenas = {Tier.HOST: arena(Tier.HOST, host)}
    if device is not None:
        arenas[Tier.DEVICE] = arena(Tier.DEVICE, device)
    edges = {}
    for low, high in itertools.pairwise(tiers):
        edges[low, high] = SteppedEdge(low, high, flying, store)
        edges[high, low] = SteppedEdge(high, low, flying, store)
    return Chain(arenas, edges, kept=kept, settled=settled, alignment=1), flying, store  # type: ignore[arg-type]
