"""A snapshot rewritten for another number of ranks.

Owns the division of each parameter over the ranks' files. Does not know a running model: any snapshot can be continued
by any number of ranks as it is, so this only decides which rank finds its state in files of its own. Guarantees that
everything is read once, and that nothing stands in the end where damage was found on the way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from swap import ChecksumError
from tiermem.checkpoint.draft import Draft
from tiermem.checkpoint.manifest import FIRST, TRAINED, VALUE
from tiermem.checkpoint.reading import PlaneReader, Snapshot, blocks_of, open_snapshot
from tiermem.checkpoint.restoring import damaged
from tiermem.checkpoint.shard import Holding
from tiermem.checkpoint.writing import finish_snapshot, write_buffers, write_part
from tiermem.errors import ConfigError
from tiermem.memory.rounding import round_up
from tiermem.pager.tiling import ALIGN_NUMEL
from tiermem.zero3.layout import Slot

LARGEST_WORLD = 1 << 16

Readers = dict[tuple[int, str], PlaneReader]
"""By parameter and plane."""


class Portion:
    """What rank `rank` of `ranks` is to have of a snapshot (`shard.RankState`): an equal part of each parameter."""

    def __init__(self, snapshot: Snapshot, rank: int, ranks: int, readers: Readers) -> None:
        """`readers`: of each plane, where the portions before this one have come to; the same for all portions."""
        self._snapshot = snapshot
        self._rank = rank
        self._ranks = ranks
        self._readers = readers

    def holdings(self) -> list[Holding]:
        """Cut at multiples of 64 elements; the last ranks have less, or nothing of a small parameter."""
        found = []
        for number, kept in enumerate(self._snapshot.manifest.parameters):
            share = -(-kept.numel // self._ranks)
            part = round_up(share, ALIGN_NUMEL)
            first = min(self._rank * part, kept.numel)
            count = min(part, kept.numel - first)
            trained = kept.kind == TRAINED
            dtype = self._snapshot.parameter_dtype(kept)
            slot = Slot(number, kept.names, kept.shape, kept.stride, dtype, trained, 0)
            if count or self._rank == 0:
                found.append(Holding(0, slot, first, count, 0, trained and FIRST in kept.planes))
        return found

    def blocks(self, holding: Holding) -> Iterator[tuple[str, torch.Tensor]]:
        """Straight from the files, compared where the last portion of a plane ends."""
        number = holding.slot.parameter
        for plane in holding.planes:
            if (number, plane) not in self._readers:
                kept = self._snapshot.manifest.parameters[number]
                self._readers[number, plane] = self._snapshot.reader(kept, plane)
            for block in blocks_of(self._readers[number, plane], holding.count):
                yield plane, block


def reshard(snapshot: Snapshot, path: str | os.PathLike[str], *, ranks: int) -> Snapshot:
    """Write the same snapshot with the files of `ranks` ranks to `path`, a free name; waits. Returns the new one.

    Raises ConfigError for a number that makes no sense or a path that is taken, swap.SwapError if the snapshot is
    damaged or the disk fails; nothing is left then.
    """
    if not 1 <= ranks <= LARGEST_WORLD:
        raise ConfigError(f"expected a number of ranks from 1 to {LARGEST_WORLD}, found {ranks}")
    readers: Readers = {}
    with Draft(path) as draft:
        try:
            parts = [write_part(draft, Portion(snapshot, rank, ranks, readers), rank=rank) for rank in range(ranks)]
            buffers = {kept.names[0]: snapshot.whole(kept, VALUE) for kept in snapshot.manifest.buffers}
        except ChecksumError as error:
            raise damaged(snapshot, error) from error
        parts.append(write_buffers(draft, buffers))
        seconds = snapshot.manifest.seconds
        finish_snapshot(draft, parts, snapshot.record, seconds=seconds, world_size=ranks)
    return open_snapshot(draft.path)
