"""Alignment arithmetic and the division of a transfer into blocks.

Owns the one alignment constant of the package. Does not know files, buffers or threads. Guarantees, for O_DIRECT, that
an aligned transfer is divided at aligned places only, so that every block is itself a legal O_DIRECT transfer.
"""

from __future__ import annotations

from collections.abc import Iterator

ALIGNMENT = 4096
"""Bytes: offsets, lengths and buffer addresses are multiples of this, which suits sectors of 512 and of 4096."""


def align_down(nbytes: int) -> int:
    """The largest multiple of `ALIGNMENT` not above `nbytes`."""
    return nbytes - nbytes % ALIGNMENT


def align_up(nbytes: int) -> int:
    """The smallest multiple of `ALIGNMENT` not below `nbytes`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def is_aligned(nbytes: int) -> bool:
    """Whether `nbytes` is a multiple of `ALIGNMENT`."""
    return nbytes % ALIGNMENT == 0


def block_count(nbytes: int, block_size: int) -> int:
    """How many blocks of at most `block_size` bytes hold `nbytes`."""
    return -(-nbytes // block_size)


def split(nbytes: int, block_size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) in bytes of consecutive blocks that cover `nbytes`, each at most `block_size` long."""
    for start in range(0, nbytes, block_size):
        yield start, min(block_size, nbytes - start)
