"""What the gradients of the step under way are to be multiplied by.

Owns one factor for each gradient that has been clipped or unscaled. Does not know optimizers or units: it is given
parameters. Guarantees that factors of one gradient multiply up, that one whose norm is not finite has a factor that
says so, and that one which has grown since it was clipped is told from one that has not: the factor is for all of it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence

import torch

from tiermem.errors import ConfigError
from tiermem.optim.clip import are_finite, clip_coefficient, total_norm
from tiermem.optim.service import GradientBook


class Scales:
    """The factors by parameter number; 1 where nothing was said."""

    def __init__(self, gradients: GradientBook) -> None:
        self._gradients = gradients
        self._factors: dict[int, float] = {}
        self._clipped: dict[int, torch.Tensor] = {}  # the norms of those that were clipped, before that

    @contextlib.contextmanager
    def unless_it_fails(self) -> Iterator[None]:
        """What is said meanwhile counts only if no error comes: whoever tries again says it again."""
        before = dict(self._factors), dict(self._clipped)
        try:
            yield
        except BaseException:
            self._factors, self._clipped = before
            raise

    def multiply(self, parameters: Sequence[int], factor: float) -> None:
        """Multiply these gradients by `factor`, besides what was said before."""
        for parameter in parameters:
            self._factors[parameter] = self._factors.get(parameter, 1.0) * factor

    def clip(self, parameters: Sequence[int], max_norm: float) -> torch.Tensor:
        """Multiply these gradients so that their norm is `max_norm` at most; return the norm they had (0-dim).

        Raises ConfigError if `max_norm` is negative or not a number, and as `require_ungrown`.
        """
        norms = self._gradients.norms(parameters)
        scaled = [norm * self._factors.get(p, 1.0) for p, norm in zip(parameters, norms, strict=True)]
        total, finite = total_norm(scaled), are_finite(scaled)
        if finite:
            self.require_ungrown(parameters)
        self.multiply(parameters, clip_coefficient(total, max_norm))
        if not finite:
            self._factors.update(dict.fromkeys(parameters, float("nan")))
        self._clipped.update(zip(parameters, norms, strict=True))
        return total

    def require_ungrown(self, parameters: Collection[int]) -> None:
        """Raise ConfigError if one of these was clipped to less than it was, and another backward has added to it."""
        changed = [p for p in parameters if p in self._clipped and self._factors.get(p, 1.0) != 1.0]
        for parameter, norm in zip(changed, self._gradients.norms(changed), strict=True):
            before = self._clipped[parameter]
            if norm is not before and norm.item() != before.item():
                raise ConfigError(
                    "another backward has added to gradients that optimizer.clip_grad_norm_ had clipped: what came "
                    "later would be clipped with them. Clip once in a step, after its last backward; "
                    "optimizer.zero_grad() drops these gradients"
                )

    def are_finite(self, parameters: Sequence[int]) -> bool:
        """Whether the norm of each of these gradients is finite, and what it is to be multiplied by."""
        known = self._factors
        if known and not all(math.isfinite(known.get(p, 1.0)) for p in parameters):
            return False
        return are_finite(self._gradients.read_norms(parameters))

    def change(self, parameters: Collection[int]) -> bool:
        """Whether any of these gradients is to be multiplied by other than 1."""
        known = self._factors
        return bool(known) and any(known.get(parameter, 1.0) != 1.0 for parameter in parameters)

    def know(self, parameters: Collection[int]) -> bool:
        """Whether something was said of any of these gradients, be it 1."""
        return not self._factors.keys().isdisjoint(parameters)

    def of(self, parameter: int) -> float:
        """The factor of a gradient."""
        return self._factors.get(parameter, 1.0)

    def forget(self, parameters: Collection[int]) -> None:
        """Nothing was said of these gradients."""
        for parameter in parameters:
            self._factors.pop(parameter, None)
            self._clipped.pop(parameter, None)
