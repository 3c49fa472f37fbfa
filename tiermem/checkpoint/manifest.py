"""The manifest of a snapshot: JSON that says what each file holds, and by which checksums to know it again.

Owns the format ("The format" below) and its checks. Does not read or write files. Guarantees that what `pack` makes
`parse` gives back equal, and that any other bytes are a FormatError which says what is wrong; nothing in it is ever
executed.

The format. One JSON object: `format`, `version`, `checksum` (XXH3-64 of the compact JSON of `body`) and `body`. The
body lists the files, and for each parameter (in the model's order) and buffer its names, form and planes. A plane is
what is kept of each element: `value` (in the parameter's dtype) of buffers and frozen parameters, `master`, `exp_avg`
and `exp_avg_sq` (float32) of trained ones. A plane is divided into pieces: elements [first, first + count) in memory
order are the one-dimensional tensor `tensor` of file `file`. Which rank wrote a piece means nothing to a reader, nor do
units, tiles, swap directories and budgets: they do not occur. The parameter is the master rounded to its dtype.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from swap import FormatError
from tiermem.zero3.layout import is_dense

NAME = "manifest.json"
FORMAT = "tiermem-snapshot"
VERSION = 1
LIMIT = 1 << 62  # no count on disk is as large

VALUE, MASTER, FIRST, SECOND = "value", "master", "exp_avg", "exp_avg_sq"
TRAINED, FROZEN, BUFFER = "trained", "frozen", "buffer"
_PLANES = {TRAINED: ({MASTER}, {MASTER, FIRST, SECOND}), FROZEN: ({VALUE},), BUFFER: ({VALUE},)}
_RECORD = ("step", "random", "optimizers", "extra", "param_dtype", "pretrained")


@dataclass(frozen=True, slots=True)
class DataFile:
    """One safetensors file. `header`: XXH3-64 of everything before the data."""

    name: str
    rank: int
    nbytes: int
    header: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [first, first + count) of a plane; `checksum`: XXH3-64 of the tensor's bytes."""

    file: int
    tensor: str
    first: int
    count: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Kept:
    """A parameter or a buffer. `stride`: in elements, of the memory order in which planes are kept; dense."""

    kind: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    planes: Mapping[str, tuple[Piece, ...]]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SnapshotManifest:
    """A snapshot. `record`: step, random states by rank, optimizers, the caller's extra, param_dtype, pretrained.

    `extra` is the first rank's; where another one's differs the record has "extras", a list by rank. One that was made
    of a commit has "others as built": buffers that are not there are those of the program that builds the model.

    `seconds`: when it was made, since 1970 UTC, for people only.
    """

    world_size: int
    seconds: float
    files: tuple[DataFile, ...]
    kept: tuple[Kept, ...]
    record: Mapping[str, Any]

    @property
    def parameters(self) -> tuple[Kept, ...]:
        """Parameters in the model's order."""
        return tuple(kept for kept in self.kept if kept.kind != BUFFER)

    @property
    def buffers(self) -> tuple[Kept, ...]:
        """Buffers."""
        return tuple(kept for kept in self.kept if kept.kind == BUFFER)

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.nbytes for file in self.files)


def pack(manifest: SnapshotManifest) -> bytes:
    """The manifest as bytes. Raises TypeError or ValueError for a record that JSON does not hold."""
    body = {
        "world_size": manifest.world_size,
        "seconds": manifest.seconds,
        "files": [[file.name, file.rank, file.nbytes, file.header] for file in manifest.files],
        "kept": [
            {
                "kind": kept.kind,
                "names": list(kept.names),
                "shape": list(kept.shape),
                "stride": list(kept.stride),
                "dtype": kept.dtype,
                "planes": {
                    plane: [[each.file, each.tensor, each.first, each.count, each.checksum] for each in pieces]
                    for plane, pieces in kept.planes.items()
                },
            }
            for kept in manifest.kept
        ],
        "record": dict(manifest.record),
    }
    return _dump({"format": FORMAT, "version": VERSION, "checksum": _checksum(body), "body": body})


def parse(found: bytes, path: str) -> SnapshotManifest:
    """The manifest in a file's bytes. `path` is for messages. Raises FormatError for anything else."""
    try:
        whole = json.loads(found)
        if not isinstance(whole, dict) or whole.get("format") != FORMAT:
            raise TypeError(f"expected an object of format {FORMAT!r}")
        if whole["version"] != VERSION:
            raise ValueError(f"expected version {VERSION}, found {whole['version']!r}")
        if (computed := _checksum(whole["body"])) != whole["checksum"]:
            raise ValueError(f"expected checksum {whole['checksum']!r}, found {computed!r}: it is damaged")
        if _dump(whole) != found:  # a bit that JSON reads over, in an escape or between two words
            raise ValueError("it is damaged in a place without meaning")
        return _decode(whole["body"])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FormatError(f"expected {path!r} to be the manifest of a snapshot: {error}") from error


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _checksum(body: Any) -> str:
    return xxhash.xxh3_64_hexdigest(_dump(body))


def _decode(body: Any) -> SnapshotManifest:
    """Raises one of the errors that `parse` catches unless every field is what `pack` makes."""
    world_size = _count(body["world_size"], least=1)
    files = tuple(_file(*row) for row in body["files"])
    if len({file.name for file in files}) != len(files):
        raise ValueError("expected each file once")
    if any(file.rank >= world_size for file in files):
        raise ValueError(f"expected files of {world_size} ranks")
    kept = tuple(_kept(row, files) for row in body["kept"])
    names = [name for each in kept for name in each.names]
    if len(set(names)) != len(names):
        raise ValueError("expected each name once")
    record = body["record"]
    if not isinstance(record, dict):
        raise TypeError("expected a record")
    for key in _RECORD:
        if key not in record:
            raise KeyError(key)
    _count(record["step"])
    if not isinstance(record["optimizers"], list) or not isinstance(record["random"], list) or not record["random"]:
        raise TypeError("expected lists of optimizers and of random states")
    if not isinstance(record.get("extras", []), list):
        raise TypeError("expected a list of extras")
    return SnapshotManifest(world_size, float(body["seconds"]), files, kept, record)


def _file(name: Any, rank: Any, nbytes: Any, header: Any) -> DataFile:
    if not is_file_name(name) or name == NAME:
        raise ValueError(f"expected the name of a file in the snapshot, found {name!r}")
    return DataFile(name, _count(rank), _count(nbytes), _digest(header))


def _kept(row: Any, files: Sequence[DataFile]) -> Kept:
    names = tuple(_text(name) for name in row["names"])
    shape = tuple(_count(size) for size in row["shape"])
    stride = tuple(_count(step) for step in row["stride"])
    numel = math.prod(shape)
    if not names or len(shape) != len(stride) or numel >= LIMIT or not is_dense(shape, stride):
        raise ValueError(f"expected a name, and a shape with dense strides, found {names}, {shape}, {stride}")
    planes = {plane: tuple(_piece(*each) for each in pieces) for plane, pieces in row["planes"].items()}
    if set(planes) not in _PLANES[row["kind"]]:
        raise ValueError(f"expected the planes of a {row['kind']} parameter, found {sorted(planes)}")
    for pieces in planes.values():
        begin = 0
        for piece in pieces:
            if piece.first != begin or piece.file >= len(files):
                raise ValueError(f"{names[0]}: expected pieces without gaps in {len(files)} files, found {piece}")
            begin += piece.count
        if begin != numel:
            raise ValueError(f"{names[0]}: expected pieces of {numel} elements together, found {begin}")
    return Kept(row["kind"], names, shape, stride, _text(row["dtype"]), planes)


def is_file_name(name: object) -> bool:
    """Whether it names a file in a folder, and nothing outside of that."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _piece(file: Any, tensor: Any, first: Any, count: Any, digest: Any) -> Piece:
    return Piece(_count(file), _text(tensor), _count(first), _count(count), _digest(digest))


def _digest(value: Any) -> str:
    if not isinstance(value, str) or len(value) != 16 or not set(value) <= set("0123456789abcdef"):
        raise ValueError(f"expected a checksum of 16 hexadecimal digits, found {value!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r}")
    return value


def _count(value: Any, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value < LIMIT:
        raise ValueError(f"expected a number from {least} to {LIMIT - 1}, found {value!r}")
    return value
