"""Reading a snapshot.

Owns the look at its files, the reading of planes in order, and their verification. Does not know models or pages.
Guarantees that files which are missing, cut short, foreign or damaged are an error naming the file, and that a piece
read to its end has been compared with its checksum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from swap import ChecksumError, FormatError, SwapError
from tiermem.checkpoint.manifest import NAME, VALUE, DataFile, Kept, Piece, SnapshotManifest, parse
from tiermem.checkpoint.tensor_file import (
    BLOCK_NBYTES,
    DTYPES,
    TensorFile,
    TensorInfo,
    TensorReader,
    bytes_of,
    open_tensors,
    read_text,
)
from tiermem.errors import ResumeError

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot whose manifest and headers fit each other. The data have not been looked at."""

    path: Path
    manifest: SnapshotManifest
    files: tuple[TensorFile, ...]

    @property
    def record(self) -> Mapping[str, Any]:
        """Everything that is not a tensor."""
        return self.manifest.record

    def dtype(self, kept: Kept, plane: str) -> torch.dtype:
        """The dtype of a plane's elements."""
        return _DTYPES[kept.dtype] if plane == VALUE else torch.float32

    def parameter_dtype(self, kept: Kept) -> torch.dtype:
        """The dtype of a parameter or buffer itself; its master has another."""
        return _DTYPES[kept.dtype]

    def reader(self, kept: Kept, plane: str, *, first: int = 0, compare: bool = True) -> PlaneReader:
        """Read a plane from element `first` on. A piece that is not read from its beginning cannot be compared."""
        return PlaneReader(self.files, kept.planes[plane], self.dtype(kept, plane), first=first, compare=compare)

    def whole(self, kept: Kept, plane: str, *, compare: bool = True) -> torch.Tensor:
        """A plane as a tensor of its own, of the parameter's shape and strides."""
        values = torch.empty(kept.numel, dtype=self.dtype(kept, plane), device="cpu")
        self.reader(kept, plane, compare=compare).take(values)
        return values.as_strided(kept.shape, kept.stride)

    def verify(self) -> Iterator[str]:
        """Read every byte of data and compare it; yield what is wrong. Raises nothing for damage."""
        pieces = [
            (piece, self.dtype(kept, plane))
            for kept in self.manifest.kept
            for plane, pieces in kept.planes.items()
            for piece in pieces
        ]
        for piece, dtype in pieces:  # each by itself: those after a damaged one are in other ranks' files
            try:
                reader = PlaneReader(self.files, [piece], dtype, first=piece.first, compare=True)
                for block in blocks_of(reader, piece.count):
                    del block
            except SwapError as error:
                yield str(error)


class PlaneReader:
    """Reads one plane in order; a piece that has been read to its end is compared with its checksum."""

    def __init__(
        self, files: Sequence[TensorFile], pieces: Sequence[Piece], dtype: torch.dtype, *, first: int, compare: bool
    ) -> None:
        self.dtype = dtype
        self._files = files
        self._left = [piece for piece in pieces if piece.first + piece.count > first]
        self._done = first - self._left[0].first if self._left else 0  # elements of the first of these pieces
        self._compare = compare
        self._whole = self._done == 0  # whether that piece is read from its beginning, and can be compared
        self._digest = xxhash.xxh3_64()

    def take(self, out: torch.Tensor) -> None:
        """Fill `out` (1-D, contiguous, of the plane's dtype) with the next elements.

        Raises swap.ChecksumError, SwapIOError, FormatError where the file ends before.
        """
        begin = 0
        while begin < out.numel():
            piece = self._left[0]
            file = self._files[piece.file]
            count = min(piece.count - self._done, out.numel() - begin)
            with file.reading() as reader:
                self._read(reader, file.tensors[piece.tensor], out[begin : begin + count])
            begin += count
            self._done += count
            if self._done == piece.count:
                self._end(piece, file)

    def _read(self, reader: TensorReader, info: TensorInfo, out: torch.Tensor) -> None:
        step = BLOCK_NBYTES // self.dtype.itemsize
        for begin in range(0, out.numel(), step):
            data = bytes_of(out[begin : begin + step])
            reader.read(data, info.offset + (self._done + begin) * self.dtype.itemsize)
            if self._compare:
                self._digest.update(data)

    def _end(self, piece: Piece, file: TensorFile) -> None:
        info = file.tensors[piece.tensor]
        if self._compare and self._whole and self._digest.hexdigest() != piece.checksum:
            raise ChecksumError(
                "read",
                file.path,
                offset=info.offset,
                length=info.nbytes,
                expected=int(piece.checksum, 16),
                found=self._digest.intdigest(),
            )
        self._digest.reset()
        self._whole = True
        self._left.pop(0)
        self._done = 0


def blocks_of(reader: PlaneReader, numel: int) -> Iterator[torch.Tensor]:
    """The next `numel` elements in blocks of a few MiB, each valid until the next."""
    step = BLOCK_NBYTES // reader.dtype.itemsize
    block = torch.empty(min(step, numel), dtype=reader.dtype, device="cpu")
    for begin in range(0, numel, step):
        part = block[: min(step, numel - begin)]
        reader.take(part)
        yield part


def is_snapshot(path: Path) -> bool:
    """Whether a folder looks like a snapshot, whole or not: swap directories have no files of these names."""
    return (path / NAME).exists() or any(path.glob("rank-*.safetensors"))


def open_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Look at a snapshot: its manifest and the headers of its files, which must fit.

    Raises:
        ResumeError: there is no snapshot.
        swap.FormatError: manifest or a header is damaged, a file is missing, cut short or not the one written.
        swap.SwapIOError: a file cannot be read.
    """
    folder = Path(os.path.abspath(os.path.expanduser(os.fspath(path))))
    if not (folder / NAME).exists():
        raise ResumeError(f"expected a snapshot in {str(folder)!r}, found no {NAME} there")
    manifest = parse(read_text(folder / NAME).encode(), os.fspath(folder / NAME))
    files: list[TensorFile] = []
    errors: list[FormatError] = []
    for data in manifest.files:
        try:
            files.append(_open_file(folder, data))
        except FormatError as error:  # the others are looked at, too: who mends it wants to know all
            errors.append(error)
    if len(errors) > 1:
        raise FormatError("; ".join(map(str, errors)))
    if errors:
        raise errors[0]
    snapshot = Snapshot(folder, manifest, tuple(files))
    for kept in manifest.kept:
        _require_tensors(snapshot, kept)
    return snapshot


def _open_file(folder: Path, data: DataFile) -> TensorFile:
    """One of its files. Raises FormatError if it is not the one that was written."""
    if not (folder / data.name).exists():
        raise FormatError(f"the snapshot {str(folder)!r} is not whole: {data.name} is missing")
    file = open_tensors(folder / data.name)
    found = (folder / data.name).stat().st_size
    if found != data.nbytes:
        raise FormatError(f"expected {str(folder / data.name)!r} to have {data.nbytes} bytes, found {found}")
    if (digest := _header_checksum(file)) != data.header:
        raise FormatError(f"the header of {str(folder / data.name)!r}: expected {data.header}, found {digest}")
    return file


def _require_tensors(snapshot: Snapshot, kept: Kept) -> None:
    if kept.dtype not in _DTYPES:
        raise FormatError(f"{kept.names[0]}: expected a dtype of torch, found {kept.dtype!r}")
    for plane, pieces in kept.planes.items():
        for piece in pieces:
            file = snapshot.files[piece.file]
            info = file.tensors.get(piece.tensor)
            if info is None or info.shape != (piece.count,) or info.dtype != snapshot.dtype(kept, plane):
                found = "none" if info is None else f"{list(info.shape)} of {info.dtype}"
                raise FormatError(
                    f"{str(file.path)!r}: expected tensor {piece.tensor!r} of [{piece.count}] "
                    f"{snapshot.dtype(kept, plane)} as the manifest says, found {found}"
                )


def _header_checksum(file: TensorFile) -> str:
    header = bytearray(file.data_offset)
    with file.reading() as reader:
        reader.read(memoryview(header), 0)
    return xxhash.xxh3_64_hexdigest(bytes(header))
