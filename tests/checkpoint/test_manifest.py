"""The manifest of a snapshot: what is packed comes back, and everything that does not fit together is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import xxhash

import swap
from tiermem.checkpoint import manifest as module
from tiermem.checkpoint.manifest import (
    BUFFER,
    FIRST,
    FROZEN,
    MASTER,
    SECOND,
    TRAINED,
    VALUE,
    DataFile,
    Kept,
    Piece,
    SnapshotManifest,
    pack,
    parse,
)

DIGEST = "0123456789abcdef"
RECORD = {"step": 3, "random": [1], "optimizers": [], "extra": None, "param_dtype": "float32", "pretrained": None}


def pieces(*counts: int) -> tuple[Piece, ...]:
    return tuple(Piece(n % 2, f"t{n}", sum(counts[:n]), count, DIGEST) for n, count in enumerate(counts))


def whole() -> SnapshotManifest:
    files = tuple(DataFile(f"rank-{rank}.safetensors", rank, 100, DIGEST) for rank in range(2))
    kept = (
        Kept(
            TRAINED, ("weight", "tied"), (2, 3), (3, 1), "float32", dict.fromkeys((MASTER, FIRST, SECOND), pieces(4, 2))
        ),
        Kept(FROZEN, ("frozen",), (2, 3), (1, 2), "float16", {VALUE: pieces(6)}),
        Kept(BUFFER, ("count",), (), (), "int64", {VALUE: pieces(1)}),
    )
    return SnapshotManifest(2, 1.5, files, kept, RECORD)


def changed(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The bytes of a manifest whose body was changed, with the checksum of the new one."""
    found = json.loads(pack(whole()))
    change(found["body"])
    body = json.dumps(found["body"], separators=(",", ":")).encode()
    found["checksum"] = xxhash.xxh3_64_hexdigest(body)
    return json.dumps(found, separators=(",", ":")).encode()


def setting(*path: Any) -> Callable[[dict[str, Any]], Any]:
    """Puts the last of these at the place that the others name."""
    *way, key, value = path

    def change(body: dict[str, Any]) -> None:
        node: Any = body
        for step in way:
            node = node[step]
        node[key] = value

    return change


def lacking(*path: Any) -> Callable[[dict[str, Any]], Any]:
    *way, key = path

    def change(body: dict[str, Any]) -> None:
        node: Any = body
        for step in way:
            node = node[step]
        del node[key]

    return change


FIRST_FILE, WEIGHT, MASTERS = ("files", 0), ("kept", 0), ("kept", 0, "planes", MASTER)
WRONG = {
    "no ranks": setting("world_size", 0),
    "a file twice": setting(*FIRST_FILE, 0, "rank-1.safetensors"),
    "a file of a rank that is none": setting(*FIRST_FILE, 1, 2),
    "a file above": setting(*FIRST_FILE, 0, ".."),
    "a file elsewhere": setting(*FIRST_FILE, 0, "a/b"),
    "a file no system can name": setting(*FIRST_FILE, 0, "a\0b"),
    "the manifest itself": setting(*FIRST_FILE, 0, "manifest.json"),
    "a truth for a number": setting(*FIRST_FILE, 2, True),
    "too large a number": setting(*FIRST_FILE, 2, module.LIMIT),
    "a short checksum": setting(*FIRST_FILE, 3, DIGEST[1:]),
    "a checksum of other letters": setting(*FIRST_FILE, 3, DIGEST.upper()),
    "no name": setting(*WEIGHT, "names", []),
    "a name twice": setting(*WEIGHT, "names", ["weight", "count"]),
    "fewer strides than sizes": setting(*WEIGHT, "stride", [1]),
    "strides with holes": setting(*WEIGHT, "stride", [6, 2]),
    "strides that overlap": setting(*WEIGHT, "stride", [1, 1]),
    "planes of another kind": setting(*WEIGHT, "kind", FROZEN),
    "one moment": lacking(*WEIGHT, "planes", SECOND),
    "no master": lacking(*WEIGHT, "planes", MASTER),
    "a gap": setting(*MASTERS, 1, 2, 5),
    "pieces that overlap": setting(*MASTERS, 1, 2, 3),
    "a file that is not listed": setting(*MASTERS, 1, 0, 2),
    "too few elements": setting(*MASTERS, 1, 3, 1),
    "too many elements": setting(*MASTERS, 1, 3, 3),
    "a step before the first": setting("record", "step", -1),
    "no random states": setting("record", "random", []),
    "optimizers in another form": setting("record", "optimizers", {}),
    "no record": setting("record", []),
    **{f"no {key}": lacking("record", key) for key in RECORD},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_together_is_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    assert parse(changed(lambda _: None), "x") == whole()
    with pytest.raises(swap.FormatError, match="to be the manifest of a snapshot"):
        parse(changed(change), "x")


def test_a_size_that_no_disk_has_is_refused() -> None:
    vast = Kept(FROZEN, ("vast",), (1 << 31, 1 << 31), (1 << 31, 1), "int8", {VALUE: pieces(1 << 61, 1 << 61)})
    with pytest.raises(swap.FormatError, match="dense strides"):
        parse(pack(replace(whole(), kept=(vast,))), "x")


def test_masters_may_be_without_moments() -> None:
    weight = replace(whole().kept[0], planes={MASTER: pieces(6)})
    found = replace(whole(), kept=(weight, *whole().kept[1:]))
    assert parse(pack(found), "x") == found


def test_damage_is_found_wherever_it_is() -> None:
    found = pack(whole())
    for damaged in (found.replace(b'"seconds":1.5', b'"seconds":1.6'), found.replace(b'":', b'": ', 1)):
        with pytest.raises(swap.FormatError, match="damaged"):
            parse(damaged, "x")
