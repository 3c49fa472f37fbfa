"""Whatever bytes a manifest or a superblock has: a value that was packed, or FormatError."""

import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swap import FormatError, SwapError, checksum, manifest, superblock
from swap.commit import CommitStore
from swap.extents import Extent, Piece
from swap.manifest import Entry, Manifest

MUTANTS = 1500


def a_manifest() -> bytes:
    entries = tuple(
        Entry(
            f"unit{index}/STATE/{index % 3}", Extent((Piece(0, 4096 * index, 8192), Piece(1, 4096, 4096)), index % 2), 1
        )
        for index in range(1, 6)
    )
    return manifest.pack(
        Manifest(12, bytes(range(16)), (1 << 30, 1 << 20), entries, {"step": 3, "x": [1.5, None]}, 1e9)
    )


def a_superblock() -> bytes:
    return superblock.pack(superblock.Superblock(superblock.Identity(bytes(range(16)), 1, 3), 1 << 30))


def mutants(whole: bytes, seed: int) -> Iterator[bytes]:
    dice = random.Random(seed)
    for _ in range(MUTANTS):
        mutant = bytearray(whole)
        for _ in range(dice.choice([1, 1, 1, 2, 5])):
            at, length = dice.randrange(len(whole)), dice.randrange(1, 40)
            kind = dice.randrange(6)
            if kind == 0:
                del mutant[at:]
            elif kind == 1:
                mutant[at : at + 1] = bytes([dice.randrange(256)])
            elif kind == 2:
                mutant[at : at + length] = whole[(start := dice.randrange(len(whole))) : start + length]
            elif kind == 3:
                mutant[at:at] = dice.randbytes(length)
            elif kind == 4:
                mutant[at : at + 8] = struct.pack("<q", dice.choice([0, -1, 1 << 62, 4095, 1 << 31]))
            else:
                mutant[at : at + length] = bytes(length)
        yield bytes(mutant)


@pytest.mark.parametrize(
    ("whole", "parse"),
    [(a_manifest(), manifest.parse), (a_superblock(), superblock.parse)],
    ids=["manifest", "superblock"],
)
def test_mutated_bytes_are_a_format_error(whole: bytes, parse: Callable[[bytes, str], Any]) -> None:
    value = parse(whole, "x")
    refused = 0
    for mutant in mutants(whole, seed=1):
        try:
            assert parse(mutant, "x") == value  # a mutant can be what it was
        except FormatError:
            refused += 1
    assert refused > MUTANTS * 0.9


def resealed(payload: bytes, fields: bytes) -> bytes:
    """A manifest whose checksums are right, whatever its payload: what a bug in a writer would make."""
    start = struct.pack("<16sIQQQ16s", manifest.MAGIC, manifest.VERSION, 12, len(payload), checksum(payload), fields)
    return start + struct.pack("<I", zlib.crc32(start)) + payload


def test_mutated_payloads_with_right_checksums_are_a_format_error_or_make_sense() -> None:
    whole = a_manifest()
    payload = whole[manifest.HEADER_BYTES :]
    for mutant in mutants(payload, seed=2):
        try:
            found = manifest.parse(resealed(mutant, bytes(16)), "x")
        except FormatError:
            continue
        for entry in found.entries:
            assert entry.nbytes > 0
            assert all(piece.directory < len(found.file_sizes) for piece in entry.extent.pieces)
            assert all(0 <= piece.offset < manifest.LIMIT for piece in entry.extent.pieces)


VALUES: list[Any] = [
    None,
    True,
    -1,
    1.5,
    1 << 70,
    "",
    "text",
    [],
    {},
    [[]],
    [[0, 0, 0]],
    [[9, 4096, 4096]],
    [[0, 1, 4096]],
]


@pytest.mark.parametrize("place", ["file_sizes", "seconds", "user", "entries", 0, 1, 2, 3])
def test_every_field_of_a_wrong_kind_is_a_format_error(place: str | int) -> None:
    fields = json.loads(a_manifest()[manifest.HEADER_BYTES :])
    for value in VALUES:
        changed = json.loads(json.dumps(fields))
        if isinstance(place, str):
            changed[place] = value
        else:
            changed["entries"][1][place] = value
        packed = resealed(json.dumps(changed).encode(), bytes(16))
        try:
            found = manifest.parse(packed, "x")
        except FormatError:
            continue
        assert place in ("seconds", "user", "entries", 0, 1, 2), (place, value, found)


def test_a_deeply_nested_payload_is_a_format_error() -> None:
    with pytest.raises(FormatError):
        manifest.parse(resealed(b'{"user":' + b"[" * 100_000, bytes(16)), "x")


def test_mutated_manifests_on_disk(tmp_path: Path) -> None:
    path = tmp_path / f"r0.{12:020d}.manifest"
    for count, mutant in enumerate(mutants(a_manifest(), seed=3)):
        path.write_bytes(mutant)
        try:
            found = CommitStore([tmp_path], name="r0").read_latest()
        except SwapError as error:
            assert isinstance(error, FormatError)  # noqa: PT017
        else:
            assert found is not None
        assert path.read_bytes() == mutant
        if count == 200:
            break
