"""The global gradient norm and the clipping coefficient.

Owns the arithmetic of `torch.nn.utils.clip_grad_norm_`, taken apart so that it works on per-parameter norms. Does not
know where gradients live. Guarantees the bits of torch's function when the per-parameter norms are
`torch.linalg.vector_norm` of each whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tiermem.errors import ConfigError


def total_norm(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm over all parameters from the norms of each, in the order of `model.parameters()`; 0-dim.

    As `torch.nn.utils.get_total_norm`, which takes parameters dtype by dtype in the order of first appearance.
    """
    if not norms:
        return torch.tensor(0.0, dtype=torch.float32, device="cpu")
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for norm in norms:
        by_dtype.setdefault(norm.dtype, []).append(norm)
    ordered = [norm for group in by_dtype.values() for norm in group]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(ordered[0].device) for norm in ordered]))
    if len(ordered) == 1:
        # A norm of one number takes no square. torch's norm of a gradient whose squares are too large is infinite
        # already; ours is not (`gradient_norm`).
        total = torch.where(total.square().isinf(), torch.inf, total)
    return total


def clip_coefficient(total: torch.Tensor, max_norm: float) -> float:
    """The factor for every gradient, max_norm / (total + 1e-6) and at most 1, computed in the dtype of `total`.

    Raises `ConfigError` if `max_norm` is negative or not a number.
    """
    if not max_norm >= 0.0:
        raise ConfigError(f"max_norm must be a number not below 0, found {max_norm}")
    return float(torch.clamp(float(max_norm) / (total + 1e-6), max=1.0).item())


def is_finite(value: torch.Tensor | float) -> bool:
    """Whether a norm is neither infinite nor NaN."""
    return math.isfinite(float(value))


def are_finite(norms: Sequence[torch.Tensor]) -> bool:
    """Whether none of these norms is infinite or NaN; together they may be infinite."""
    if all(norm.is_cpu for norm in norms):
        return all(map(is_finite, norms))
    return is_finite(total_norm(norms)) or all(map(is_finite, norms))  # a device is waited for once
