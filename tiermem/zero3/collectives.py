"""What the ranks of a run exchange, behind one small interface.

Owns the words for exchanging shards, gradients and short messages, how an error is told to others, and the exchange of
a single process. Does not know pages, units or when an exchange is due (`conductor` does). Guarantees that one process
is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Collectives(Protocol):
    """What a run needs of the other ranks. All ranks call the same operations in the same order; all of them wait.

    Raises TiermemError, which says which ranks are gone and why, when another rank has died, failed or stopped
    answering.
    """

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def size(self) -> int:
        """How many processes take part."""

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill `whole` with the `shard` of every rank, in rank order. 1-D uint8; `whole` is `size` times as long."""

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, senders: Sequence[bool]) -> None:
        """Give every rank its slice of `sent`, and receive from each of `senders` what it has for this rank.

        1-D, equal slices in rank order. Where a rank does not send, its slice of `received` is undefined afterwards,
        and its `sent` is not looked at.
        """

    def broadcast(self, values: torch.Tensor) -> None:
        """Replace `values` (any shape) by those of rank 0."""

    def tell(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank, in rank order; equally many on each."""

    def tell_floats(self, numbers: torch.Tensor) -> list[list[float]]:
        """As `tell`, of a 1-D tensor in float64; where it is on a device, its values are waited for."""

    def tell_text(self, text: str) -> list[str]:
        """The text of every rank, in rank order."""

    def close(self, reason: str | None = None) -> None:
        """Leave. `reason`: why, if it is before the others expect it; they read it when they miss this rank."""


def reason_of(error: BaseException | None) -> str:
    """An error in a line, as other ranks are told of it: "" where there is none, and nowhere else."""
    if error is None:
        return ""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def by_rank(told: Sequence[str]) -> str:
    """What ranks have told, each with its number, but for those that told nothing."""
    return "; ".join(f"rank {rank}: {words}" for rank, words in enumerate(told) if words)


class SingleProcess:
    """World size one: what is exchanged is what there is."""

    rank = 0
    size = 1

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Copy, unless they are the same bytes."""
        if whole.data_ptr() != shard.data_ptr():
            whole.copy_(shard)

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, senders: Sequence[bool]) -> None:
        """Copy, if this process sends."""
        if senders[0]:
            received.copy_(sent)

    def broadcast(self, values: torch.Tensor) -> None:
        """Nothing to do."""

    def tell(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of this process alone."""
        return [list(numbers)]

    def tell_floats(self, numbers: torch.Tensor) -> list[list[float]]:
        """The numbers of this process alone."""
        return [numbers.tolist()]

    def tell_text(self, text: str) -> list[str]:
        """The text of this process alone."""
        return [text]

    def close(self, reason: str | None = None) -> None:
        """Nothing to do."""
