"""Adding one unit's gradients up over the ranks, tile by tile.

Owns what is sent to whom, and the order of the sum: over the parts of a copy, then over copies. Does not know buckets,
pages or parameters. Guarantees that parts are added in their order, in float32 where they have 16 bits, and rounded
once, whatever the number of ranks and however they are cut; and the same bits in every copy.

Several copies. A rank has the sum of its slice over the ranks that share its copy. It keeps it in float32 where
gradients have 16 bits, and adds it to that of the other copies: of those who hold the same slice each adds one piece of
it up and rounds it, and all of them gather the pieces. So every copy has the very bytes that one rank made, for no more
bytes on the wire than an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tiermem.zero3.grid import Grid
from tiermem.zero3.shards import Shard, copies_nbytes

# Elements added up at once: what is outside the budget stays small, and in the cache.
_SLICE = 1 << 16
# On a device there is no cache to stay in, and each call costs a launch: 16 MiB in float32.
_DEVICE_SLICE = 1 << 22


def mean_over_ranks(
    grid: Grid,
    shard: Shard,
    room: torch.Tensor,
    sent: torch.Tensor,
    senders: Sequence[bool],
    store: Callable[[int, torch.Tensor], None],
) -> None:
    """Call `store(tile, mean)` for each tile of this rank's part, with elements that are its to change. Collective.

    `room`: what `Shard.received_nbytes` asks for, as uint8. `sent`: this rank's bucket, if it is one of `senders`, who
    are among `everyone`; the others count as zeros.
    """
    dtype, ranks = shard.layout.dtype, shard.layout.ranks
    sending = grid.of_own_copy(senders)
    at = 0
    for tile in range(shard.exchanges):
        length = shard.exchange_length(tile)
        begin = copies_nbytes(length, dtype.itemsize, grid.copies.size)  # those first: 16-bit ones may end anywhere
        parts = room[begin : begin + length * ranks * dtype.itemsize].view(dtype)
        if any(sending):
            grid.shards.exchange(parts, sent[at : at + length * ranks], sending)
        at += length * ranks
        if tile >= shard.tiles:
            continue
        count = shard.tile_length(tile)
        own = [part[:count] for part, sends in zip(parts.view(ranks, length), sending, strict=True) if sends]
        if grid.copies.size == 1:
            average(own, ranks)
            store(tile, own[0])
        else:
            copies = [any(each) for each in grid.of_copies(senders)]
            store(tile, _mean_over_copies(grid, own, copies, room[:begin], dtype, count))


def _mean_over_copies(
    grid: Grid, own: Sequence[torch.Tensor], copies: Sequence[bool], room: torch.Tensor, dtype: torch.dtype, count: int
) -> torch.Tensor:
    """The mean of `count` elements, of which `own` are those of this copy's ranks; `copies`: which ones have any."""
    exact, number = exact_dtype(dtype), len(copies)
    width = -(-count // number)
    nbytes = width * number * exact.itemsize
    mine, received = room[:nbytes].view(exact), room[nbytes : 2 * nbytes].view(exact)
    if own:
        total = mine[:count].copy_(own[0])
        for part in own[1:]:
            total.add_(part)
    grid.copies.exchange(received, mine, copies)
    pieces = received.view(number, width)
    sums = [piece for piece, has in zip(pieces, copies, strict=True) if has]
    average(sums, grid.everyone.size)
    piece = sums[0]
    if exact != dtype:
        other = pieces[1] if copies[0] else pieces[0]  # rounded in a place that is not its own, and needed no more
        piece = other.view(dtype)[:width].copy_(piece)
    whole = room[: width * number * dtype.itemsize]  # where the sum that was sent has been
    grid.copies.all_gather(whole, piece.view(torch.uint8))
    return whole.view(dtype)[:count]


def average(parts: Sequence[torch.Tensor], ranks: int) -> None:
    """Put the sum of `parts`, 1-D and alike, in their order, divided by `ranks` into the first; see `exact_dtype`."""
    exact = exact_dtype(parts[0].dtype)
    length = _SLICE if parts[0].device.type == "cpu" else _DEVICE_SLICE
    for begin in range(0, parts[0].numel(), length):
        total = parts[0][begin : begin + length].to(exact, copy=True)
        for part in parts[1:]:
            total.add_(part[begin : begin + length])
        parts[0][begin : begin + length] = total.div_(ranks)


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what gradients of `dtype` are added up: float32 where they have 16 bits."""
    return torch.float32 if dtype.itemsize < 4 else dtype
