"""The classical table: bytes a GPU and a node's host memory need for model state, by ZeRO stage and what is offloaded.

Owns the formulas of Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models" (2020),
section 3 and figure 1, and their extension to offloading. Does not know pages or this package's own way of training.
Guarantees plain arithmetic: 2 bytes a parameter for weights, 2 for gradients, 12 for the fp32 master and two moments;
activations, buffers and fragmentation are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiermem.planner.settings import require_whole

WEIGHT_BYTES = 2
GRADIENT_BYTES = 2
STATE_BYTES = 12


@dataclass(frozen=True, slots=True)
class ZeroRow:
    """One line: `device` bytes of one GPU, `host` bytes of one node, `nvme` bytes of one node's drives."""

    stage: int
    offload: str
    device: float
    host: float
    nvme: float


def zero_table(parameters: int, gpus: int, *, gpus_per_node: int = 8) -> list[ZeroRow]:
    """All stages, each with what can be offloaded in it: the optimizer (with gradients), in stage 3 parameters too.

    Offloaded optimizer state takes the gradients along, as in ZeRO-Offload; a stage 3 GPU then holds only what it
    works on, which is a layer and not in this table. Raises ConfigError for numbers that are not whole and positive.
    """
    for name, number in {"parameters": parameters, "gpus": gpus, "gpus_per_node": gpus_per_node}.items():
        require_whole(name, number, 1)
    per_node = min(gpus, gpus_per_node)
    rows = []
    for stage in range(4):
        weights = parameters * WEIGHT_BYTES / (gpus if stage >= 3 else 1)
        gradients = parameters * GRADIENT_BYTES / (gpus if stage >= 2 else 1)
        states = parameters * STATE_BYTES / (gpus if stage >= 1 else 1)
        rows.append(ZeroRow(stage, "nothing", weights + gradients + states, 0.0, 0.0))
        if stage == 0:
            continue
        kept = gradients if stage == 1 else 0.0
        moved = (states + (0.0 if stage == 1 else gradients)) * per_node
        rows.append(ZeroRow(stage, "optimizer to host", weights + kept, moved, 0.0))
        rows.append(ZeroRow(stage, "optimizer to nvme", weights + kept, 0.0, moved))
        if stage == 3:
            rows.append(ZeroRow(stage, "all to host", 0.0, moved + weights * per_node, 0.0))
            rows.append(ZeroRow(stage, "all to nvme", 0.0, 0.0, moved + weights * per_node))
    return rows
