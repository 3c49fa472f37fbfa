"""How fast bytes go between host memory and the accelerator.

Owns this one measurement. Does not know drives or training. Guarantees an answer: the figures, or the reason why there
are none; and that what it allocates is given back.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

_COPY_BYTES = 256 << 20
_REPEATS = 7


def measure_copies() -> dict[str, Any]:
    """Median bandwidth of copies, GB/s: each way from pinned and from pageable memory, and both ways.

    `both ways, pinned` counts the bytes of both directions. {"skipped": reason} where nothing can be measured.
    """
    if not torch.cuda.is_available():
        return {"skipped": "torch finds no CUDA device"}
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        near, other = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        pinned, second = (torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        pageable = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    except RuntimeError as error:  # out of memory, here or there
        return {"skipped": f"no memory for the copies: {error}"}
    there, back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def both_ways() -> None:
        with torch.cuda.stream(there):
            near.copy_(pinned, non_blocking=True)
        with torch.cuda.stream(back):
            second.copy_(other, non_blocking=True)

    found = {
        "to device, pinned": _rate(lambda: near.copy_(pinned, non_blocking=True), _COPY_BYTES),
        "from device, pinned": _rate(lambda: pinned.copy_(near, non_blocking=True), _COPY_BYTES),
        "to device, pageable": _rate(lambda: near.copy_(pageable), _COPY_BYTES),
        "from device, pageable": _rate(lambda: pageable.copy_(near), _COPY_BYTES),
        "both ways, pinned": _rate(both_ways, 2 * _COPY_BYTES),
    }
    return {"device": torch.cuda.get_device_name(device), "bytes": _COPY_BYTES, "gigabytes_per_second": found}


def pinned_rates(device: torch.device) -> tuple[float, float]:
    """Bytes a second to `device` and from it, one way after the other, with the host memory that training would have.

    That is page-locked, and pageable where the system allows no locking. Raises torch.OutOfMemoryError.
    """
    near = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    host = _locked_if_allowed(_COPY_BYTES)
    to_device = _rate(lambda: near.copy_(host, non_blocking=True), _COPY_BYTES, device)
    return 1e9 * to_device, 1e9 * _rate(lambda: host.copy_(near, non_blocking=True), _COPY_BYTES, device)


def _locked_if_allowed(nbytes: int) -> torch.Tensor:
    """Host memory that has been written once, so that no copy has to find pages for it."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        warnings.warn(
            f"host memory cannot be page-locked, so copies are measured from other memory ({error}); see `ulimit -l`",
            stacklevel=2,
        )
        return torch.ones(nbytes, dtype=torch.uint8)


def _rate(copy: Callable[[], object], nbytes: int, device: torch.device | None = None) -> float:
    """GB/s; `device`: where the copies go, the current one if none is named."""
    seconds = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        copy()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return nbytes / statistics.median(seconds[1:]) / 1e9  # the first one finds everything cold
