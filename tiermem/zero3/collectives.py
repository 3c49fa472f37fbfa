"""The collective operations of stage 3, behind one small interface.

Owns the words for exchanging shards among ranks, and the exchange of a single process. Does not know pages, units or
when an exchange is due. Guarantees that one process is the identity: the very tensor comes back, nothing is copied.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Collectives(Protocol):
    """What a unit needs from the other ranks. All ranks call the same operations in the same order."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many processes take part."""
        ...

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Join the 1-D uint8 shards of all ranks, in rank order; waits."""
        ...

    def reduce_scatter(self, full: torch.Tensor) -> torch.Tensor:
        """Add up a 1-D gradient over all ranks and keep this rank's slice; waits."""
        ...


class SingleProcess:
    """World size one: the shard is the whole."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Return `shard` itself."""
        return shard

    def reduce_scatter(self, full: torch.Tensor) -> torch.Tensor:
        """Return `full` itself."""
        return full
