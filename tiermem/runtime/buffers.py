"""The buffers of a model that belong to a commit, such as running means.

Owns the knowledge of which buffers have changed, or were made, since the model was offloaded. Does not know parameters:
those are pages. Guarantees that a buffer which training changed is part of every later commit; so is a small one that
`state_dict` holds, as the model may have come with its values, and be built without them for a resume. Of a large one
that nobody touched a checksum is kept, and a resume says if the program that builds the model makes another.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from swap import checksum
from tiermem.checkpoint.restoring import fill_buffer
from tiermem.checkpoint.tensor_file import bytes_of, fits_files, tensor_of
from tiermem.errors import ResumeError
from tiermem.memory.sizes import format_bytes
from tiermem.zero3.guards import refuse_nested

Rows = dict[str, list[Any]]
"""By name: dtype, shape, bytes in base64; and, where there is something to say, what else.

"as built": nobody has changed it; the checksum. Its bytes are left out if they are many. "saved": the bytes are what
`torch.save` makes of it, as it is sparse. "made": during training, as such or in this shape; whether `state_dict` holds
it.
"""

# Of a buffer that nobody has changed: running statistics are below, tables that constructors make again above.
_SMALL_NBYTES = 64 << 10


class BufferWatch:
    """Watches the buffers of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._as_built = {name: _digest(buffer) for name, buffer in model.named_buffers()}

    def capture(self) -> Rows:
        """Every buffer that is not what it was when the watch began, and those of the state dict that are."""
        refuse_nested(self._model)
        changed = self._rows(self._is_changed)
        others = (each for each in self._model.named_buffers() if each[0] not in changed)
        return changed | {
            name: self._row_as_built(name, buffer) for name, buffer in others if self._is_state(name, buffer)
        }

    def capture_odd(self) -> Rows:
        """Those that cannot be kept as ordinary tensors of a model like this one: made since then, or no file's.

        No file has sparse ones, and those of complex128.
        """
        refuse_nested(self._model)
        return self._rows(lambda name, buffer: self._is_made(name, buffer) or not fits_files(buffer))

    def restore(self, record: Mapping[str, list[Any]]) -> None:
        """Give the buffers these values; they belong to every commit from now on. Raises ResumeError if one is gone.

        One that training had made is made again.
        """
        buffers = dict(self._model.named_buffers())
        for name, row in record.items():
            dtype, shape, text, *more = row
            also = more[0] if more else {}
            buffer = buffers.get(name)
            fits = _fits(buffer, dtype, shape)
            if not _gives(row, buffer):
                if buffer is not None and fits and _digest(buffer)[2] != also["as built"]:
                    _warn_of_another(name, buffer)
                continue
            if not fits and "made" not in also:
                found = "none" if buffer is None else f"{list(buffer.shape)} of {buffer.dtype}"
                raise ResumeError(f"buffer {name}: expected {shape} of torch.{dtype} as committed, found {found}")
            values = _saved(text) if "saved" in also else tensor_of(dtype, shape, text)
            if buffer is not None and fits and "saved" not in also:
                fill_buffer(self._model, name, buffer, values)
            else:
                self._put(name, values, persistent=also.get("made"))

    def _rows(self, wanted: Callable[[str, torch.Tensor], bool]) -> Rows:
        return {name: self._row(name, buffer) for name, buffer in self._model.named_buffers() if wanted(name, buffer)}

    def _row(self, name: str, buffer: torch.Tensor) -> list[Any]:
        row = [*_form(buffer), _text(buffer)]
        also: dict[str, Any] = {} if _is_dense(buffer) else {"saved": True}
        if self._is_made(name, buffer):
            also["made"] = self._is_persistent(name)
        return [*row, also] if also else row

    def _row_as_built(self, name: str, buffer: torch.Tensor) -> list[Any]:
        text = _text(buffer) if buffer.nbytes <= _SMALL_NBYTES else ""
        return [*_form(buffer), text, {"as built": self._as_built[name][2]}]

    def _is_changed(self, name: str, buffer: torch.Tensor) -> bool:
        return self._as_built.get(name) != _digest(buffer)

    def _is_state(self, name: str, buffer: torch.Tensor) -> bool:
        return self._is_persistent(name) and _is_dense(buffer)

    def _is_persistent(self, name: str) -> bool:
        module, own = self._place(name)
        return own not in module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public method for it

    def _is_made(self, name: str, buffer: torch.Tensor) -> bool:
        """Whether it was not there, in this form, when the watch began."""
        return self._as_built.get(name, ())[:2] != (buffer.dtype, buffer.shape)

    def _put(self, name: str, values: torch.Tensor, *, persistent: bool | None) -> None:
        try:
            module, own = self._place(name)
            if persistent is None:
                persistent = self._is_persistent(name)
            first = next(self._model.parameters(), None)
            module.register_buffer(own, values if first is None else values.to(first.device), persistent=persistent)
        except (AttributeError, KeyError) as error:  # no such module, or something else has that name
            raise ResumeError(f"buffer {name}, made during training, cannot be made again: {error}") from error

    def _place(self, name: str) -> tuple[nn.Module, str]:
        path, _, own = name.rpartition(".")
        return self._model.get_submodule(path), own


def restored(record: Rows, model: nn.Module) -> set[str]:
    """The names of the model's buffers to which `BufferWatch.restore` gives the values of `record`, or else raises."""
    return {name for name, buffer in model.named_buffers() if name in record and _gives(record[name], buffer)}


def _gives(row: list[Any], buffer: torch.Tensor | None) -> bool:
    """Whether a row has values for the buffer; else they are nobody's but the program's."""
    dtype, shape, text, *more = row
    return not more or "as built" not in more[0] or bool(_fits(buffer, dtype, shape) and text)


def _fits(buffer: torch.Tensor | None, dtype: str, shape: list[int]) -> bool:
    return buffer is not None and list(buffer.shape) == shape and str(buffer.dtype) == f"torch.{dtype}"


def _form(buffer: torch.Tensor) -> list[Any]:
    return [str(buffer.dtype).removeprefix("torch."), list(buffer.shape)]


def _text(buffer: torch.Tensor) -> str:
    return base64.b64encode(_bytes(buffer)).decode("ascii")


def _warn_of_another(name: str, buffer: torch.Tensor) -> None:
    """Say that a program has built a model with other values than those that were trained with."""
    warnings.warn(
        f"buffer {name} ({format_bytes(buffer.nbytes)}) has other values than in the model that was offloaded when the "
        "run began, and what training does not change is committed only if it is small: give the model these values "
        "before offload, as from the weights that it began with",
        RuntimeWarning,
        stacklevel=2,
    )


def _is_dense(buffer: torch.Tensor) -> bool:
    """Whether a tensor is its memory: neither sparse nor quantized, which has a scale besides."""
    return buffer.layout is torch.strided and not buffer.is_quantized


def _bytes(buffer: torch.Tensor) -> memoryview:
    values = buffer.detach()
    if _is_dense(values):
        return bytes_of(values.resolve_conj().resolve_neg().to("cpu").contiguous())
    file = io.BytesIO()
    torch.save(values, file)
    return file.getbuffer()


def _saved(text: str) -> torch.Tensor:
    values: torch.Tensor = torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)
    return values


def _digest(buffer: torch.Tensor) -> tuple[torch.dtype, torch.Size, int]:
    # Of the bytes, not torch's count of changes: batch normalisation changes its running means without counting.
    return buffer.dtype, buffer.shape, checksum(_bytes(buffer))
