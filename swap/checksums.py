"""Checksums of bytes on disk.

Owns the definition of the one checksum kept with every extent, and the check of what was read against it. Does not know
where the bytes lie or which generation they belong to. The checksum depends on the bytes and their number only, not on
stripes, block sizes or buffers. Guarantees a result within a memory pass (the hash runs at the speed of memory and lets
go of the interpreter lock), so that it belongs on the thread that moved the bytes and never on an event loop.

Definition. The XXH3 64-bit hash of each `CHECKSUM_BLOCK` of the bytes (the last one may be shorter), written one after
another as 8 little-endian bytes, hashed again with the number of bytes as the seed. Blocks could be hashed by several
threads; xxHash: https://github.com/Cyan4973/xxHash. It finds damage, not malice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from swap.blocks import split
from swap.errors import ChecksumError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from swap.requests import Span

CHECKSUM_BLOCK = 1 << 20
"""Bytes hashed at once: small enough for a cache, large enough that the calls cost nothing."""


class RunningChecksum:
    """The checksum of bytes that come one part after the other, all but the last of whole blocks."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._digests = bytearray()

    def add(self, part: Buffer) -> None:
        """These contiguous bytes come next. Raises ValueError after a part that was not of whole blocks."""
        if self._nbytes % CHECKSUM_BLOCK:
            raise ValueError(f"expected parts of whole blocks of {CHECKSUM_BLOCK} bytes, found {self._nbytes} bytes")
        view = memoryview(part).cast("B")
        for start, nbytes in split(view.nbytes, CHECKSUM_BLOCK):
            self._digests += xxhash.xxh3_64_intdigest(view[start : start + nbytes]).to_bytes(8, "little")
        self._nbytes += view.nbytes

    def value(self) -> int:
        """The checksum of all that has come, 0 <= result < 2**64."""
        return xxhash.xxh3_64_intdigest(self._digests, seed=self._nbytes)


def checksum(buffer: Buffer) -> int:
    """The checksum of a contiguous buffer's bytes, 0 <= result < 2**64. See "Definition" above."""
    running = RunningChecksum()
    running.add(buffer)
    return running.value()


def mismatch(operation: str, spans: Sequence[Span], *, expected: int, found: int) -> ChecksumError:
    """The error for bytes in `spans` whose checksum is not the expected one."""
    file, offset, nbytes = spans[0]
    others = [f"{length} bytes at offset {start} in {other.path!r}" for other, start, length in spans[1:]]
    return ChecksumError(
        operation, file.path, offset=offset, length=nbytes, expected=expected, found=found, others=tuple(others)
    )
