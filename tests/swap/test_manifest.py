"""A manifest is read back as it was packed; fields that make no sense are refused, whatever its checksums say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swap.errors import FormatError
from swap.extents import Extent, Piece
from swap.manifest import LIMIT, Entry, Manifest, pack, parse

WHOLE = Manifest(
    generation=7,
    run_id=b"0123456789abcdef",
    file_sizes=(1 << 20, LIMIT - 1),
    entries=(
        Entry("a", Extent((Piece(0, 4096, 8192), Piece(1, 0, 4096)), 0), 0),
        Entry("b", Extent((Piece(1, 4096, 4096),), 1), (1 << 64) - 1),
    ),
    user={"step": 3, "loss": [0.5, None]},
    seconds=1e9,
)


def entry(key: Any = "a", slot: Any = 0, digest: Any = 1, pieces: Any = ((0, 4096, 4096),)) -> Entry:
    return Entry(key, Extent(tuple(Piece(*piece) for piece in pieces), slot), digest)


WRONG: dict[str, dict[str, Any]] = {
    "the user is no object": {"user": [1]},
    "sizes that are no list": {"file_sizes": 5},
    "a size that is no number": {"file_sizes": ("many",)},
    "a size below zero": {"file_sizes": (-4096,)},
    "a size no disk has": {"file_sizes": (LIMIT,)},
    "a time that is none": {"seconds": "yesterday"},
    "a key twice": {"entries": (entry(), entry())},
    "a key that is no text": {"entries": (entry(key=5),)},
    "no extent": {"entries": (entry(pieces=()),)},
    "a slot that is true": {"entries": (entry(slot=True),)},
    "a slot below zero": {"entries": (entry(slot=-1),)},
    "a checksum of more than 64 bits": {"entries": (entry(digest=1 << 64),)},
    "a checksum below zero": {"entries": (entry(digest=-1),)},
    "a directory that is not there": {"entries": (entry(pieces=[(2, 4096, 4096)]),)},
    "a directory below zero": {"entries": (entry(pieces=[(-1, 4096, 4096)]),)},
    "an offset below zero": {"entries": (entry(pieces=[(0, -4096, 4096)]),)},
    "an offset that is not aligned": {"entries": (entry(pieces=[(0, 4097, 4096)]),)},
    "a length that is not aligned": {"entries": (entry(pieces=[(0, 4096, 4095)]),)},
    "a piece without bytes": {"entries": (entry(pieces=[(0, 4096, 0)]),)},
    "a part of a byte": {"entries": (entry(pieces=[(0, 4096.0, 4096)]),)},
}


def test_a_manifest_is_read_back_as_it_was_packed() -> None:
    assert parse(pack(WHOLE), "here") == WHOLE
    assert WHOLE.nbytes == 8192 + 4096 + 4096


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_fields_that_make_no_sense_are_refused_though_their_checksum_is_right(fields: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"expected 'here' to hold a manifest, found (Type|Value)Error"):
        parse(pack(replace(WHOLE, **fields)), "here")
