"""The mean of what all ranks have, in a fixed order.

Owns the order of the sum and its precision. Does not know ranks, pages or parameters. Guarantees that the sum is taken
in the order of the parts, in float32 where they have 16 bits, rounded once, and the same bits however it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Elements added up at once: what is outside the budget stays small, and in the cache.
_SLICE = 1 << 16
# On a device there is no cache to stay in, and each call costs a launch: 16 MiB in float32.
_DEVICE_SLICE = 1 << 22


def average(parts: Sequence[torch.Tensor], ranks: int) -> None:
    """Put the sum of `parts`, in their order, divided by `ranks` into the first; 16-bit ones are added in float32."""
    exact = exact_dtype(parts[0].dtype)
    length = _SLICE if parts[0].device.type == "cpu" else _DEVICE_SLICE
    for begin in range(0, parts[0].numel(), length):
        total = parts[0][begin : begin + length].to(exact, copy=True)
        for part in parts[1:]:
            total.add_(part[begin : begin + length])
        parts[0][begin : begin + length] = total.div_(ranks)


def add_up(parts: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Put the sum of `parts`, in their order, into `total`, which is of their `exact_dtype`."""
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what gradients of `dtype` are added up."""
    return torch.float32 if dtype.itemsize < 4 else dtype
