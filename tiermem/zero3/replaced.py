"""Gathered parameters that were given other memory, or another view of their own (`parameter.data = values`).

Owns how that is noticed, and how such values come into the frame. Does not know leases, nor who may write. Guarantees
that a parameter which is not the view of its slot is noticed, that values which are parts of frames (two parameters
have changed places) are those that were assigned, and that one that does not fit does not keep the others out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tiermem.errors import TiermemError
from tiermem.zero3.layout import Slot, slot_view
from tiermem.zero3.placeholder import reshaped


def replaced(base: torch.Tensor, parameters: Sequence[nn.Parameter], slots: Sequence[Slot]) -> str | None:
    """The name of a parameter that is not the view of its slot in `base`, a unit's bytes; None: there is none."""
    start = base.data_ptr()
    for parameter, slot in zip(parameters, slots, strict=True):
        if not _is_in_place(parameter, slot, start):
            return slot.names[0]
    return None


def unshare(
    base: torch.Tensor, parameters: Sequence[nn.Parameter], slots: Sequence[Slot], frames: Sequence[torch.Tensor]
) -> None:
    """Copy values that were assigned as a part of one of `frames`: it may be written before they are.

    By address: values of a `state_dict()` have storages of their own there.
    """
    start = base.data_ptr()
    spans = [(frame.data_ptr(), frame.data_ptr() + frame.nbytes) for frame in frames]
    for parameter, slot in zip(parameters, slots, strict=True):
        if not _is_in_place(parameter, slot, start) and _is_within(parameter, spans):
            parameter.data = parameter.data.clone()


def take_in(base: torch.Tensor, parameters: Sequence[nn.Parameter], slots: Sequence[Slot]) -> None:
    """Copy values that were assigned into the frame. Raises TiermemError, after that, for those that do not fit."""
    start, wrong = base.data_ptr(), None
    for parameter, slot in zip(parameters, slots, strict=True):
        if _is_in_place(parameter, slot, start):
            continue
        view, values = slot_view(base, slot), parameter.data
        if values.shape != view.shape:
            wrong = wrong or reshaped(slot.names[0], values.shape, slot.shape)
            continue
        if values.dtype != view.dtype:
            wrong = wrong or (
                f"parameter {slot.names[0]} was given values of {values.dtype} inside `gathered(write=True)`; expected "
                f"{view.dtype}. They are dropped: convert them"
            )
            continue
        view.copy_(values)
    if wrong is not None:
        raise TiermemError(wrong)


def _is_within(parameter: nn.Parameter, spans: Sequence[tuple[int, int]]) -> bool:
    begin = parameter.data_ptr()
    return any(start <= begin < end for start, end in spans)


def _is_in_place(parameter: nn.Parameter, slot: Slot, start: int) -> bool:
    if parameter.shape != slot.shape or parameter.dtype != slot.dtype:
        return False
    if not slot.numel:
        return True
    if parameter.data_ptr() != start + slot.offset:
        return False
    stride = parameter.stride()
    return stride == slot.stride or all(
        size == 1 or left == right for size, left, right in zip(slot.shape, stride, slot.stride, strict=True)
    )
