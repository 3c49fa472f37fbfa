"""The buffers of a model that training changes, such as running means.

Owns the knowledge of which buffers have changed since the model was offloaded. Does not know parameters: those are
pages. Guarantees that a buffer which training changed is part of every later commit, and that one which nobody touched
costs nothing: the program that builds the model makes it again.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from swap import checksum
from tiermem.errors import ResumeError


class BufferWatch:
    """Watches the buffers of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._as_built = {name: _digest(buffer) for name, buffer in model.named_buffers()}

    def capture(self) -> dict[str, list[Any]]:
        """Every buffer that is not what it was when the watch began: dtype, shape and bytes."""
        return {
            name: [
                str(buffer.dtype).removeprefix("torch."),
                list(buffer.shape),
                base64.b64encode(_bytes(buffer)).decode("ascii"),
            ]
            for name, buffer in self._model.named_buffers()
            if self._as_built.get(name) != _digest(buffer)
        }

    def restore(self, record: Mapping[str, list[Any]]) -> None:
        """Give the buffers these values; they belong to every commit from now on. Raises ResumeError if one is gone."""
        buffers = dict(self._model.named_buffers())
        for name, (dtype, shape, text) in record.items():
            buffer = buffers.get(name)
            if buffer is None or list(buffer.shape) != shape or str(buffer.dtype) != f"torch.{dtype}":
                found = "none" if buffer is None else f"{list(buffer.shape)} of {buffer.dtype}"
                raise ResumeError(f"buffer {name}: expected {shape} of torch.{dtype} as committed, found {found}")
            data = bytearray(base64.b64decode(text))
            values = torch.frombuffer(data, dtype=buffer.dtype).reshape(shape) if data else buffer.detach().cpu()
            with torch.no_grad():
                buffer.copy_(values)


def _bytes(buffer: torch.Tensor) -> memoryview:
    return buffer.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def _digest(buffer: torch.Tensor) -> tuple[torch.dtype, torch.Size, int]:
    # Of the bytes, not torch's count of changes: batch normalisation changes its running means without counting.
    return buffer.dtype, buffer.shape, checksum(_bytes(buffer))
