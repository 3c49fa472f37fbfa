"""Tensors of files that become one parameter, because the model has tied what the file has twice.

Owns the comparison of their values. Does not know names or models. Guarantees to hold a few MiB, whatever their size.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from tiermem.checkpoint.tensor_file import BLOCK_NBYTES, TensorFile, TensorInfo, TensorReader, bytes_of

Place = tuple[TensorFile, TensorInfo]


def is_same(first: Place, second: Place, dtype: torch.dtype) -> bool:
    """Whether two tensors of one size have the same bits in `dtype`. Raises SwapIOError, FormatError."""
    count = BLOCK_NBYTES // 8  # of the widest that there is
    with ExitStack() as opened:
        readers = [opened.enter_context(file.reading()) for file, _ in (first, second)]
        for begin in range(0, first[1].numel, count):
            length = min(count, first[1].numel - begin)
            one, other = (
                bytes_of(_read(reader, info, begin, length).to(dtype))
                for reader, (_, info) in zip(readers, (first, second), strict=True)
            )
            if one != other:
                return False
    return True


def _read(reader: TensorReader, info: TensorInfo, begin: int, length: int) -> torch.Tensor:
    values = torch.empty(length, dtype=info.dtype, device="cpu")
    reader.read(bytes_of(values), info.offset + begin * info.dtype.itemsize)
    return values
