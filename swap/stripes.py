"""How bytes are divided over directories: pure arithmetic.

Owns the division of an extent, and of a whole space, in proportion to bandwidth. Does not know files, allocators or how
the weights were measured. Guarantees that the parts add up exactly, are multiples of `ALIGNMENT`, never exceed the room
of a directory, and, where room does not matter, differ by less than one `ALIGNMENT` from the exact proportion.

Why in proportion. The pieces of an extent are moved at the same time, so it is there when the slowest piece is; with
pieces in proportion to bandwidth all of them finish together. A piece has a cost of its own (a seek, a system call, a
completion), so an extent is not cut finer than `MINIMUM_STRIPE`: a small one lies whole in the directory that holds
least for its bandwidth, which divides many small extents in proportion, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from swap.blocks import ALIGNMENT, align_down

MINIMUM_STRIPE = 1 << 20
"""Bytes of the smallest piece an extent is cut into while there is room."""


def require_weights(weights: Sequence[float], count: int) -> tuple[float, ...]:
    """The weights as floats. Raises ValueError unless there are `count` of them, positive and finite."""
    found = tuple(float(weight) for weight in weights)
    if len(found) != count or not all(weight > 0 and math.isfinite(weight) for weight in found):
        raise ValueError(f"expected {count} positive weights, one for each directory, found {found}")
    return found


def proportional(nbytes: int, weights: Sequence[float]) -> list[int]:
    """Divide `nbytes` (a multiple of `ALIGNMENT`) in proportion to non-negative weights, each part aligned.

    By largest remainder, so that every part is less than `ALIGNMENT` from the exact proportion.
    """
    units = nbytes // ALIGNMENT
    total = math.fsum(weights)
    exact = [units * (weight / total) for weight in weights]
    parts = [math.floor(value) for value in exact]
    left = units - sum(parts)
    # Rounding in the division may make the floors one too many as well as too few.
    order = sorted(range(len(weights)), key=lambda index: (parts[index] - exact[index], index))
    if left < 0:
        order = [index for index in reversed(order) if parts[index]]
    for index in order[: abs(left)]:
        parts[index] += 1 if left > 0 else -1
    return [part * ALIGNMENT for part in parts]


def fill(nbytes: int, weights: Sequence[float], room: Sequence[int]) -> list[int] | None:
    """Divide in proportion, but nobody gets more than his room: what does not fit goes to the others.

    None if `room` does not hold `nbytes` together.
    """
    limits = [align_down(max(0, limit)) for limit in room]
    if sum(limits) < nbytes:
        return None
    parts = [0] * len(weights)
    open_ones = [index for index, limit in enumerate(limits) if limit]
    left = nbytes
    while left:
        shares = proportional(left, [weights[index] for index in open_ones])
        full = [index for index, share in zip(open_ones, shares, strict=True) if share > limits[index]]
        if not full:
            for index, share in zip(open_ones, shares, strict=True):
                parts[index] = share
            break
        for index in full:
            parts[index] = limits[index]
            left -= limits[index]
            open_ones.remove(index)
    return parts


def divide(
    nbytes: int,
    weights: Sequence[float],
    *,
    room: Sequence[int],
    load: Sequence[int],
    minimum: int = MINIMUM_STRIPE,
) -> list[int] | None:
    """Bytes of an extent of `nbytes` (aligned) that go to each directory, or None if there is no room.

    `room` is what a directory can take in one stretch, `load` what it holds already, in bytes. Directories whose part
    would be below `minimum` get none: the slowest first, among equals the one that holds most. Where that leaves too
    little room, pieces smaller than the minimum are made.
    """
    chosen = [index for index, limit in enumerate(room) if limit >= ALIGNMENT]
    if nbytes < 2 * minimum:
        # Whole, where it adds least to the time it takes to move everything that is there once.
        fitting = [index for index in chosen if room[index] >= nbytes]
        chosen = sorted(fitting, key=lambda index: ((load[index] + nbytes) / weights[index], index))[:1] or chosen
    else:
        chosen = _without_small_parts(nbytes, weights, chosen, load, minimum)
    parts = fill(nbytes, [weights[index] for index in chosen], [room[index] for index in chosen])
    if parts is None:
        return fill(nbytes, weights, room)
    divided = [0] * len(room)
    for index, part in zip(chosen, parts, strict=True):
        divided[index] = part
    return divided


def _without_small_parts(
    nbytes: int, weights: Sequence[float], chosen: list[int], load: Sequence[int], minimum: int
) -> list[int]:
    chosen = list(chosen)
    while len(chosen) > 1:
        shares = proportional(nbytes, [weights[index] for index in chosen])
        small = [index for index, share in zip(chosen, shares, strict=True) if share < minimum]
        if not small:
            break
        chosen.remove(max(small, key=lambda index: (-weights[index], load[index], index)))
    return chosen
