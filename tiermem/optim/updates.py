"""The records in which an update is asked for.

Owns `Settings`, `SegmentUpdate` and `UnitUpdate`. Does not know who asks nor who carries it out. Guarantees that a
request is frozen: what the learning rate was when the update was queued is what the update uses, however late it runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from tiermem.optim.tiles import Segment
from tiermem.pager.protection import Protection


@dataclass(frozen=True, slots=True)
class Settings:
    """The hyperparameters of one parameter in one step; `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


def in_words(settings: Mapping[int, Settings]) -> str:
    """Settings by parameter, less their steps: the same words where they are the same, whatever their order."""
    numbers: dict[str, list[int]] = {}
    for number, each in sorted(settings.items()):
        words = f"lr={each.lr}, betas={each.beta1, each.beta2}, eps={each.eps}, weight_decay={each.weight_decay}"
        numbers.setdefault(words, []).append(number)
    return ", ".join(f"{words} for {len(of)}:{zlib.crc32(repr(of).encode()):08x}" for words, of in numbers.items())


@dataclass(frozen=True, slots=True)
class SegmentUpdate:
    """One parameter that has a gradient in this step."""

    segment: Segment
    settings: Settings


@dataclass(frozen=True, slots=True)
class UnitUpdate:
    """The update of one unit in one step.

    `segments` holds only parameters that have a gradient: the others are not touched at all. Gradients are multiplied
    by `grad_scale`, a number that float32 represents exactly (the clipping coefficient), in their own dtype.
    `discard_gradients` says that nobody else wants the unit's GRAD tiles afterwards. With a `protection` what the
    update changes can be undone until that is confirmed.
    """

    unit: int
    segments: tuple[SegmentUpdate, ...]
    grad_scale: float = 1.0
    discard_gradients: bool = True
    protection: Protection | None = None
