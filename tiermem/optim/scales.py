"""What the gradients of the step under way are to be multiplied by.

Owns one factor for each gradient that has been clipped or unscaled. Does not know optimizers or units: it is given
parameters. Guarantees that factors of one gradient multiply up, and that one whose norm is not finite has a factor that
says so.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence

import torch

from tiermem.optim.clip import are_finite, clip_coefficient, total_norm
from tiermem.optim.service import GradientBook


class Scales:
    """The factors by parameter number; 1 where nothing was said."""

    def __init__(self, gradients: GradientBook) -> None:
        self._gradients = gradients
        self._factors: dict[int, float] = {}

    @contextlib.contextmanager
    def unless_it_fails(self) -> Iterator[None]:
        """What is said meanwhile counts only if no error comes: whoever tries again says it again."""
        before = dict(self._factors)
        try:
            yield
        except BaseException:
            self._factors = before
            raise

    def multiply(self, parameters: Sequence[int], factor: float) -> None:
        """Multiply these gradients by `factor`, besides what was said before."""
        for parameter in parameters:
            self._factors[parameter] = self._factors.get(parameter, 1.0) * factor

    def clip(self, parameters: Sequence[int], max_norm: float) -> torch.Tensor:
        """Multiply these gradients so that their norm is `max_norm` at most; return the norm they had (0-dim).

        Raises ConfigError if `max_norm` is negative or not a number.
        """
        norms = self._gradients.norms(parameters)
        scaled = [norm * self._factors.get(p, 1.0) for p, norm in zip(parameters, norms, strict=True)]
        total = total_norm(scaled)
        self.multiply(parameters, clip_coefficient(total, max_norm))
        if not are_finite(scaled):
            self._factors.update(dict.fromkeys(parameters, float("nan")))
        return total

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

    def pop(self, parameter: int) -> float:
        """The factor of a gradient, which is forgotten."""
        return self._factors.pop(parameter, 1.0)

    def forget(self, parameters: Collection[int]) -> None:
        """Nothing was said of these gradients."""
        for parameter in parameters:
            self._factors.pop(parameter, None)
