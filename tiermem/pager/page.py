"""Pages: their names, what is wanted of them, and what is known about each.

Owns the words used to speak with the pager (kinds, keys, intents, lanes) and the record of one page. Does not decide
anything and moves nothing. Guarantees that keys are hashable, immutable, and mean the same on every rank.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tiermem.memory.arena import Frame
from tiermem.memory.tiers import Tier


class Kind(enum.Enum):
    """What the bytes of a page are."""

    PARAM = "param"
    GRAD = "grad"
    STATE = "state"
    ACTIVATION = "activation"
    TRANSIT = "transit"  # a unit on its way between ranks: gathered parameters, gradients to be added up; never kept

    __hash__ = object.__hash__  # members are singletons; the hash of `Enum` is slow, and keys are hashed all the time


class Intent(enum.Enum):
    """What a lease is taken for.

    READ shares the page with other readers. WRITE needs the present contents and the only lease. FRESH needs the only
    lease too but not the contents: they are undefined when the lease is granted, and nothing is read from below.
    """

    READ = "read"
    WRITE = "write"
    FRESH = "fresh"


class Lane(enum.Enum):
    """Who walks through the schedule: the computation, or the update streaming beside it."""

    COMPUTE = "compute"
    UPDATE = "update"

    __hash__ = object.__hash__  # as for Kind


@functools.lru_cache(maxsize=1 << 14)
def _name(key: PageKey) -> str:
    return f"unit {key.unit} {key.kind.value} tile {key.tile}"


class PageKey(NamedTuple):
    """The name of a page: unit number, kind, and tile number within (unit, kind).

    A tuple, because it is looked up in dictionaries all the time and tuples are hashed and compared without Python.
    """

    unit: int
    kind: Kind
    tile: int = 0

    def __str__(self) -> str:
        return _name(self)

    def is_of(self, units: Collection[int]) -> bool:
        """Whether the page is one of these units'; those of activations are numbered, but of no unit."""
        return self.unit in units and self.kind is not Kind.ACTIVATION


_EDGES = {(source, target): f"{source.name.lower()}->{target.name.lower()}" for source in Tier for target in Tier}


class Transfer(Protocol):
    """The handle of a transfer an edge has started."""

    def promote(self) -> None:
        """Let a transfer that was started ahead of time overtake: somebody waits for it now."""

    def stalled(self) -> Exception | None:
        """The error to raise if the device has shown no progress for too long. Never waits; the transfer goes on."""


@dataclass(slots=True, eq=False)
class Move:
    """One transfer in flight over one edge.

    Attributes:
        source: the tier the bytes come from; stays valid until the move has ended.
        target: the tier they go to; not valid before.
        transfer: the edge's handle; None until the edge has returned it, and when the move has ended.
        started: seconds on the clock of `time.perf_counter`.
    """

    source: Tier
    target: Tier
    started: float
    transfer: Transfer | None = None
    promoted: bool = False
    edge: str = field(init=False)  # as statistics and the timeline name it, such as "swap->host"

    def __post_init__(self) -> None:
        self.edge = _EDGES[self.source, self.target]

    def promote(self) -> None:
        """Somebody waits for this move now."""
        if not self.promoted and self.transfer is not None:
            self.promoted = True
            self.transfer.promote()

    def stalled(self) -> Exception | None:
        """The error to raise if the device has shown no progress for too long."""
        return None if self.transfer is None else self.transfer.stalled()


@dataclass(slots=True, eq=False)
class Page:
    """The bytes of one (unit, kind) shard or of a tile of it, and the four facts known about them.

    `valid`, `move`, `leases` and `error` are the facts, with the frames that hold the bytes (extents are in `Extents`);
    whether a page is resident, dirty or fetching is derived. Only the residency core changes any of them (I6).

    Attributes:
        room: bytes a frame for it takes: `nbytes` rounded up to whole blocks.
        home: where its copy stays. HOST: by choice; it is written down, but never evicted. DEVICE: by the plan; that
            copy is enough, and is not sent down unless it has to go, or somebody wants it saved. None: nowhere.
        exclusive: whether its one lease was taken to write.
        doomed: whether it is to be discarded as soon as nobody holds or moves it.
        stamp: raised with every change of the facts, so that older entries in queues are known to be outdated.
    """

    key: PageKey
    nbytes: int
    room: int
    home: Tier | None = None
    frames: dict[Tier, Frame] = field(init=False, default_factory=dict)
    valid: set[Tier] = field(init=False, default_factory=set)
    move: Move | None = field(init=False, default=None)
    leases: dict[Tier, int] = field(init=False, default_factory=dict)
    exclusive: bool = field(init=False, default=False)
    error: BaseException | None = field(init=False, default=None)
    doomed: bool = field(init=False, default=False)
    stamp: int = field(init=False, default=0)

    @property
    def kept(self) -> bool:
        """Whether its copy in HOST stays there by choice."""
        return self.home is Tier.HOST

    @property
    def is_leased(self) -> bool:
        """Whether anybody holds the page on any tier."""
        return bool(self.leases)

    @property
    def is_written(self) -> bool:
        """Whether the page has contents anywhere."""
        return bool(self.valid)

    def is_dirty_on(self, tier: Tier) -> bool:
        """Whether the copy on `tier` has to be moved down before it may be evicted: it is the lowest that counts."""
        return tier in self.valid and min(self.valid) == tier and not self.is_spare_on(tier)

    def is_spare_on(self, tier: Tier) -> bool:
        """Whether the copy on `tier` is the lowest of a page that is at home on DEVICE and has a copy there."""
        return (
            self.home is Tier.DEVICE and tier is Tier.HOST and Tier.DEVICE in self.valid and Tier.SWAP not in self.valid
        )

    def nearest_valid(self, target: Tier) -> Tier:
        """The valid tier from which `target` is reached in the fewest moves; of two the one from which it is faster."""
        return min(self.valid, key=lambda tier: (abs(tier - target), -tier))
