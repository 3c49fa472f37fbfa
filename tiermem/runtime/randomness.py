"""The states of the random number generators, as JSON holds them.

Owns the capture and the restoring of Python's, numpy's and torch's global generators. Does not know generators that a
program made for itself. Guarantees that after `restore` all of them go on as they would have after `capture`, and that
nothing is executed while reading: no pickle.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tiermem.errors import ResumeError


def capture() -> dict[str, Any]:
    """The states now; CUDA's too if it is in use."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, list(words), gauss], "torch": _text(torch.get_rng_state())}
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states["numpy"] = [str(name), np.asarray(keys).astype("<u4").tobytes().hex(), position, has_gauss, cached]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [_text(state) for state in torch.cuda.get_rng_state_all()]
    return states


def restore(states: Mapping[str, Any]) -> None:
    """Go on from `states`, which `capture` made. Raises ResumeError for anything else."""
    try:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, position, has_gauss, cached = states["numpy"]
        values = np.frombuffer(bytes.fromhex(keys), "<u4").astype(np.uint32)
        np.random.set_state((name, values, position, has_gauss, cached))
        torch.set_rng_state(_state(states["torch"]))
        if "cuda" in states and torch.cuda.is_available():
            for index, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(_state(state), index)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ResumeError(f"the states of the random number generators cannot be restored: {error}") from error


def _text(state: torch.Tensor) -> str:
    return bytes(state.numpy().tobytes()).hex()


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).clone()
