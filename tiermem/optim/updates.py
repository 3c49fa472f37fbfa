"""The records in which an update is asked for.

Owns `Settings`, `SegmentUpdate` and `UnitUpdate`. Does not know who asks nor who carries it out. Guarantees that a
request is frozen: what the learning rate was when the update was queued is what the update uses, however late it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiermem.optim.tiles import Segment


@dataclass(frozen=True, slots=True)
class Settings:
    """The hyperparameters of one parameter in one step; `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


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
    `discard_gradients` says that nobody else wants the unit's GRAD tiles afterwards.
    """

    unit: int
    segments: tuple[SegmentUpdate, ...]
    grad_scale: float = 1.0
    discard_gradients: bool = True
