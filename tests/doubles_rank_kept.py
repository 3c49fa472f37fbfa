"""Ranks that keep parameters in memory by choice."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doubles_rank_scenarios as scenarios
import pytest
import torch

import tiermem

Scenario = Callable[[Path, int, int], Any]
NORMS = {"keep": ["LayerNorm"], "keep_dtype": "float32"}


def keeping(**settings: Any) -> Scenario:
    """Train with the least host memory that works."""

    def scenario(directory: Path, rank: int, size: int) -> Any:
        given = {name: settings[name] for name in ("keep", "keep_dtype") if name in settings}
        config = {name: settings[name] for name in ("stage", "device", "device_memory") if name in settings}
        with pytest.raises(tiermem.BudgetError) as caught:
            tiermem.offload(scenarios.Odd(), scenarios.config_for(directory, host_memory=4096, **config), **given)
        least = int(re.search(r"set host_memory to (\d+) bytes", str(caught.value)).group(1))
        return scenarios.trained(
            scenarios.Odd, directory, rank, size, host_memory=least, commits=False, steps=2, accumulate=2, **settings
        )

    return scenario


def reshard(directory: Path, rank: int, size: int) -> Any:
    """Two ranks with norms in float32 train, commit and make a snapshot; one process goes on from that."""
    folder = directory.parent.parent
    torch.manual_seed(1)
    model = scenarios.Odd()
    config = scenarios.config_for(directory, param_dtype="bfloat16")
    resume = False if size == 2 else folder / "kept copy"
    with tiermem.offload(model, config, resume=resume, **NORMS) as runtime:
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
        if size == 2:
            scenarios.train(model, optimizer, rank=rank, size=size, steps=2)
            runtime.commit().wait()
            runtime.snapshot(folder / "kept copy").wait()
        weights = scenarios.parameters_of(runtime)
        masters = scenarios.masters_of(runtime, weights)
        dtypes = {name: values.dtype for name, values in weights.items()}
    if size == 2:
        with tiermem.offload(scenarios.Odd(), config, resume=True, **NORMS) as runtime:
            resumed = scenarios.masters_of(runtime, scenarios.parameters_of(runtime))
            assert all(torch.equal(resumed[name], masters[name]) for name in masters)
    return {"masters": masters, "dtypes": dtypes}


def refused(directory: Path, rank: int, size: int) -> Any:
    """Whole pages are completed on the device."""
    config = scenarios.config_for(directory, stage=2, device="simulated", device_memory="8MiB")
    model = scenarios.Odd()
    with pytest.raises(tiermem.ConfigError) as caught:
        tiermem.offload(model, config, keep=SMALL)
    return str(caught.value), bool(model.scale.isfinite().all()), list(directory.glob(f"rank_{rank:05d}/*"))


SMALL = "1KiB"
SCENARIOS: dict[str, Scenario] = {
    "kept_small": keeping(keep=SMALL),
    "kept_all": keeping(keep=lambda name, parameter: True),
    "kept_backward": keeping(keep=SMALL, update="backward"),
    "kept_stage_2": keeping(keep=SMALL, stage=2),
    "kept_stage_1": keeping(keep=SMALL, stage=1),
    "kept_on_a_device": keeping(keep=SMALL, device="simulated", device_memory="8MiB"),
    "kept_reshard": reshard,
    "kept_whole_on_a_device": refused,
}
