"""What a machine gives to one workload: rates found by training a few layers like its own.

Owns the model that stands for a workload's, and the machine that is fitted to it. Does not measure what any workload
has (`measure.py`), and keeps nothing (`machines.py` does). Guarantees that what is trained fits into what is free, of
memory and of the disks; where nothing does, one layer is timed alone, and the source of the machine says so. One layer
alone is timed, too, where a processor lacks instructions for the dtype.

A layer by itself says what products take. What training takes besides, leases, tiles, moving bytes on cores that
compute, and what a drive gives to requests that wait for such cores, only training says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import tiermem
from swap import free_together
from tiermem.cli.measure import BESIDES_SECONDS, CPU, DTYPES, LEASE_SECONDS, LEASES, SECONDS, slower_together
from tiermem.cli.measure_layer import (
    LayerShape,
    decoded,
    in_time,
    layer_flops,
    layer_for,
    rotations,
    slowed,
    train_layer,
)
from tiermem.cli.measure_training import Measured, beside_io, rates_of, train_steps
from tiermem.cli.modelwork import workload_of
from tiermem.cli.timing import median_seconds
from tiermem.config import Config, Update
from tiermem.memory.machine import available_host_memory
from tiermem.memory.sizes import format_bytes
from tiermem.optim.compiled import are_wanted
from tiermem.pager.tiling import SMALLEST_TILE
from tiermem.planner.design import least_host_memory
from tiermem.planner.footprint import plan_footprint
from tiermem.planner.machine import Machine
from tiermem.planner.overhead import split_budget
from tiermem.planner.parts import unit_sizes
from tiermem.planner.settings import PlanSettings
from tiermem.planner.workload import Workload

# A layer of the model that stands for another is no wider than this.
_MOST_WIDTH = 1024
# Of parameters and state in memory while bytes are to move, which makes so many tiles.
_SHARE, _TILES = 0.25, 12
# Tiles are of whole steps, so that what is kept serves budgets that are much alike.
_TILE_STEP, _LARGEST_TILE = 8 << 20, 24 << 20
_FEWEST_LAYERS, _MOST_LAYERS, _MOST_WEIGHTS = 3, 24, 90_000_000
# Steps with everything in memory, and with bytes that move, which differ more.
_ALONE, _PAGED = 5, 8
_BESIDE_PAGES = 192 << 20


@dataclass(frozen=True, slots=True)
class Stand:
    """What stands for a workload: `layers` layers of `shape`, and about so many bytes of state in a tile."""

    shape: LayerShape
    layers: int
    dtype: str
    moments: str
    tile_nbytes: int


def stand_for(workload: Workload, *, seq: int, tile_nbytes: int) -> Stand | None:
    """The model that stands for a workload of sequences of `seq` tokens; None for dtypes that processors imitate.

    `tile_nbytes`: bytes of state in a tile of the run. What a drive gives depends on it.
    """
    if workload.dtype not in DTYPES:
        return None
    shape = layer_for(workload, seq=seq)
    if shape.width > _MOST_WIDTH:
        shape = replace(shape, width=_MOST_WIDTH, mlp=shape.mlp * _MOST_WIDTH // shape.width)
    tile = min(max(_TILE_STEP, round(tile_nbytes / _TILE_STEP) * _TILE_STEP), _LARGEST_TILE)
    wanted = _TILES * tile / _SHARE / (workload.itemsize + workload.state_itemsize)
    layers = min(max(_FEWEST_LAYERS, round(min(wanted, _MOST_WEIGHTS) / shape.weights)), _MOST_LAYERS)
    return Stand(shape, layers, workload.dtype, workload.moments, tile)


def with_rates_for(
    machine: Machine,
    workload: Workload,
    directories: Sequence[Path],
    *,
    seq: int,
    tile_nbytes: int,
    seconds: float = SECONDS,
) -> Machine:
    """The machine with the rates at which its processors and drives train this workload.

    They depend by a factor of four on a layer's width and on the tokens. Where a device computes, and for float16, the
    machine as it is. With another `source`, which says why, where there is
    no room to train layers: a later look may find more.

    Args:
        machine: as `measure_machine` found it.
        workload: the step.
        directories: where bytes are moved to and from.
        seq: tokens in a sequence.
        tile_nbytes: bytes of state in a tile of the run, about.
        seconds: for each rate that is not found by training, about.

    Takes none of the caller's random numbers. Raises what training raises.
    """
    stand = stand_for(workload, seq=seq, tile_nbytes=tile_nbytes)
    if stand is None or (machine.device is not None and not machine.device.simulated):
        return machine
    with torch.random.fork_rng(devices=()):
        return _fitted(machine, workload, stand, directories, seq=seq, seconds=seconds)


def _fitted(
    machine: Machine, workload: Workload, stand: Stand, directories: Sequence[Path], *, seq: int, seconds: float
) -> Machine:
    dtype, like = DTYPES[stand.dtype], layer_for(workload, seq=seq)
    rate = layer_flops(dtype, CPU, seconds, like)
    by_layer = _computing_at(slowed(rate, like, BESIDES_SECONDS), stand.dtype, machine)
    if in_time(dtype, CPU, stand.shape, seconds) != stand.shape:
        return by_layer  # training would take minutes, and its computation hides all else
    if (nbytes := _nbytes(stand)) > _room(directories):
        lacks = f"no layers trained: {format_bytes(2 * nbytes)} of memory and disk have to be free"
        return replace(by_layer, source=f"{machine.source}; {lacks}")
    by_itself = median_seconds(train_layer(dtype, CPU, stand.shape), seconds)
    beside = slower_together(dtype, seconds)
    alone, paged, settings = _train(stand, directories)
    work = _work(stand)
    rates, in_training = rates_of(alone, paged, work.parameters, beside[1]), _layer_seconds(alone)
    copied = stand.shape.weights * dtype.itemsize / machine.host.copy_rate
    # What a layer takes besides is not a lease's: a gradient that arrives tile by tile is leased many times.
    besides = max(0.0, in_training - by_itself - copied - LEASES * LEASE_SECONDS)
    machine = _computing_at(slowed(rate, like, besides), stand.dtype, machine)
    host = replace(
        machine.host,
        update_rate={**machine.host.update_rate, stand.dtype: rates.update_rate},
        lease_seconds=LEASE_SECONDS,
        step_seconds=rates.step_seconds,
        tile_seconds=rates.tile_seconds,
        compute_beside_update=beside[0],
        update_beside_compute=beside[1],
        compute_beside_io=0.0,
        update_beside_io=0.0,  # is in the tiles' seconds
    )
    moved = {name: rate for name in ("read", "write", "mixed") if (rate := getattr(rates, name))}
    machine = replace(machine, host=host, drive=replace(machine.drive, **moved))
    slower = beside_io(alone, paged, work, replace(machine, device=None), settings)
    return replace(machine, host=replace(host, compute_beside_io=slower))


def _computing_at(rate: float, dtype: str, machine: Machine) -> Machine:
    """The machine whose processors, and the device that they may play, do so many operations a second."""
    flops = {**machine.host.flops, dtype: rate}
    device = None if machine.device is None else replace(machine.device, flops=flops)
    return replace(machine, host=replace(machine.host, flops=flops), device=device)


def _train(stand: Stand, directories: Sequence[Path]) -> tuple[Measured, Measured, PlanSettings]:
    """Two trainings: with everything in memory, and with bytes that move; and what the second is simulated by."""
    work, whole = _work(stand), _nbytes(stand)
    least = least_host_memory(work, 1)
    share = round(_SHARE * work.parameters * (work.itemsize + work.state_itemsize))
    paged = max(share, 2 * least)  # with room for more than one update at a time
    tile = min(stand.tile_nbytes, max(paged // _TILES, SMALLEST_TILE * work.state_itemsize))
    settings: dict[str, Any] = {"device": "cpu", "param_dtype": stand.dtype, "moments": stand.moments, "commits": False}

    def look_ahead(nbytes: int) -> int:
        return plan_footprint(unit_sizes(work), nbytes, tile).look_ahead  # what "auto" begins with; not refined

    def train(nbytes: int, update: Update, steps: int) -> Measured:
        shared: dict[str, Any] = {"host_memory": nbytes, "tile_size": tile, "look_ahead": look_ahead(nbytes)}
        config = Config(swap_dirs=list(directories), update=update, **shared, **settings)
        return train_steps(model.make, model.backward, _optimizer, config, steps, coalesce=0)

    model = _Model(stand)
    alone, moving = train(whole, "step", _ALONE), train(paged, "backward", _PAGED)
    pages, beside = split_budget(paged, least, compiled=are_wanted(DTYPES[stand.dtype], stand.moments))
    simulated = PlanSettings(
        host_memory=pages,
        beside_pages=beside,
        tile_nbytes=tile,
        look_ahead=look_ahead(paged),
        update="backward",
    )
    return alone, moving, simulated


def _layer_seconds(alone: Measured) -> float:
    """Seconds of one layer's forward and backward in training."""
    seen = alone.observed
    return median(seen.forward[unit] + seen.backward[unit] for unit in seen.forward)


def _work(stand: Stand) -> Workload:
    with torch.device("meta"):
        model = _Model(stand).make()
    shape = stand.shape
    return workload_of(
        model,
        "layers",
        batch=shape.rows,
        seq=shape.seq,
        batches=1,
        dtype=stand.dtype,
        moments=stand.moments,
        width=shape.width,
    )


def _nbytes(stand: Stand) -> int:
    """Bytes that its parameters, gradients and states take, and what lies beside pages."""
    work = _work(stand)
    return round(1.05 * work.parameters * (2 * work.itemsize + work.state_itemsize)) + _BESIDE_PAGES


def _room(directories: Sequence[Path]) -> int:
    """Half of what is free of memory, and of the disks."""
    return min(available_host_memory(), free_together(directories)) // 2


def _optimizer(model: nn.Module) -> tiermem.AdamW:
    return tiermem.AdamW(model.parameters(), lr=1e-6)


class _Model:
    """Layers of a stand, and what they are trained on."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        shape, dtype = stand.shape, DTYPES[stand.dtype]
        self._inputs = torch.randn(shape.rows, shape.seq, shape.width).to(dtype).requires_grad_()

    def make(self) -> nn.Module:
        return _Layers(self._stand)

    def backward(self, _: int, model: nn.Module) -> None:
        model(self._inputs).float().square().mean().backward()
        self._inputs.grad = None


class _Layers(nn.Module):
    def __init__(self, stand: Stand) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(stand) for _ in range(stand.layers))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


class _Layer(nn.Module):
    def __init__(self, stand: Stand) -> None:
        super().__init__()
        self.heads = stand.shape.heads
        self.turns = rotations(stand.shape, DTYPES[stand.dtype], CPU)
        self.qkv, self.out, self.gated, self.down = (
            nn.Linear(inside, out, bias=False) for out, inside in stand.shape.sizes
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return decoded(inputs, (self.qkv, self.out, self.gated, self.down), self.heads, self.turns)
