"""The states of the random number generators, as JSON holds them.

Owns the capture and the restoring of Python's, numpy's and torch's global generators. Does not know generators that a
program made for itself. Guarantees that after `restore` all of them go on as they would have after `capture`, or are
as they were where that cannot be, and that nothing is executed while reading: no pickle.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tiermem.errors import ResumeError
from tiermem.runtime.extra import from_record, to_record


def capture() -> dict[str, Any]:
    """The states now; CUDA's too if it is in use."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, list(words), gauss], "torch": _text(torch.get_rng_state())}
    found: Any = np.random.get_state(legacy=False)
    if found["bit_generator"] == "MT19937":
        keys = found["state"]["key"].astype("<u4").tobytes().hex()
        position = found["state"]["pos"]
        states["numpy"] = [found["bit_generator"], keys, position, found["has_gauss"], found["gauss"]]
    else:  # of `numpy.random.set_bit_generator`
        states["numpy"] = to_record(found)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [_text(state) for state in torch.cuda.get_rng_state_all()]
    return states


def restore(states: Mapping[str, Any]) -> None:
    """Go on from `states`, which `capture` made. Raises ResumeError for anything else, and has changed nothing then."""
    before = capture()
    try:
        _set(states)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, RuntimeError) as error:
        _set(before)
        raise ResumeError(
            f"the states of the random number generators cannot be restored: {error}; they were of other versions of "
            "Python, numpy or torch, or numpy.random.set_bit_generator was called by the one program and not the other"
        ) from error


def require_restorable(states: Mapping[str, Any] | None) -> None:
    """Raise what `restore` would, and change nothing. None: there is nothing to be restored."""
    if states is not None:
        before = capture()
        restore(states)
        _set(before)


def _set(states: Mapping[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    if isinstance(states["numpy"], list):
        name, keys, position, has_gauss, cached = states["numpy"]
        values = np.frombuffer(bytes.fromhex(keys), "<u4").astype(np.uint32)
        np.random.set_state((name, values, position, has_gauss, cached))
    else:
        np.random.set_state(from_record(states["numpy"]))
    torch.set_rng_state(_state(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        for index, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_state(state), index)


def _text(state: torch.Tensor) -> str:
    return bytes(state.numpy().tobytes()).hex()


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).clone()
