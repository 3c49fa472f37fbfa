"""Writing a folder that `from_pretrained` of transformers reads.

Owns the division into shards, their index and the files beside them. Does not know where values come from: a source
gives them in order. Guarantees that never more is held than the source holds, that tied weights are written once, and
that the folder is there whole or not at all.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from swap.settings import STALL_SECONDS
from tiermem.checkpoint.draft import Draft
from tiermem.checkpoint.generation import GENERATION
from tiermem.checkpoint.tensor_file import bytes_of, require_fit
from tiermem.checkpoint.tensor_writer import TensorSpec, TensorWriter, divided
from tiermem.checkpoint.weights import INDEX, SINGLE, persistent_buffers
from tiermem.errors import ConfigError, InvariantError
from tiermem.zero3.gather import Gatherer
from tiermem.zero3.layout import Slot, UnitLayout
from tiermem.zero3.lend import lend

MAX_SHARD = "5GB"  # what transformers takes for its own
_FORMAT = {"format": "pt"}  # transformers insists on it
T = TypeVar("T")


class Together(Protocol):
    """How several ranks do the same."""

    def __call__(self, what: str, action: Callable[[], T], /) -> T:
        """Do something on every rank; raises on all of them if it fails on one. `what`: for that error."""


class TensorSource(Protocol):
    """Tensors to be saved."""

    def specs(self) -> Sequence[TensorSpec]:
        """All of them, in the order in which `blocks` gives them."""

    def blocks(self) -> Iterator[tuple[str, memoryview]]:
        """The bytes of each, row-major, in one or several blocks that are valid until the next is asked for."""


class ModelSource:
    """The parameters of an offloaded model, a unit at a time, and its persistent buffers."""

    def __init__(
        self,
        model: nn.Module,
        gatherer: Gatherer,
        layouts: Sequence[UnitLayout],
        parameters: Sequence[nn.Parameter],
        needed: Callable[[int], None],
    ) -> None:
        """`needed(unit)` waits for the unit's updates."""
        self._model = model
        self._gatherer = gatherer
        self._layouts = layouts
        self._parameters = parameters
        self._needed = needed

    def specs(self) -> Sequence[TensorSpec]:
        """Parameters in their dtype, then buffers in theirs.

        Raises ConfigError for what no file can hold, and where another parameter has taken the name of one.
        """
        slots = [slot for layout in self._layouts for slot in layout.slots]
        names = saved_names(self._model, slots)
        saved = [(names[slot.parameter], slot) for slot in slots if slot.parameter in names]
        self._refuse_exchanged(saved)
        buffers = self._buffers().items()
        for name, slot in saved:
            require_fit(f"parameter {name}", self._parameters[slot.parameter])
        for name, buffer in buffers:
            require_fit(f"buffer {name}", buffer)
        return [
            *(TensorSpec(name, slot.dtype, slot.shape) for name, slot in saved),
            *(TensorSpec(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers),
        ]

    def blocks(self) -> Iterator[tuple[str, memoryview]]:
        """Straight from the unit's memory where that is the host's and the parameter row-major there."""
        for layout in self._layouts:
            names = saved_names(self._model, layout.slots)
            if not names:
                continue
            with lend(self._gatherer, self._layouts, [layout.unit], needed=self._needed):
                for slot in layout.slots:
                    if slot.parameter in names:
                        values = self._parameters[slot.parameter].detach()
                        # Released in time: a view that outlives the lease would keep the frame from being reused.
                        with bytes_of(values.cpu().contiguous()) as view:
                            del values
                            yield names[slot.parameter], view
        for name, buffer in self._buffers().items():
            yield name, bytes_of(buffer.detach().cpu().resolve_conj().resolve_neg().contiguous())

    def _refuse_exchanged(self, saved: Sequence[tuple[str, Slot]]) -> None:
        now = dict(self._model.named_parameters(remove_duplicate=False))
        for name, slot in saved:
            own = self._parameters[slot.parameter]
            if now.get(name, own) is not own:
                raise ConfigError(
                    f"parameter {name} is another one than when the model was offloaded (a new head, layers removed or "
                    "in another order?), and that one would be saved under its name. To save the model as it is now "
                    "clone() what its state_dict() gives inside `with runtime.gathered(model):`"
                )

    def _buffers(self) -> dict[str, torch.Tensor]:
        wanted = persistent_buffers(self._model) - _never_saved(self._model)
        return {name: buffer for name, buffer in self._model.named_buffers() if name in wanted}


def alone(what: str, action: Callable[[], T], /) -> T:  # noqa: ARG001 - others would have to be told
    """Do something on the only rank (`Together`)."""
    return action()


def save_pretrained(
    path: str | os.PathLike[str],
    source: TensorSource,
    files: Mapping[str, str],
    *,
    max_shard_nbytes: int,
    stall_seconds: float = STALL_SECONDS,
    writes: bool = True,
    together: Together = alone,
) -> None:
    """Write `source` as sharded safetensors, with `files` (text by name) beside them; waits until it is durable.

    Several ranks call this together, with sources that give the same tensors at the same time; one of them `writes`.
    Raises ConfigError if the path is taken, swap.SwapFullError or SwapIOError if it cannot be written, and what the
    source raises; nothing is left then.
    """
    with ExitStack() as last:

        def begin() -> _Folder | _NoFolder:
            if max_shard_nbytes <= 0:
                raise ConfigError(f"max_shard_size: expected a positive size, found {max_shard_nbytes}")
            if not writes:
                return _NoFolder()
            draft = last.enter_context(Draft(path, stall_seconds=stall_seconds))
            return _Folder(draft, plan_shards(source.specs(), max_shard_nbytes))

        folder = together("begin to save the model", begin)
        with closing(source.blocks()) as blocks:  # type: ignore[type-var]
            for name, data in blocks:
                # Agreed on each time: a full disk is noticed now, not after everything else has been gathered.
                together("save the model", partial(folder.write, name, data))
        together("finish saving the model", partial(folder.finish, files))


class _NoFolder:
    """What a rank that does not write has in place of a folder."""

    def write(self, name: str, data: memoryview) -> None:
        """Nothing to do."""

    def finish(self, files: Mapping[str, str]) -> None:
        """Nothing to do."""


class _Folder:
    """The files of one folder, written one after the other."""

    def __init__(self, draft: Draft, shards: Sequence[Sequence[TensorSpec]]) -> None:
        self._draft = draft
        self._shards = dict(zip(shard_names(len(shards)), shards, strict=True))
        self._waiting = iter(self._shards.items())
        self._writer: TensorWriter | None = None
        self._held: set[str] = set()

    def write(self, name: str, data: memoryview) -> None:
        """Write the next bytes of a tensor; in the next file, if the tensor is there."""
        while name not in self._held:
            if self._writer is not None:
                self._writer.finish()
            shard = next(self._waiting, None)
            if shard is None:
                raise InvariantError(f"{name}: the source gave what it had not announced")
            self._writer = self._draft.tensors(shard[0], shard[1], metadata=_FORMAT)
            self._held = {spec.name for spec in shard[1]}
        if self._writer is not None:
            self._writer.write(name, data)

    def finish(self, files: Mapping[str, str]) -> None:
        """Write what stands beside the tensors, and give the folder its name."""
        if self._writer is not None:
            self._writer.finish()
        for name, text in files.items():
            self._draft.text(name, text)
        # Also of a single file, which transformers reads without one: who looks for the tensors finds them in one way.
        total = sum(spec.nbytes for shard in self._shards.values() for spec in shard)
        weight_map = {spec.name: name for name, shard in self._shards.items() for spec in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        self._draft.text(INDEX, json.dumps(index, indent=2) + "\n")
        self._draft.finish()


def plan_shards(specs: Sequence[TensorSpec], max_nbytes: int) -> list[list[TensorSpec]]:
    """Divide in order, each shard at most `max_nbytes` of data; a larger tensor has one of its own. Never empty."""
    return divided(specs, lambda spec: spec.nbytes, max_nbytes) or [[]]


def shard_names(count: int) -> list[str]:
    """The names that transformers gives to `count` files."""
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def saved_names(model: nn.Module, slots: Sequence[Slot]) -> dict[int, str]:
    """The one name under which each parameter is saved, by number; those that are never saved are left out."""
    targets, ignored = _tied_targets(model), _never_saved(model)
    found = {}
    for slot in slots:
        names = [name for name in slot.names if not any(matches(name) for matches in targets)] or list(slot.names)
        if not ignored.intersection(slot.names):
            found[slot.parameter] = names[0]
    return found


def other_names(model: nn.Module, slots: Sequence[Slot]) -> dict[str, str | None]:
    """What parameters are saved as, by their first name, where that is another; None: they are never saved."""
    saved = saved_names(model, slots)
    names = {slot.names[0]: saved.get(slot.parameter) for slot in slots}
    return {name: other for name, other in names.items() if name != other}


def export_record(model: nn.Module, names: Mapping[str, str | None], dtype: torch.dtype) -> dict[str, Any]:
    """What a later export without the model has to know, as JSON holds it.

    `files`: text by name; `names`: those of `other_names`; `buffers`: the names of those that are saved.
    """
    return {
        "files": model_files(model, dtype),
        "names": dict(names),
        "buffers": sorted(persistent_buffers(model) - _never_saved(model)),
    }


def model_files(model: nn.Module, dtype: torch.dtype) -> dict[str, str]:
    """config.json and generation_config.json of a model of transformers, as text by name; none for other models."""
    files = {}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        config.dtype = str(dtype).removeprefix("torch.")
        files["config.json"] = str(config.to_json_string())
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        files[GENERATION] = str(generation.to_json_string())
    return files


def _tied_targets(model: nn.Module) -> list[Callable[[str], Any]]:
    """Whether a name is one that transformers makes from another by tying."""
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    if isinstance(tied, Mapping) and hasattr(model, "all_tied_weights_keys"):
        return [frozenset(tied).__contains__]
    return [re.compile(pattern).search for pattern in tied]


def _never_saved(model: nn.Module) -> frozenset[str]:
    return frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ())
