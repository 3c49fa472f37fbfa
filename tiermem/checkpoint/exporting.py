"""Weights for transformers, out of a commit or a snapshot, without the model.

Owns the two sources: PARAM pages of a commit, and masters of a snapshot rounded to the parameters' dtype. Does not
know a running model; what it has to know of one was recorded. Guarantees that a unit (of a commit) or a block (of a
snapshot) is in memory at a time, and that what is exported has been compared with its checksums.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swap import FormatError
from tiermem.checkpoint.manifest import BUFFER, MASTER, TRAINED, VALUE, Kept, is_file_name
from tiermem.checkpoint.reading import Snapshot, blocks_of
from tiermem.checkpoint.shard import MarkedPages
from tiermem.checkpoint.tensor_file import DTYPES, bytes_of, tensor_of
from tiermem.checkpoint.tensor_writer import TensorSpec
from tiermem.errors import ConfigError
from tiermem.pager.page import Intent, Kind, PageKey
from tiermem.zero3.layout import contiguous_stride, is_dense

_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a model said about its export, see `pretrained.export_record`."""

    files: Mapping[str, str]
    names: Mapping[str, str | None]
    buffers: frozenset[str]

    def saved(self, name: str) -> str | None:
        """The name under which a parameter is saved; None: it is not."""
        return self.names.get(name, name)


def recorded(record: Mapping[str, Any]) -> Recorded:
    """Read it from the record of a commit or a snapshot. Raises FormatError for what is not one."""
    try:
        found = record.get("pretrained", {})
        files = {str(name): str(text) for name, text in found.get("files", {}).items()}
        if not all(map(is_file_name, files)):
            raise ValueError(f"expected names of files, found {sorted(files)}")
        names = {str(name): None if other is None else str(other) for name, other in found.get("names", {}).items()}
        return Recorded(files, names, frozenset(map(str, found.get("buffers", ()))))
    except (AttributeError, TypeError, ValueError) as error:
        raise FormatError(f"expected a record of how to export the model: {error}") from error


class SnapshotSource:
    """The parameters and persistent buffers of a snapshot (`pretrained.TensorSource`).

    `lacking`: the names of those that are sparse, which no file of weights can hold.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._recorded = recorded(snapshot.record)
        self.lacking = tuple(sorted(self._recorded.buffers - {name for name, _ in self._saved()}))

    def specs(self) -> Sequence[TensorSpec]:
        """Parameters in their dtype, buffers in theirs."""
        return [TensorSpec(name, self._snapshot.parameter_dtype(kept), kept.shape) for name, kept in self._saved()]

    def blocks(self) -> Iterator[tuple[str, memoryview]]:
        """Block by block; as a whole where a parameter was not row-major in memory."""
        for name, kept in self._saved():
            plane = MASTER if kept.kind == TRAINED else VALUE
            dtype = self._snapshot.parameter_dtype(kept)
            if kept.stride == contiguous_stride(kept.shape):
                for block in blocks_of(self._snapshot.reader(kept, plane), kept.numel):
                    yield name, bytes_of(block.to(dtype))
            else:
                yield name, bytes_of(self._snapshot.whole(kept, plane).to(dtype).contiguous())

    def _saved(self) -> Iterator[tuple[str, Kept]]:
        for kept in self._snapshot.manifest.kept:
            name = self._recorded.saved(kept.names[0])
            if name is not None and (kept.kind != BUFFER or name in self._recorded.buffers):
                yield name, kept


@dataclass(frozen=True, slots=True)
class _Committed:
    """A parameter in a commit: `offset` in bytes from the start of its unit's PARAM page."""

    unit: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class CommitSource:
    """The parameters of a commit, and the persistent buffers that it holds (`pretrained.TensorSource`).

    `lacking`: the names of other persistent buffers, large ones that training had not changed, sparse ones, and those
    of a dtype that no file of weights has.
    """

    def __init__(self, record: Mapping[str, Any], pages: MarkedPages) -> None:
        """Raises ConfigError for a commit of several ranks, FormatError for a record that is not one."""
        self._pages = pages
        saved = recorded(record)
        try:
            ranks = record["layout"]["world_size"]
            self._committed = [
                _Committed(unit, name, _DTYPES[dtype], tuple(shape), tuple(stride), offset)
                for unit, (_, slots) in enumerate(record["layout"]["units"])
                for first, shape, stride, dtype, _trained, offset in slots
                if (name := saved.saved(first)) is not None
            ]
            if not all(is_dense(each.shape, each.stride) for each in self._committed):
                raise ValueError("expected dense strides")
            self._buffers = held_buffers(record, saved.buffers)
            self.lacking = tuple(sorted(saved.buffers - self._buffers.keys()))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise FormatError(f"expected the layout of a commit, found {error!r}") from error
        if ranks != 1:
            raise ConfigError(
                f"this is what one of {ranks} ranks has committed, each of which has a part of every parameter: give "
                "the directories of the run, which hold those of the ranks"
            )

    def specs(self) -> Sequence[TensorSpec]:
        """Parameters in their dtype, buffers in theirs."""
        buffers = self._buffers.items()
        return [
            *(TensorSpec(each.name, each.dtype, each.shape) for each in self._committed),
            *(TensorSpec(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers),
        ]

    def blocks(self) -> Iterator[tuple[str, memoryview]]:
        """Unit by unit."""
        for each in self._committed:
            key = PageKey(each.unit, Kind.PARAM)
            page = self._pages.lease([key], Intent.READ).tensor(key)
            numel = torch.Size(each.shape).numel()
            nbytes = numel * each.dtype.itemsize
            if each.offset + nbytes > page.numel():
                raise FormatError(f"{each.name}: expected {nbytes} bytes at {each.offset}, the page has {page.numel()}")
            flat = page[each.offset : each.offset + nbytes].view(each.dtype)
            yield each.name, bytes_of(flat.as_strided(each.shape, each.stride).contiguous())
        for name, buffer in self._buffers.items():
            yield name, bytes_of(buffer)


def held_buffers(record: Mapping[str, Any], names: Container[str]) -> dict[str, torch.Tensor]:
    """Those of the buffers `names` whose values the record of a commit has, and files of weights can hold."""
    rows = {name: row for name, row in record["buffers"].items() if name in names}
    return {name: tensor_of(*row[:3]) for name, row in rows.items() if _is_held(*row)}


def _is_held(dtype: str, shape: Sequence[int], text: str, also: Container[str] = ()) -> bool:
    kind = getattr(torch, dtype)
    is_other = isinstance(kind, torch.dtype) and kind not in DTYPES.values()  # than files of weights have
    return not is_other and "saved" not in also and (bool(text) or 0 in shape)
