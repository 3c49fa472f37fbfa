"""The buckets in which gradients are collected before they are added up over ranks.

Owns the leases on buckets: asked for ahead of time, and given back where a bucket waits for the step. Does not know the
exchange, or in which order units come. Guarantees that what was asked for and is not wanted leaves nothing behind, and
that a bucket which waits keeps its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from tiermem.pager.lease import Lease
from tiermem.pager.page import Intent
from tiermem.pager.pager import Pager
from tiermem.zero3.asked import AskedAhead
from tiermem.zero3.shards import Shard


class Bucket:
    """One unit's gradients on their way. `present`: the parameters that have contributed.

    `then`: whom to tell that no rank has more for the unit, if this one has not; `complete`: whether that is so.
    """

    def __init__(self, shard: Shard, lease: Lease, present: Iterable[int]) -> None:
        self.shard = shard
        self.lease = lease
        self.present = set(present)
        self.then: Callable[[int], None] | None = None
        self.complete = False

    def tensor(self) -> torch.Tensor:
        """The elements: 1-D, in the unit's dtype."""
        return self.lease.tensor(self.shard.bucket_key).view(self.shard.layout.dtype)


class Buckets:
    """Where buckets come from. Used from the compute thread only."""

    def __init__(self, pager: Pager, *, late: bool, two: bool) -> None:
        """`late`: whether buckets wait for the step. `two`: whether another has room while one is exchanged."""
        self.late = late
        self.two = two
        self._pager = pager
        self._kept: dict[int, Bucket] = {}
        self._asked = AskedAhead()

    def ask(self, shard: Shard) -> None:
        """Room for this bucket is made from now on. Does not wait."""
        if not self._asked.is_open and shard.layout.part_numel:
            self._asked.put(shard.unit, self._pager.start_lease([shard.bucket_key], self._intent(shard.unit)))

    def take(self, shard: Shard) -> Bucket:
        """The bucket of a unit, with what it has been kept with; waits. What was asked for another is given up."""
        asked, intent = self._asked.take(shard.unit), self._intent(shard.unit)
        lease = self._pager.lease([shard.bucket_key], intent) if asked is None else asked.wait()
        kept = self._kept.pop(shard.unit, None)
        return Bucket(shard, lease, kept.present if kept is not None else ())

    def keep(self, bucket: Bucket) -> None:
        """Let a bucket wait for the step, wherever the pager has it."""
        self._kept[bucket.shard.unit] = bucket
        bucket.lease.release()

    def kept(self) -> list[Shard]:
        """Whose buckets wait, by number."""
        return [self._kept[unit].shard for unit in sorted(self._kept)]

    def give_up(self) -> None:
        """What was asked for has not come."""
        self._asked.give_up()

    def _intent(self, unit: int) -> Intent:
        return Intent.WRITE if unit in self._kept else Intent.FRESH
