"""The queue of one device: which block goes to it next.

Owns the queued parts of one device, the count of what is in flight on it, and the policy between reads and writes.
Does not know threads, locks or system calls: the engine calls it with its lock held. Guarantees:

1. At most `depth` blocks and `max_bytes_in_flight` bytes are with the device (one block may be larger than that).
2. Within one operation, a better priority goes first, and equals go in the order in which they came to it.
3. Between reads and writes the better priority goes first, but the other operation keeps a share ("Reserved share").

Reserved share. While both reads and writes are queued, the operation in front may fill all of the depth but
`reserve` slots; those go to the other one. So write-back proceeds under endless reads (and the reads it makes room for
do not dry up), writes never take more than their share from waiting reads, and the drive has both to work on. At depth
1, where no slot can be kept, the other operation gets every fourth block instead. Within reads there is no share:
read-ahead waits as long as demands are queued, which is harmless because somebody waits for each demand before making
another.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass
from itertools import count

from swap.blocks import block_count
from swap.requests import Block, Operation, Part, Priority
from swap.settings import DeviceStatistics

_SHARE = 0.25  # of the depth, kept for the operation behind
_TURNS = 3  # blocks the operation in front may take in a row at depth 1 while the other waits


@dataclass(frozen=True, slots=True)
class SharePolicy:
    """Chooses between reads and writes; pure. `reserve` slots of `depth` are kept for the operation behind."""

    depth: int
    reserve: int

    @classmethod
    def for_depth(cls, depth: int) -> SharePolicy:
        """The policy that keeps a quarter of `depth`, at least one slot where there are two."""
        return cls(depth, 0 if depth == 1 else min(max(1, round(depth * _SHARE)), depth // 2))

    def prefers_front(self, in_flight: int, in_a_row: int) -> bool:
        """Whether the operation in front, with `in_flight` blocks at the device and the last `in_a_row`, goes next."""
        if self.reserve:
            return in_flight < self.depth - self.reserve
        return in_a_row < _TURNS


@dataclass(slots=True)
class Counters:
    """What a queue has seen since it was made; copied into the engine's statistics."""

    bytes_read: int = 0
    bytes_written: int = 0
    blocks: int = 0
    failed_blocks: int = 0
    seconds_busy: float = 0.0
    high_water_bytes_in_flight: int = 0


class DeviceQueue:
    """Queued parts and blocks in flight of one device. Not thread-safe: the engine's lock guards it."""

    def __init__(self, device: int, *, block_size: int, depth: int, max_bytes_in_flight: int) -> None:
        self.device = device
        self.depth = depth
        self.counters = Counters()
        self.in_flight: set[Block] = set()
        self.bytes_in_flight = 0
        self.held_back = False  # a block was refused for lack of bytes: whoever finishes one wakes the others
        self.progressed = 0.0  # when a block last finished, or the queue last stopped being empty
        self._block_size = block_size
        self._max_bytes = max_bytes_in_flight
        self._policy = SharePolicy.for_depth(min(depth, max(1, max_bytes_in_flight // block_size)))
        self._lanes: dict[Operation, tuple[OrderedDict[int, Part], ...]] = {  # of each priority, the better one first
            operation: tuple(OrderedDict() for _ in Priority) for operation in Operation
        }
        self._last: tuple[Operation, int] = (Operation.READ, 0)  # the operation taken last, how often in a row

    def limit_depth(self, depth: int) -> None:
        """From now on at most `depth` blocks at once, 1 or more: the backend cannot serve as many as it was to."""
        self.depth = min(self.depth, depth)
        self._policy = SharePolicy.for_depth(min(self._policy.depth, depth))

    @property
    def queued(self) -> bool:
        """Whether any block waits to be given to the device."""
        return any(map(any, self._lanes.values()))

    def push(self, part: Part, sequences: count[int], now: float) -> None:
        """Queue a part behind its equals."""
        if not self.in_flight and not self.queued:
            self.progressed = now
        part.sequence = next(sequences)
        self._lane(part)[part.sequence] = part

    def take(self, now: float) -> Block | None:
        """Give out the next block, or None if nothing is queued or the device has enough."""
        part = self._choose() if len(self.in_flight) < self.depth else None
        if part is None:
            return None
        nbytes = min(self._block_size, part.nbytes - part.issued)
        if self.in_flight and self.bytes_in_flight + nbytes > self._max_bytes:
            self.held_back = True
            return None
        block = Block(part, part.issued, nbytes, now)
        part.issued += nbytes
        if part.issued == part.nbytes:
            del self._lane(part)[part.sequence]
        if not self.in_flight:
            self.counters.seconds_busy -= now  # completed in `finish`
        self.in_flight.add(block)
        self.bytes_in_flight += nbytes
        self.counters.high_water_bytes_in_flight = max(self.counters.high_water_bytes_in_flight, self.bytes_in_flight)
        operation, times = self._last
        self._last = (block.operation, times + 1 if operation is block.operation else 1)
        return block

    def finish(self, block: Block, now: float, *, failed: bool) -> None:
        """Count a block as done."""
        self.in_flight.remove(block)
        self.bytes_in_flight -= block.nbytes
        self.progressed = now
        self.counters.blocks += 1
        if failed:
            self.counters.failed_blocks += 1
        elif block.operation is Operation.READ:
            self.counters.bytes_read += block.nbytes
        else:
            self.counters.bytes_written += block.nbytes
        if not self.in_flight:
            self.counters.seconds_busy += now

    def abandon(self, now: float) -> None:
        """Count what is in flight neither as done nor as in flight any more: the engine is closed."""
        if self.in_flight:
            self.counters.seconds_busy += now
        self.in_flight.clear()
        self.bytes_in_flight = 0

    def drop(self, part: Part) -> int:
        """Take what is queued of a part out again; return the number of blocks that will never be issued."""
        if self._lane(part).pop(part.sequence, None) is None:
            return 0
        return block_count(part.nbytes - part.issued, self._block_size)

    def move(self, part: Part, priority: Priority) -> None:
        """Put what is queued of a part into the lane of another priority, behind what is there."""
        if self._lane(part).pop(part.sequence, None) is not None:
            self._lanes[part.request.operation][priority][part.sequence] = part

    def holds(self, part: Part) -> bool:
        """Whether some of a part is queued here."""
        return part.sequence in self._lane(part)

    def parts(self) -> list[Part]:
        """Everything queued."""
        return [part for lanes in self._lanes.values() for lane in lanes for part in lane.values()]

    def statistics(self, now: float) -> DeviceStatistics:
        """What the queue has seen since it was made."""
        seen = asdict(self.counters)
        seen["seconds_busy"] += now if self.in_flight else 0.0
        return DeviceStatistics(device=self.device, blocks_in_flight=len(self.in_flight), **seen)

    def _lane(self, part: Part) -> OrderedDict[int, Part]:
        """What a part is queued among, if it is; one whose request is done is nowhere."""
        lane = part.lane
        return OrderedDict() if lane is None else self._lanes[lane[0]][lane[1]]

    def _head(self, operation: Operation) -> Part | None:
        for lane in self._lanes[operation]:
            if lane:
                return next(iter(lane.values()))
        return None

    def _choose(self) -> Part | None:
        read, write = self._head(Operation.READ), self._head(Operation.WRITE)
        if read is None or write is None:
            return read or write
        front, behind = sorted((read, write), key=lambda part: (part.request.priority, part.sequence))
        operation = front.request.operation
        in_flight = sum(block.operation is operation for block in self.in_flight)
        in_a_row = self._last[1] if self._last[0] is operation else 0
        return front if self._policy.prefers_front(in_flight, in_a_row) else behind
