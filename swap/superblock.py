"""The superblock: the first bytes of a swap file, which say what it is.

Owns the layout, its version, and the wording of every way in which it can be wrong. Does not open files: it turns a
value into bytes and bytes into a value. Guarantees that whatever bytes it is given, it returns a `Superblock` or raises
FormatError, and that a foreign file, another version and damage are told apart.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass, field

from swap.blocks import ALIGNMENT, is_aligned
from swap.errors import FormatError

MAGIC = b"tiermem-swapfile"
VERSION = 2
RUN_ID_BYTES = 16

_PREFIX = struct.Struct("<16sI")  # magic, version: the same in every version
_FIELDS = struct.Struct("<16sIIQ16sII")  # ..., data offset, data bytes, run id, index, count
_CRC = struct.Struct("<I")  # CRC-32 of the fields before
SUPERBLOCK_BYTES = _FIELDS.size + _CRC.size
LEFT_ALONE = "; it was left alone: move it away or choose another directory or name"


def new_run_id() -> bytes:
    """A number no other run has."""
    return os.urandom(RUN_ID_BYTES)


@dataclass(frozen=True, slots=True)
class Identity:
    """Which run made a file, and which of the run's `count` files it is."""

    run_id: bytes = field(default_factory=new_run_id)
    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a swap file says of itself: who made it, and how many bytes of data follow."""

    identity: Identity
    nbytes: int


def pack(block: Superblock) -> bytes:
    """The superblock as `SUPERBLOCK_BYTES` bytes."""
    identity = block.identity
    fields = _FIELDS.pack(MAGIC, VERSION, ALIGNMENT, block.nbytes, identity.run_id, identity.index, identity.count)
    return fields + _CRC.pack(zlib.crc32(fields))


def parse(found: bytes, path: str) -> Superblock:
    """The superblock in the first bytes of a file. `path` is for messages. Raises FormatError for anything else."""
    if found[: len(MAGIC)] != MAGIC:
        raise FormatError(f"expected {path!r} to be a swap file of this program, found something else{LEFT_ALONE}")
    if len(found) >= _PREFIX.size and (version := _PREFIX.unpack_from(found)[1]) != VERSION:
        raise FormatError(f"expected {path!r} to be of version {VERSION}, found version {version}{LEFT_ALONE}")
    whole = found[:SUPERBLOCK_BYTES]
    if len(whole) < SUPERBLOCK_BYTES or zlib.crc32(whole[: -_CRC.size]) != _CRC.unpack(whole[-_CRC.size :])[0]:
        raise FormatError(f"expected {path!r} to have a whole superblock, found a damaged one{LEFT_ALONE}")
    _, _, data_offset, nbytes, run_id, index, count = _FIELDS.unpack_from(whole)
    if data_offset != ALIGNMENT or not is_aligned(nbytes) or not 0 <= index < count:
        found_fields = f"{data_offset=} {nbytes=} {index=} {count=}"
        raise FormatError(f"expected {path!r} to have a sensible superblock, found {found_fields}{LEFT_ALONE}")
    return Superblock(Identity(run_id, index, count), nbytes)
