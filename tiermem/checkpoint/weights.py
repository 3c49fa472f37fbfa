"""Weights of a model from safetensors files, streamed.

Owns the finding of the files (one, or a Hugging Face folder with an index) and the conversion of dtypes on the way.
Does not know pages: it fills the tensor it is given. Guarantees that all of it fits the model before the first byte is
read, that nothing in it is ever executed, and that beside the tensor to be filled no more than a few MiB are held, also
where it is put together from many.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swap import FormatError
from tiermem.checkpoint.conversion import find_origins
from tiermem.checkpoint.generation import generation_beside, take_generation
from tiermem.checkpoint.manifest import NAME as MANIFEST
from tiermem.checkpoint.manifest import is_file_name
from tiermem.checkpoint.naming import Expected, Match, Rules, fits, match
from tiermem.checkpoint.pieces import Piece
from tiermem.checkpoint.restoring import fill_buffer
from tiermem.checkpoint.tensor_file import (
    BLOCK_NBYTES,
    TensorFile,
    TensorInfo,
    TensorLoader,
    TensorReader,
    bytes_of,
    open_tensors,
    read_text,
)
from tiermem.errors import ConfigError, InvariantError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_IF_PICKLED = "pickles are never read: save the model as safetensors first"
_ADVICE = dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), _IF_PICKLED) | {".json": "give the folder that it is in"}


Place = tuple[TensorFile, TensorInfo]


class PretrainedWeights:
    """Tensors of one or several files, by the names of one model. A `WeightSource`; made by `open_weights`."""

    def __init__(
        self, places: Mapping[str, Sequence[tuple[TensorFile, Piece]]], generation: Any | None, loader: TensorLoader
    ) -> None:
        """`places`: for the first name of each parameter or buffer, where its pieces are; `generation`: see there."""
        self._places = places
        self._generation = generation
        self._loader = loader

    def dtype_of(self, names: tuple[str, ...], own: torch.dtype) -> torch.dtype | None:
        """The model's own dtype, as `from_pretrained` converts; None if it is not there."""
        return own if names[0] in self._places else None

    def fill(self, names: tuple[str, ...], values: torch.Tensor) -> bool:
        """Write the parameter into `values` (CPU, of its shape), converted; False if it is not there.

        Raises SwapIOError or FormatError if the file cannot be read to its end.
        """
        pieces = self._places.get(names[0])
        if pieces is None:
            return False
        if sum(piece.info.numel for _, piece in pieces) != values.numel():  # it would be read without an error
            raise InvariantError(f"{names[0]}: its {len(pieces)} pieces are not {list(values.shape)} together")
        with torch.no_grad():
            for file, piece in sorted(pieces, key=lambda each: (each[0].path, each[1].info.offset)):
                _read(self._loader.reader(file), piece.info, piece.place(values.detach()))
        return True

    def fill_others(self, model: nn.Module) -> None:
        """Give the model's buffers the values that are in the files, and the model how it generates."""
        take_generation(model, self._generation)
        for name, buffer in model.named_buffers():
            if name in self._places:
                values = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
                self.fill((name,), values)
                fill_buffer(model, name, buffer, values)


def open_weights(
    path: str | os.PathLike[str], model: nn.Module, loader: TensorLoader, *, partial: bool = False
) -> PretrainedWeights:
    """Look at the headers of a safetensors file, or of a Hugging Face folder, and at how they fit `model`.

    Values are read by `loader`, which is the caller's to close. With `partial` parameters may be missing: somebody else
    gives them values. Heads of another model around the same base are left out then, with a RuntimeWarning if one may
    be what is missing, by another name.

    Raises:
        ConfigError: there is nothing to read, or it does not fit the model; names everything that does not.
        swap.FormatError: a header or an index is damaged, a shard is missing or not what the index says.
        swap.SwapIOError: a file cannot be read.
    """
    tensors = find_tensors(Path(os.path.expanduser(os.fspath(path))))
    expected, rules = expected_of(model), rules_of(model)
    known = {name for wanted in expected for name in wanted.names}
    origins = find_origins(model, tensors, lambda name: fits(name, known, rules.prefix))
    result = match(expected, {name: info for name, (_, info) in tensors.items()}, rules, origins)
    if not result.problems(partial=partial):  # else there is no need to read values
        result.untied = _untied(result, tensors)
    problems = result.problems(partial=partial)
    if problems:
        advice = "" if partial else _advice_on_init(result)
        if result.untied:
            advice += "; build the model untied (tie_word_embeddings=False in its configuration), as these were trained"
        if result.obstacles:
            advice += "; build the model with its from_pretrained and offload it without weights= to have it converted"
        raise ConfigError(f"weights={os.fspath(path)!r} does not fit {type(model).__name__}: {problems}{advice}")
    if result.renamed:  # heads, for else there were problems
        warnings.warn(
            f"weights={os.fspath(path)!r}: left out, with others initialised in their place, though they may just have "
            f"another name: {', '.join(result.renamed)}. Rename what is meant in the files",
            RuntimeWarning,
            stacklevel=2,
        )
    return PretrainedWeights(
        {own: [(tensors[piece.info.name][0], piece) for piece in pieces] for own, pieces in result.found.items()},
        generation_beside(model, path),
        loader,
    )


def _advice_on_init(result: Match) -> str:
    helps = {"what is missing initialised": result.missing, "heads that the model has not left out": result.heads}
    said = " and ".join(what for what, names in helps.items() if names)
    return f"; pass init= to have {said}" if said else ""


def _untied(result: Match, tensors: Mapping[str, Place]) -> list[str]:
    """Pairs of tensors with different values for one parameter: one of them would be lost without a word."""
    return [
        f"{taken.name} and {other.name}"
        for wanted, taken, other in result.copies
        if not _is_same((tensors[taken.name][0], taken), (tensors[other.name][0], other), wanted.dtype)
    ]


def _is_same(first: Place, second: Place, dtype: torch.dtype) -> bool:
    """Whether two tensors of one size have the same bits in `dtype`, a few MiB at a time."""
    count = BLOCK_NBYTES // 8  # of the widest that there is
    with ExitStack() as opened:
        readers = [opened.enter_context(file.reading()) for file, _ in (first, second)]
        for begin in range(0, first[1].numel, count):
            length = min(count, first[1].numel - begin)
            parts = []
            for reader, (_, info) in zip(readers, (first, second), strict=True):
                values = torch.empty(length, dtype=info.dtype, device="cpu")
                reader.read(bytes_of(values), info.offset + begin * info.dtype.itemsize)
                parts.append(bytes_of(values.to(dtype)))
            if parts[0] != parts[1]:
                return False
    return True


def expected_of(model: nn.Module) -> list[Expected]:
    """Every parameter with all its names, and every buffer; those that `state_dict` leaves out are not required."""
    by_identity: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    found = [
        Expected(tuple(names), tuple(parameters[key].shape), parameters[key].dtype)
        for key, names in by_identity.items()
    ]
    saved = persistent_buffers(model)
    for name, buffer in model.named_buffers():
        found.append(Expected((name,), tuple(buffer.shape), buffer.dtype, required=name in saved))
    return found


def persistent_buffers(model: nn.Module) -> set[str]:
    """The names of the buffers that `state_dict` holds."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()  # noqa: SLF001 - state_dict would need every parameter
        if buffer is not None and name not in module._non_persistent_buffers_set  # noqa: SLF001 - as above
    }


def rules_of(model: nn.Module) -> Rules:
    """What a model of transformers says about its files; nothing for others."""

    def patterns(attribute: str) -> tuple[str, ...]:
        return tuple(sorted(getattr(model, attribute, None) or ()))

    prefix = getattr(model, "base_model_prefix", "")
    return Rules(
        prefix=prefix if isinstance(prefix, str) else "",
        may_miss=patterns("_keys_to_ignore_on_load_missing"),
        may_be_left_over=patterns("_keys_to_ignore_on_load_unexpected"),
    )


def find_tensors(path: Path) -> dict[str, Place]:
    """Every tensor of a file or a folder, by name. Raises as `open_weights`."""
    if not path.is_dir():
        if not path.exists():
            raise ConfigError(f"weights: expected a safetensors file or a folder with one, found no {str(path)!r}")
        return _all(_open_file(path))
    if (path / SINGLE).exists():  # before an index, as transformers: one beside it may be of an earlier save
        return _all(open_tensors(path / SINGLE))
    if (path / INDEX).exists():
        return _indexed(path)
    if (path / MANIFEST).exists():
        raise ConfigError(
            f"weights: {str(path)!r} holds a snapshot: give it as resume=, or have its weights written by `tiermem "
            "snapshot export`"
        )
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return _all(open_tensors(files[0]))
    found = f"{len(files)} safetensors files and no index" if files else "none"
    pickled = [name for name in _PICKLED if (path / name).exists()]
    advice = f"; {pickled[0]} is a pickle, which is never read: save the model as safetensors first" if pickled else ""
    raise ConfigError(f"weights: expected {SINGLE} or {INDEX} in {str(path)!r}, found {found}{advice}")


def _open_file(path: Path) -> TensorFile:
    try:
        return open_tensors(path)
    except FormatError as error:
        if path.suffix not in _ADVICE:
            raise
        raise ConfigError(
            f"weights: expected a safetensors file, found {str(path)!r}; {_ADVICE[path.suffix]}"
        ) from error


def _all(file: TensorFile) -> dict[str, Place]:
    return {name: (file, info) for name, info in file.tensors.items()}


def _indexed(folder: Path) -> dict[str, Place]:
    weight_map = _weight_map(folder / INDEX)
    files = {name: _shard(folder, name) for name in dict.fromkeys(weight_map.values())}
    tensors: dict[str, Place] = {}
    for file in files.values():  # what the index does not mention is surplus, and to be named as such
        tensors.update(_all(file))
    for name, shard in weight_map.items():
        if name not in files[shard].tensors:
            raise FormatError(f"{str(folder / INDEX)!r}: expected {name!r} in {shard}, found it without")
        tensors[name] = (files[shard], files[shard].tensors[name])
    return tensors


def _weight_map(path: Path) -> dict[str, str]:
    try:
        found: Any = json.loads(read_text(path))
        weight_map = found["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise TypeError("expected an object weight_map with names and files")
        for name in weight_map.values():
            if not is_file_name(name):
                raise ValueError(f"expected the name of a file in this folder, found {name!r}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"expected {str(path)!r} to be an index of safetensors files: {error!r}") from error
    return weight_map


def _shard(folder: Path, name: str) -> TensorFile:
    if not (folder / name).exists():
        raise FormatError(f"{str(folder / INDEX)!r}: expected the file {name!r} beside it, found none")
    return open_tensors(folder / name)


def _read(reader: TensorReader, info: TensorInfo, values: torch.Tensor) -> None:
    """Read a tensor into one of its shape, converted; a few MiB at a time if it cannot be read straight into it."""
    if values.dtype == info.dtype and values.is_contiguous():
        reader.read(bytes_of(values), info.offset)
        return
    rows = values.view(-1) if values.is_contiguous() else values
    row_nbytes = info.nbytes // max(len(rows), 1)
    if row_nbytes > BLOCK_NBYTES and rows.dim() > 1:
        for number, row in enumerate(rows):
            _read(reader, replace(info, shape=info.shape[1:], offset=info.offset + number * row_nbytes), row)
        return
    count = max(1, BLOCK_NBYTES // max(row_nbytes, 1))
    block = torch.empty((min(count, len(rows)), *rows.shape[1:]), dtype=info.dtype, device="cpu")
    for begin in range(0, len(rows), count):
        part = block[: min(count, len(rows) - begin)]
        reader.read(bytes_of(part), info.offset + begin * row_nbytes)
        rows[begin : begin + len(part)].copy_(part)
