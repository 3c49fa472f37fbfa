"""The manifest: what a commit says, as a value and as bytes.

Owns the format: a fixed header (magic, version, length, generation, run id, its own checksum) and a JSON payload with
its checksum in the header. Does not open files. Guarantees that `parse` returns a manifest that was packed exactly so,
or raises FormatError saying which part is wrong, whatever bytes it is given; nothing in it is ever executed.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swap.blocks import is_aligned
from swap.checksums import checksum
from swap.errors import FormatError
from swap.extents import Extent, Piece

MAGIC = b"tiermem-manifest"
VERSION = 1

_PREFIX = struct.Struct("<16sI")  # magic, version: the same in every version
_FIELDS = struct.Struct("<16sIQQQ16s")  # ..., generation, payload bytes, payload checksum, run id
_CRC = struct.Struct("<I")  # CRC-32 of the fields before
HEADER_BYTES = _FIELDS.size + _CRC.size
LIMIT = 1 << 62  # no offset or length on disk is as large


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a commit: where its bytes lie and their checksum."""

    key: str
    extent: Extent
    checksum: int

    @property
    def nbytes(self) -> int:
        """Bytes of the extent."""
        return self.extent.nbytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """One commit. `file_sizes`: data bytes of the swap file in each directory. `user`: JSON values of the caller's.

    `seconds`: when it was made, since 1970 UTC, for people only: nothing is decided by a clock.
    """

    generation: int
    run_id: bytes
    file_sizes: tuple[int, ...]
    entries: tuple[Entry, ...]
    user: Mapping[str, Any]
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.nbytes for entry in self.entries)


def pack(manifest: Manifest) -> bytes:
    """The manifest as bytes. Raises TypeError or ValueError for a `user` that JSON does not hold."""
    payload = json.dumps(
        {
            "file_sizes": manifest.file_sizes,
            "seconds": manifest.seconds,
            "user": manifest.user,
            "entries": [
                [
                    entry.key,
                    entry.extent.slot,
                    entry.checksum,
                    [[piece.directory, piece.offset, piece.nbytes] for piece in entry.extent.pieces],
                ]
                for entry in manifest.entries
            ],
        },
        separators=(",", ":"),
        allow_nan=True,  # a user's loss may be one; Python reads back what it writes
    ).encode("ascii")
    fields = _FIELDS.pack(MAGIC, VERSION, manifest.generation, len(payload), checksum(payload), manifest.run_id)
    return fields + _CRC.pack(zlib.crc32(fields)) + payload


def is_ours(found: bytes) -> bool:
    """Whether bytes from the start of a file are those of a manifest of any version, or the beginning of one."""
    return MAGIC.startswith(found[: len(MAGIC)])


def parse(found: bytes, path: str) -> Manifest:
    """The manifest in a file's bytes. `path` is for messages. Raises FormatError for anything else."""
    if found[: len(MAGIC)] != MAGIC:
        raise FormatError(
            f"expected {path!r} to be a manifest of this program, found something else; it was left alone"
        )
    if len(found) >= _PREFIX.size and (version := _PREFIX.unpack_from(found)[1]) != VERSION:
        raise FormatError(f"expected {path!r} to be of version {VERSION}, found version {version}; it was left alone")
    header, payload = found[:HEADER_BYTES], found[HEADER_BYTES:]
    if len(header) < HEADER_BYTES or zlib.crc32(header[: -_CRC.size]) != _CRC.unpack(header[-_CRC.size :])[0]:
        raise FormatError(f"expected {path!r} to have a whole header, found a damaged one")
    _, _, generation, length, digest, run_id = _FIELDS.unpack_from(header)
    if len(payload) != length:
        raise FormatError(f"expected {path!r} to hold {length} bytes after its header, found {len(payload)}")
    if (computed := checksum(payload)) != digest:
        raise FormatError(f"expected {path!r} to have checksum {digest:#018x}, found {computed:#018x}: it is damaged")
    try:
        return _decode(json.loads(payload), generation, run_id)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FormatError(f"expected {path!r} to hold a manifest, found {type(error).__name__}: {error}") from error


def _decode(fields: Any, generation: int, run_id: bytes) -> Manifest:
    """Raises KeyError, TypeError, ValueError or OverflowError unless every field is what `pack` makes."""
    if not isinstance(fields, dict) or not isinstance(fields["user"], dict):
        raise TypeError("expected an object with a user object in it")
    sizes = tuple(_count(size) for size in fields["file_sizes"])
    entries = tuple(_entry(sizes, *row) for row in fields["entries"])
    if len({entry.key for entry in entries}) != len(entries):
        raise ValueError("expected each key once")
    return Manifest(generation, run_id, sizes, entries, fields["user"], float(fields["seconds"]))


def _entry(sizes: Sequence[int], key: Any, slot: Any, digest: Any, rows: Any) -> Entry:
    if not isinstance(key, str):
        raise TypeError(f"expected a key to be text, found {key!r}")
    pieces = tuple(Piece(_count(directory), _count(offset), _count(nbytes)) for directory, offset, nbytes in rows)
    for piece in pieces:
        if piece.directory >= len(sizes) or not piece.nbytes or not is_aligned(piece.offset | piece.nbytes):
            raise ValueError(f"expected aligned bytes in one of {len(sizes)} directories, found {piece}")
    if not pieces:
        raise ValueError(f"expected {key!r} to have an extent, found none")
    return Entry(key, Extent(pieces, _count(slot)), _count(digest, limit=1 << 64))


def _count(value: Any, *, limit: int = LIMIT) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"expected a number from 0 to {limit - 1}, found {value!r}")
    return value
