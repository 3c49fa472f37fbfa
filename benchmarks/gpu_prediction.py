"""What `tiermem plan` would say of the steps that gpu_step.py measures, on the machine it finds itself on.

Owns the way from a contender's settings to a prediction. Does not measure steps. Guarantees that predictions are made
from what `tiermem plan` measures by itself in a few seconds, and from no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from train_step import Contender
from workloads import WORKLOADS

from tiermem.cli.measure import measure_machine
from tiermem.cli.measure_layer import LayerShape
from tiermem.cli.modelwork import model_workload
from tiermem.cli.plan import plan_settings
from tiermem.config import Config
from tiermem.planner.design import make_design
from tiermem.planner.machine import Machine, machine_to_dict
from tiermem.planner.predict import simulate_quickly

# For each rate and each pattern on the drives, as `tiermem plan` has it, and where only the way is looked at: there
# with a small layer in place of one that stands for any workload, and few bytes.
_SECONDS, _QUICK_SECONDS = (0.25, 0.7), (0.01, 0.05)
_SMALL_LAYER, _FEW_BYTES = LayerShape(rows=1, seq=16, width=64, mlp=64), 64 << 20


def predict_steps(
    contenders: Sequence[Contender], workload: str, directory: Path, *, quick: bool = False
) -> tuple[dict[str, float], dict[str, object]]:
    """Seconds of a step by contender, and the machine that was measured for them, as a table.

    `contenders`: of tiermem, all with one device. Raises ConfigError where the machine cannot be measured.
    """
    work = WORKLOADS[workload]
    with torch.device("meta"):
        model = work.model().config
    found: dict[str, float] = {}
    machine: Machine | None = None
    for contender in contenders:
        settings = {name: value for name, value in contender.settings.items() if name != "trace"}
        config = Config(**settings, param_dtype="bfloat16", swap_dirs=[str(directory)])
        if machine is None:
            seconds, drive_seconds = _QUICK_SECONDS if quick else _SECONDS
            few: dict[str, Any] = {"nbytes": _FEW_BYTES, "layer": _SMALL_LAYER} if quick else {}
            machine = measure_machine([directory], config, seconds=seconds, drive_seconds=drive_seconds, **few)
        step = model_workload(model, workload, batch=work.rows, seq=work.length, batches=1, settings=config)
        simulation, _ = simulate_quickly(
            make_design(step, machine, plan_settings(config, machine, 1, step, commits=config.commits))
        )
        found[contender.name] = simulation.seconds
    return found, machine_to_dict(machine) if machine is not None else {}
