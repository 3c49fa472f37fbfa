"""From a snapshot to pages.

Owns the check that a snapshot is of this model, and the giving of its values: a `WeightSource` for the pages of
parameters and masters, and their moments, part by part. Does not know how pages are laid out. Guarantees the bits that
were kept, whatever the division into units and tiles, and that a difference is named before anything is changed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import nn

from swap import FormatError
from tiermem.checkpoint.manifest import FIRST, FROZEN, MASTER, SECOND, TRAINED, VALUE, Kept
from tiermem.checkpoint.reading import PlaneReader, Snapshot, blocks_of
from tiermem.checkpoint.shard import Holding
from tiermem.errors import ResumeError
from tiermem.optim.masters import MomentsOf
from tiermem.pager.tiling import TileRange
from tiermem.zero3.layout import memory_order


class SnapshotWeights:
    """The values of a snapshot, for one model that it fits (`zero3.materialize.WeightSource`)."""

    def __init__(self, snapshot: Snapshot, model: nn.Module, *, compare: bool) -> None:
        """`compare`: whether to compare checksums. Raises ResumeError naming what is different in `model`."""
        self._snapshot = snapshot
        self._compare = compare
        self._kept = {kept.names[0]: kept for kept in snapshot.manifest.kept}
        self._recorded: Container[str] = snapshot.record.get("buffers", {})
        problems = list(_differences(snapshot, model))
        if problems:
            shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            raise ResumeError(f"the snapshot {str(snapshot.path)!r} is of another model: {shown}")

    def dtype_of(self, names: tuple[str, ...], own: torch.dtype) -> torch.dtype | None:  # noqa: ARG002
        """float32 for what is trained, whatever the model has: values are masters. Else what was kept."""
        kept = self._kept.get(names[0])
        return None if kept is None else self._snapshot.dtype(kept, _main_plane(kept))

    def fill(self, names: tuple[str, ...], values: torch.Tensor) -> bool:
        """Write the parameter into `values` (CPU, of its shape). Raises ChecksumError, SwapIOError, FormatError."""
        kept = self._kept.get(names[0])
        if kept is None:
            return False
        plane = _main_plane(kept)
        if tuple(values.stride()) != kept.stride:
            values.copy_(self._snapshot.whole(kept, plane, compare=self._compare))
            return True
        flat, begin = values.detach().as_strided((kept.numel,), (1,)), 0
        for block in blocks_of(self._snapshot.reader(kept, plane, compare=self._compare), kept.numel):
            flat[begin : begin + block.numel()].copy_(block)
            begin += block.numel()
        return True

    def fill_others(self, model: nn.Module) -> None:
        """Give the model's buffers the values they had."""
        for name, buffer in model.named_buffers():
            # Made in training, or sparse: the record has it (`runtime.buffers`); or not there: it is as it was built.
            if name in self._recorded or name not in self._kept:
                continue
            fill_buffer(model, name, buffer, self._snapshot.whole(self._kept[name], VALUE, compare=self._compare))

    def moments(self, holding: Holding) -> MomentsOf | None:
        """The moments of what this rank trains of a parameter, to be asked for in order; None: it has none."""
        slot, begin, kept = holding.slot, holding.first, self._kept[holding.slot.names[0]]
        if FIRST not in kept.planes or not holding.count:
            return None
        compare = self._compare
        if slot.stride != kept.stride:
            wholes = (self._snapshot.whole(kept, plane, compare=compare) for plane in (FIRST, SECOND))
            planes = [memory_order(whole, slot, torch.float32)[begin : begin + holding.count] for whole in wholes]
            return lambda cut: (_part(planes[0], cut), _part(planes[1], cut))
        readers = [self._snapshot.reader(kept, plane, first=begin, compare=compare) for plane in (FIRST, SECOND)]
        return lambda cut: (_next(readers[0], cut.length), _next(readers[1], cut.length))


def fill_buffer(model: nn.Module, name: str, buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Give a buffer values of its shape; one whose elements share memory (an expanded one) makes way for them."""
    if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, values.to(buffer.device))
        return
    with torch.no_grad():
        buffer.copy_(values)


def require_whole(snapshot: Snapshot) -> None:
    """Read all of a snapshot before something else is given up for it. Raises swap.FormatError if it is damaged."""
    for damage in snapshot.verify():
        raise damaged(snapshot, damage)


def damaged(snapshot: Snapshot, what: object) -> FormatError:
    """The error that names a snapshot and what is wrong in it."""
    return FormatError(f"the snapshot {str(snapshot.path)!r} is damaged: {what}")


def _part(plane: torch.Tensor, cut: TileRange) -> torch.Tensor:
    return plane[cut.begin : cut.begin + cut.length]


def _next(reader: PlaneReader, count: int) -> torch.Tensor:
    values = torch.empty(count, dtype=reader.dtype, device="cpu")
    reader.take(values)
    return values


def _main_plane(kept: Kept) -> str:
    return MASTER if kept.kind == TRAINED else VALUE


def _differences(snapshot: Snapshot, model: nn.Module) -> Iterable[str]:
    there, here = snapshot.manifest.parameters, list(model.named_parameters())
    for kept, (name, parameter) in zip(there, here, strict=False):
        form = [TRAINED if parameter.requires_grad else FROZEN, tuple(parameter.shape)]
        if kept.names[0] != name:
            yield f"parameter {kept.names[0]} was where {name} is"
            return  # the rest would only be shifted
        if [kept.kind, kept.shape] != form:
            yield f"{name} was {kept.kind} and {list(kept.shape)}, is {form[0]} and {list(parameter.shape)}"
    if len(there) != len(here):
        yield f"it had {len(there)} parameters, has {len(here)}"
    yield from _buffer_differences(snapshot, model)


def _buffer_differences(snapshot: Snapshot, model: nn.Module) -> Iterable[str]:
    there, recorded = snapshot.manifest.buffers, snapshot.record.get("buffers", {})
    here = dict(model.named_buffers())
    for kept in there:
        buffer = here.get(kept.names[0])
        if kept.names[0] in recorded:
            continue
        if buffer is None:
            yield f"buffer {kept.names[0]} is not there any more"
        elif (tuple(buffer.shape), str(buffer.dtype)) != (kept.shape, f"torch.{kept.dtype}"):
            yield f"buffer {kept.names[0]} was {list(kept.shape)} of {kept.dtype}, is {list(buffer.shape)}"
    if snapshot.record.get("others as built"):
        return  # it was made of a commit, which has only what training changes
    for name in here.keys() - {kept.names[0] for kept in there}:
        if name not in recorded:
            yield f"buffer {name} was not there"
