"""Writing a snapshot.

Owns what goes into which file, and the order: data files, each durable, then the manifest, then the folder's name.
Does not know where state lies: a `RankState` gives it. Guarantees that every byte has a checksum in the manifest, and
that a folder with a manifest is whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from tiermem.checkpoint.draft import Draft
from tiermem.checkpoint.manifest import (
    BUFFER,
    FROZEN,
    NAME,
    TRAINED,
    VALUE,
    DataFile,
    Kept,
    Piece,
    SnapshotManifest,
    pack,
)
from tiermem.checkpoint.shard import Holding, RankState
from tiermem.checkpoint.tensor_file import bytes_of
from tiermem.checkpoint.tensor_writer import TensorSpec, TensorWriter, divided
from tiermem.errors import InvariantError
from tiermem.zero3.layout import contiguous_stride

FILE_NBYTES = 8 << 30  # of data, but for a parameter that is larger


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has written: its files, and its pieces by parameter number (first names for buffers)."""

    files: tuple[DataFile, ...]
    kept: tuple[tuple[int | str, Kept], ...]

    def to_text(self) -> str:
        """The part as text for another rank; `from_text` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """What `to_text` made."""
        found = json.loads(text)
        for _, row in found["kept"]:
            row.update({key: tuple(row[key]) for key in ("names", "shape", "stride")})
            row["planes"] = {name: tuple(Piece(**each) for each in own) for name, own in row["planes"].items()}
        files = tuple(DataFile(**row) for row in found["files"])
        return cls(files, tuple((number, Kept(**row)) for number, row in found["kept"]))


def write_part(draft: Draft, state: RankState, *, rank: int = 0, file_nbytes: int = FILE_NBYTES) -> Part:
    """Write all that a rank has into files of its own; waits until they are durable.

    Raises swap.SwapFullError, SwapIOError, and what the reading of its state raises.
    """
    files: list[DataFile] = []
    kept: list[tuple[int | str, Kept]] = []
    for group in divided(state.holdings(), _nbytes, file_nbytes):
        name = f"rank-{rank:05d}-{len(files) + 1:05d}.safetensors"
        specs = [
            TensorSpec(_tensor_name(holding, plane), dtype, (holding.count,))
            for holding in group
            for plane, dtype in holding.planes.items()
        ]
        writer = draft.tensors(name, specs)
        for holding in group:
            _write_holding(writer, state, holding)
        written = writer.finish()
        kept += [(holding.slot.parameter, _kept(holding, len(files), written.tensors)) for holding in group]
        files.append(DataFile(name, rank, written.nbytes, written.header))
    return Part(tuple(files), tuple(kept))


def _write_holding(writer: TensorWriter, state: RankState, holding: Holding) -> None:
    """On its own, so that the last block, which may be a view of a page, is not kept while the next page is read."""
    for plane, values in state.blocks(holding):
        writer.write(_tensor_name(holding, plane), bytes_of(values))


def write_buffers(draft: Draft, buffers: Mapping[str, torch.Tensor]) -> Part:
    """Write the model's buffers (CPU tensors) into a file of their own, the first rank's; nothing if there are none."""
    if not buffers:
        return Part((), ())
    name = "rank-00000-buffers.safetensors"
    flat = {key: values.detach().contiguous().reshape(-1) for key, values in buffers.items()}
    writer = draft.tensors(name, [TensorSpec(key, values.dtype, tuple(values.shape)) for key, values in flat.items()])
    for key, values in flat.items():
        writer.write(key, bytes_of(values))
    written = writer.finish()
    kept = []
    for key, values in buffers.items():
        shape = tuple(values.shape)
        planes = {VALUE: (Piece(0, key, 0, values.numel(), written.tensors[key]),)}
        kept.append((key, Kept(BUFFER, (key,), shape, contiguous_stride(shape), _dtype(values.dtype), planes)))
    return Part((DataFile(name, 0, written.nbytes, written.header),), tuple(kept))


def finish_snapshot(
    draft: Draft, parts: Sequence[Part], record: Mapping[str, Any], *, seconds: float, world_size: int = 1
) -> None:
    """Join what all ranks have written, write the manifest and give the folder its name; durable when this returns.

    `record` has "random" (a list by rank) and what `manifest` asks for. Raises swap.SwapFullError, SwapIOError.
    """
    manifest = join(parts, record, seconds=seconds, world_size=world_size)
    draft.text(NAME, pack(manifest).decode("ascii"))
    draft.finish()


def join(parts: Sequence[Part], record: Mapping[str, Any], *, seconds: float, world_size: int) -> SnapshotManifest:
    """The manifest of all parts together. Raises InvariantError unless they cover every parameter exactly once."""
    files: list[DataFile] = []
    pieces: dict[int | str, dict[str, list[Piece]]] = {}
    forms: dict[int | str, Kept] = {}
    for part in parts:
        shift = len(files)
        files.extend(part.files)
        for number, kept in part.kept:
            forms.setdefault(number, kept)
            for plane, own in kept.planes.items():
                moved = [Piece(each.file + shift, each.tensor, each.first, each.count, each.checksum) for each in own]
                pieces.setdefault(number, {}).setdefault(plane, []).extend(moved)
    order = sorted(forms, key=lambda number: (isinstance(number, str), number if isinstance(number, int) else 0))
    joined = []
    for number in order:
        form = forms[number]
        planes = {plane: tuple(sorted(own, key=lambda each: each.first)) for plane, own in pieces[number].items()}
        for plane, own in planes.items():
            ends = [0, *(each.first + each.count for each in own)]
            if [each.first for each in own] != ends[:-1] or ends[-1] != form.numel:
                raise InvariantError(f"{form.names[0]} {plane}: the ranks' pieces leave gaps or overlap")
        joined.append(Kept(form.kind, form.names, form.shape, form.stride, form.dtype, planes))
    return SnapshotManifest(world_size, seconds, tuple(files), tuple(joined), json.loads(json.dumps(record)))


def _nbytes(holding: Holding) -> int:
    return holding.count * sum(dtype.itemsize for dtype in holding.planes.values())


def _kept(holding: Holding, file: int, digests: Mapping[str, str]) -> Kept:
    slot = holding.slot
    names = {plane: _tensor_name(holding, plane) for plane in holding.planes}
    return Kept(
        TRAINED if slot.trainable else FROZEN,
        slot.names,
        slot.shape,
        slot.stride,
        _dtype(slot.dtype),
        {plane: (Piece(file, name, holding.first, holding.count, digests[name]),) for plane, name in names.items()},
    )


def _tensor_name(holding: Holding, plane: str) -> str:
    where = "" if holding.count == holding.slot.numel else f"@{holding.first}"
    return f"{holding.slot.names[0]}:{plane}{where}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
