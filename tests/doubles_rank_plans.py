"""What ranks do in the tests of plans: train under a budget, and tell how it was shared out and what was moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from doubles_combinations import number_of
from doubles_planner import EDGES, MIB, moved_at_rest, steps_gone, tiny_llama, trained
from doubles_ranks import STALL
from torch.distributed.device_mesh import init_device_mesh

import tiermem
from tiermem.planner.reserved import wanted_copies

COUNTED = number_of(1, 2)
WARM = number_of(2, 3)  # steps: one whose order nobody knows, and one that goes from it to what is repeated
LAYERS = 3


@dataclass(frozen=True)
class Planned:
    """A run whose bytes are foreseen. `device`: bytes of each rank's, 0: none. `copies`: of the model."""

    update: str
    host: int = 64 * MIB
    device: int = 0
    update_on: str = "host"
    copies: int = 1
    batches: int = 1
    dtype: str = "bfloat16"
    look_ahead: int | str = 0
    stage: int = 3

    def config(self, directory: Path) -> tiermem.Config:
        where: dict[str, Any] = {"device": "cpu"}
        if self.device:
            where = {"device": "simulated", "device_memory": self.device}
        how: dict[str, Any] = {"update": self.update, "update_on": self.update_on, "param_dtype": self.dtype}
        return tiermem.Config(
            host_memory=self.host,
            swap_dirs=[directory],
            tile_size="128KiB",
            look_ahead=self.look_ahead,
            stage=self.stage,
            io_backend="inline",
            commits=False,
            stall_timeout=STALL,
            **where,
            **how,
        )


PLANNED = {
    "host": Planned("forward", host=2 * MIB),
    "host_batches": Planned("forward", host=2 * MIB, batches=2),
    "host_beside": Planned("forward", host=3 * MIB, batches=2),
    "host_backward": Planned("backward", host=3 * MIB),
    "settled": Planned("step", device=64 * MIB, update_on="auto"),
    "partly_settled": Planned("backward", device=9 * MIB, update_on="auto"),
    "device": Planned("step", device=4 * MIB, host=2 * MIB),
    "stage_2": Planned("forward", host=2 * MIB, batches=2, stage=2),
    "stage_2_beside": Planned("forward", host=4 * MIB, stage=2),
    "stage_2_backward": Planned("backward", host=3 * MIB, stage=2),
    "stage_2_device": Planned("step", device=5 * MIB, host=2 * MIB, stage=2),
    "stage_1": Planned("step", host=2 * MIB, batches=2, stage=1),
    "stage_1_device": Planned("backward", device=5 * MIB, host=3 * MIB, stage=1),
}
COPIES = {
    "copies": Planned("step", host=2 * MIB, copies=2),
    "copies_settled": Planned("step", device=9 * MIB, update_on="auto", copies=2),
    "copies_stage_1": Planned("forward", host=2 * MIB, copies=2, stage=1),
}


def planned(case: Planned) -> Callable[[Path, int, int], Any]:
    """Train some steps, and more that count."""

    def scenario(directory: Path, rank: int, size: int) -> Any:
        directory.mkdir(exist_ok=True)
        names = ("replicate", "shard")
        shape = (case.copies, size // case.copies)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names) if case.copies > 1 else None
        model = tiny_llama(layers=LAYERS)
        torch.manual_seed(rank)
        with tiermem.offload(model, case.config(directory), coalesce=0, mesh=mesh) as runtime:
            steps = trained(model, runtime, batches=case.batches)
            list(islice(steps, WARM))
            before = moved_at_rest(runtime)
            forecast = runtime._house.storage.pager._core.residency.forecast
            gone, surprised = steps_gone(forecast), forecast.surprises
            list(islice(steps, COUNTED))
            after = moved_at_rest(runtime)
            blueprint, order = runtime._house.steps.plans._blueprint, runtime._house.scheduler.order.expected
            return {
                "shared": (blueprint.footprint, blueprint.device),
                "disk": blueprint.swap_nbytes(
                    wanted_copies("forward" if case.stage == 1 else case.update, commits=False)
                ),
                "pages": sorted((str(key), nbytes) for key, nbytes in blueprint.pages),
                "accesses": order.accesses,
                "gone": gone,
                "surprises": forecast.surprises - surprised,
                "moved": {edge: after[edge] - before[edge] for edge in EDGES},
            }

    return scenario


SCENARIOS = {f"planned_{name}": planned(case) for name, case in (PLANNED | COPIES).items()}
