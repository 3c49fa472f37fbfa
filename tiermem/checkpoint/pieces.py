"""Parameters that are made of several tensors of a file, or of a part of one.

Owns the conversions that can be streamed, in words of its own: stacked, joined, divided, transposed. Does not know
files, nor whose conversions they are (`conversion.py`). Guarantees that the pieces of a parameter cover it once and
wholly, each as a view into which its tensor can be read without the others; what keeps them from that is named by the
file's names.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tiermem.checkpoint.tensor_file import TensorInfo

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensors of one shape become one with a further dimension, `dim`, in which they are counted."""

    dim: int


@dataclass(frozen=True, slots=True)
class Join:
    """Tensors become one, one after the other along `dim`."""

    dim: int


@dataclass(frozen=True, slots=True)
class Divide:
    """A tensor becomes several, along its first dimension: of equal length, or else of the length that each has."""

    equal: bool


@dataclass(frozen=True, slots=True)
class Transpose:
    """Two dimensions change places; with `if_needed` only where the shape is not the right one already."""

    first: int
    second: int
    if_needed: bool = False


Operation = Stack | Join | Divide | Transpose
_STREAMABLE = ((Stack,), (Join,), (Stack, Join), (Divide,), (Transpose,))


@dataclass(frozen=True, slots=True)
class Recipe:
    """How tensors named after `sources` become those named after `targets`; * stands for a number.

    `obstacle`: the operation that cannot be streamed, empty if all can.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: tuple[Operation, ...] = ()
    obstacle: str = ""

    def __post_init__(self) -> None:
        kinds = tuple(type(each) for each in self.operations)
        if not self.obstacle and kinds not in _STREAMABLE:
            raise ValueError(f"expected one of the chains of operations that can be streamed, found {self.operations}")


@dataclass(frozen=True, slots=True)
class Origin:
    """What a tensor of a file, `name`, becomes: `target`, by itself or (the first one) by a recipe.

    `source`: which of the recipe's sources it is; `index`: the number in its name, None if there is none.
    """

    name: str
    target: str
    recipe: Recipe | None = None
    source: int = 0
    index: int | None = None


@dataclass(frozen=True, slots=True)
class View:
    """A part of a tensor along `dim`; without `length` one slice, the dimension removed."""

    dim: int
    begin: int
    length: int | None = None

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The part, sharing memory."""
        if self.length is None:
            return values.select(self.dim, self.begin)
        return values.narrow(self.dim, self.begin, self.length)


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of a file, or rows of one, and the place in a parameter where it goes."""

    info: TensorInfo
    views: tuple[View, ...] = ()
    turned: tuple[int, int] | None = None

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """The view of the parameter into which the tensor is read; of its shape, if it fits."""
        for view in self.views:
            values = view.of(values)
        return values if self.turned is None else values.transpose(*self.turned)


@dataclass(slots=True)
class Assembly:
    """The pieces of one parameter; the rest are problems, by names of the file."""

    pieces: tuple[Piece, ...] = ()
    missing: list[str] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)


def as_it_is(info: TensorInfo, shape: Shape) -> Assembly:
    """A parameter that is one tensor of the file, not converted."""
    return _compared(Assembly((Piece(info),)), shape)


def assemble(
    recipe: Recipe, members: Sequence[Origin], infos: Mapping[str, TensorInfo], shapes: Sequence[Shape]
) -> list[Assembly]:
    """What becomes of the tensors of one recipe, in their natural order; one assembly for each of its targets.

    `shapes`: of the recipe's targets, in their order, without those that the model lacks; one at least.
    """
    first = recipe.operations[0]
    if isinstance(first, (Stack, Join)):
        return [_merged(recipe, members, infos, shapes[0])]
    info, others = infos[members[0].name], [member.name for member in members[1:]]
    if isinstance(first, Divide):
        found = _divided(first, info, len(recipe.targets), shapes)
    else:
        found = [_transposed(first, info, shapes[0])]
    found[0].surplus.extend(others)
    return found


def _transposed(operation: Transpose, info: TensorInfo, shape: Shape) -> Assembly:
    if (operation.if_needed and info.shape == shape) or max(operation.first, operation.second) >= len(shape):
        return as_it_is(info, shape)
    return _compared(Assembly((Piece(info, turned=(operation.first, operation.second)),)), shape)


def _divided(operation: Divide, info: TensorInfo, count: int, shapes: Sequence[Shape]) -> list[Assembly]:
    """Rows of one tensor for each target."""
    found = [Assembly() for _ in range(count)]
    if len(shapes) < count or not all(shapes):
        for assembly in found:  # whichever the model has, it is not to go without
            assembly.surplus.append(info.name)
        return found
    lengths = [shape[0] for shape in shapes]
    whole = (sum(lengths), *shapes[0][1:])
    if info.shape != whole or (operation.equal and len(set(lengths)) > 1):
        found[0].shapes.append(_unfit(info, whole))
        return found
    begin, row = 0, math.prod(info.shape[1:]) * info.dtype.itemsize
    for assembly, shape in zip(found, shapes, strict=True):
        part = replace(info, shape=(shape[0], *info.shape[1:]), offset=info.offset + begin * row)
        assembly.pieces = (Piece(part),)
        _compared(assembly, shape)
        begin += shape[0]
    return found


def _merged(recipe: Recipe, members: Sequence[Origin], infos: Mapping[str, TensorInfo], shape: Shape) -> Assembly:
    """Stacked, joined, or each source stacked and then all joined."""
    found = Assembly()
    dims = [operation.dim for operation in recipe.operations if isinstance(operation, (Stack, Join))]
    if max(dims) >= len(shape):
        found.shapes.extend(f"{member.name} (a part of what is to be {list(shape)})" for member in members[:1])
        return found
    stack = recipe.operations[0].dim if isinstance(recipe.operations[0], Stack) else None
    join = recipe.operations[-1].dim if isinstance(recipe.operations[-1], Join) else None
    count = shape[stack] if stack is not None else None
    sources = [_numbered(found, recipe, members, number, count) for number in range(len(recipe.sources))]
    if found.shapes or (found.missing and stack is None):
        return found
    # What is joined: a whole source if it is stacked, else each of its tensors.
    groups = sources if stack is not None else [[numbered] for source in sources for numbered in source]
    spans: list[tuple[View, ...]] = [()] * len(groups)
    if join is not None:
        axis = join if stack is None or join < stack else join - 1  # in a piece, which lacks the stacked dimension
        spans = [
            (View(join, *span),) for span in _spans([_shape_of(each, infos) for each in groups], axis, shape[join])
        ]
    found.pieces = tuple(
        Piece(infos[member.name], span if stack is None else (*span, View(stack, number)))
        for group, span in zip(groups, spans, strict=True)
        for number, member in group
    )
    _compared(found, shape)
    total = sum(piece.info.numel for piece in found.pieces)
    if not found.shapes and not found.missing and total != math.prod(shape):
        found.shapes.append(f"{members[0].name} and others (expected {list(shape)} together, found {total} elements)")
    return found


def _numbered(
    found: Assembly, recipe: Recipe, members: Sequence[Origin], source: int, count: int | None
) -> list[tuple[int, Origin]]:
    """The tensors of one source by their numbers; `count`: how many there have to be, if it is known."""
    own = [member for member in members if member.source == source]
    by_index = {member.index: member for member in reversed(own) if member.index is not None}
    if own and not by_index:  # no numbers: in their natural order
        if count is not None and len(own) != count:
            found.shapes.append(f"{own[0].name} and those like it (expected {count}, found {len(own)})")
        return list(enumerate(own))
    wanted = _numbers(by_index, count) if "*" in recipe.sources[source] else range(1)
    found.missing.extend(_name(recipe, members[0], source, index) for index in wanted if index not in by_index)
    ordered = [(index - wanted.start, by_index[index]) for index in wanted if index in by_index]
    used = {member.name for _, member in ordered}
    found.surplus.extend(member.name for member in own if member.name not in used)
    return ordered


def _numbers(present: Collection[int], count: int | None) -> range:
    """The numbers there have to be: as many as are known to be needed, or else without gaps; mostly from 0."""
    first, last = min(present, default=0), max(present, default=0)
    if count is None:
        return range(first, last + 1)
    return range(first, last + 1) if len(present) == count == last + 1 - first else range(count)


def _shape_of(group: Sequence[tuple[int, Origin]], infos: Mapping[str, TensorInfo]) -> Shape:
    return infos[group[0][1].name].shape if group else ()


def _spans(shapes: Sequence[Shape], axis: int, total: int) -> list[tuple[int, int]]:
    """Where each lies along the joined dimension; what is left is that of which nothing is there (no shape)."""
    lengths = [shape[axis] if axis < len(shape) else 0 for shape in shapes]
    for number, shape in enumerate(shapes):
        if not shape:
            lengths[number] = max(0, total - sum(lengths))
    if sum(lengths) != total:  # something has a wrong shape, most likely what is not as long as the others
        lengths = [total // len(shapes)] * len(shapes)
    return [(sum(lengths[:number]), length) for number, length in enumerate(lengths)]


def _compared(found: Assembly, shape: Shape) -> Assembly:
    """Name the pieces that do not have the shape of their place."""
    values = torch.empty(shape, device="meta")
    for piece in found.pieces:
        expected = tuple(piece.place(values).shape)
        if piece.info.shape != expected:
            found.shapes.append(_unfit(piece.info, expected))
    return found


def _unfit(info: TensorInfo, expected: Shape) -> str:
    return f"{info.name} (expected {list(expected)}, found {list(info.shape)})"


def _name(recipe: Recipe, like: Origin, source: int, index: int) -> str:
    """What a tensor would be called in the file that is there beside `like`."""
    here = _text(recipe.sources[like.source], like.index)
    there = _text(recipe.sources[source], index)
    return like.name.replace(here, there, 1) if here in like.name else f"{there} of {like.target}"


def _text(pattern: str, index: int | None) -> str:
    return pattern.strip("^$").replace("\\.", ".").replace("*", "*" if index is None else str(index))
