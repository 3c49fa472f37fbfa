"""What a rank has of each unit, and whether it fits: as the run that is drawn of the same model has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_combinations import half_of, pairs_of, some_of
from doubles_planner import INSTANT, MACHINE, MIB, run_steps, steps_gone, tiny_llama, workload
from doubles_rank_scenarios import Experts, Odd
from torch import nn

import tiermem
from tiermem.cli.modelwork import workload_of
from tiermem.cli.plan import plan_settings
from tiermem.pager.page import Kind
from tiermem.planner.design import PlanSettings, make_design, swap_nbytes
from tiermem.planner.machine import Device, Link, Machine
from tiermem.planner.parts import Division, unit_sizes
from tiermem.planner.predict import predict, simulate_quickly
from tiermem.planner.reserved import copied_nbytes, wanted_copies
from tiermem.planner.simulate import simulate
from tiermem.planner.workload import transformer
from tiermem.planner.world import World
from tiermem.runtime.blueprint import Blueprint, draw
from tiermem.runtime.company import Company
from tiermem.zero3.collectives import SingleProcess
from tiermem.zero3.grid import Grid, one_copy

DIVISIONS = [Division(1), Division(2), Division(3), Division(4), Division(2, 2), Division(3, 2)]
DEVICE = Device(memory=64 * MIB, flops=INSTANT.host.flops, to_device=1e14, to_host=1e14, count=6, simulated=True)


class Agreeing(SingleProcess):
    """One of several ranks, where all others say the same."""

    def __init__(self, size: int) -> None:
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def tell(self, numbers: Any) -> list[list[int]]:
        return [list(numbers)] * self._size


def drawn(make: Callable[[], nn.Module], division: Division, config: tiermem.Config, coalesce: int = 0) -> Blueprint:
    """What `tiermem.offload` would make of the model, on the first of so many ranks."""
    everyone = Agreeing(division.ranks)
    rows = tuple(tuple(range(first, first + division.parts)) for first in range(0, division.ranks, division.parts))
    grid = Grid(everyone, Agreeing(division.parts), Agreeing(division.copies), rows)
    company = Company(grid if division.copies > 1 else one_copy(everyone), SingleProcess())
    return draw(make(), config, None, company=company, coalesce=coalesce)


def configured(
    host: int, device: int = 0, dtype: str = "bfloat16", moments: str = "float32", **rest: Any
) -> tiermem.Config:
    where: dict[str, Any] = {"device": "simulated", "device_memory": device} if device else {"device": "cpu"}
    types: dict[str, Any] = {"param_dtype": dtype, "moments": moments}
    return tiermem.Config(host_memory=host, swap_dirs=[Path()], update_on="auto", **types, **where, **rest)


def test_the_work_of_a_model_is_all_of_it_whoever_else_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = workload_of(tiny_llama(), "test", batch=2, seq=16, batches=1, dtype="bfloat16")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert workload_of(tiny_llama(), "test", batch=2, seq=16, batches=1, dtype="bfloat16") == expected


@pytest.mark.parametrize(
    ("division", "make", "types"),
    pairs_of(
        DIVISIONS,
        [tiny_llama, Odd, Experts],
        [("bfloat16", "float32"), ("float32", "float32"), ("bfloat16", "int8")],
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_units_have_the_sizes_of_the_run(
    make: Callable[[], nn.Module], division: Division, types: tuple[str, str]
) -> None:
    """Frozen, tied, smaller than the number of ranks, inside others, with moments of both kinds."""
    dtype, moments = types
    blueprint = drawn(make, division, configured(64 * MIB, dtype=dtype, moments=moments))
    work = workload_of(make(), "test", batch=2, seq=16, batches=1, dtype=dtype, moments=moments)
    found = unit_sizes(work, division, each=True)
    # Of a unit that is not trained nobody asks how large its state would be.
    stateless = [
        replace(size, state_itemsize=real.state_itemsize) for size, real in zip(found, blueprint.sizes, strict=True)
    ]
    trained = [size if size.trainable_numel else small for size, small in zip(found, stateless, strict=True)]
    assert trained == list(blueprint.sizes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("coalesce", [0, 300_000])
@pytest.mark.parametrize("division", DIVISIONS[:2], ids=str)
def test_pages_of_8_bit_moments_are_those_of_the_run(division: Division, coalesce: int, dtype: str) -> None:
    """Embeddings and small parameters keep float32, and units of several layers have some of each."""
    config = configured(16 * MIB, dtype=dtype, moments="int8", tile_size="64KiB")
    blueprint = drawn(tiny_llama, division, config, coalesce=coalesce)
    work = workload_of(tiny_llama(), "test", batch=2, seq=16, batches=1, dtype=dtype, moments="int8", coalesce=coalesce)
    settings = plan_settings(config, replace(INSTANT, link=Link(rate=1e14)), division.ranks, work, commits=False)
    design = make_design(work, replace(INSTANT, link=Link(rate=1e14)), settings)
    assert design.footprint == blueprint.footprint
    pages = {str(key): nbytes for key, nbytes in design.pages() if key.kind is not Kind.TRANSIT}
    assert pages == {str(key): nbytes for key, nbytes in blueprint.pages}
    whole = design.nbytes(Kind.PARAM, Kind.STATE, Kind.GRAD)
    assert whole == pytest.approx(sum(pages.values()), rel=0.1), "rounded to frames"


@pytest.mark.parametrize("trained", ["q_proj", "layers.0", "layers"])
@pytest.mark.parametrize("division", DIVISIONS[:2], ids=str)
def test_what_is_frozen_has_as_many_copies_on_disk_as_in_the_run(division: Division, trained: str) -> None:
    """A large base has one, and room for its largest unit; embeddings beside trained layers have as many as those."""

    def partly_frozen() -> nn.Module:
        model = tiny_llama()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        return model

    config = configured(16 * MIB, tile_size="64KiB")
    machine = replace(INSTANT, link=Link(rate=1e14))
    blueprint = drawn(partly_frozen, division, config)
    work = workload_of(partly_frozen(), "test", batch=2, seq=16, batches=1, dtype="bfloat16")
    design = make_design(work, machine, plan_settings(config, machine, division.ranks, work, commits=True))
    for commits in (False, True):
        wanted = blueprint.swap_nbytes(wanted_copies(design.settings.update, commits=commits))
        assert swap_nbytes(design, commits=commits) == wanted


def test_what_is_frozen_has_copies_where_that_takes_little_and_else_room_for_its_largest_unit() -> None:
    copies = {
        update: [wanted_copies(update, commits=each) for each in (False, True)] for update in ("step", "backward")
    }
    assert copies == {"step": [1, 2], "backward": [2, 3]}
    assert copied_nbytes(1, total=100, changing=20, frozen=[60]) == 100
    assert copied_nbytes(2, total=100, changing=20, frozen=[]) == 120
    assert copied_nbytes(2, total=100, changing=20, frozen=[9, 15]) == 120 + 24  # a fifth of it is little
    assert copied_nbytes(2, total=100, changing=20, frozen=[9, 16]) == 120 + 16
    assert copied_nbytes(3, total=100, changing=20, frozen=[9, 19]) == 140 + 2 * 28
    assert copied_nbytes(3, total=100, changing=20, frozen=[9, 20]) == 140 + 20


def test_of_a_bare_number_of_parameters_the_embedding_keeps_float32_moments() -> None:
    sizes = unit_sizes(transformer(2_000_000, batch=1, seq=16, moments="int8"))
    found = {size.name: size.state_itemsize for size in sizes}
    assert (found["embedding"], found["layer 0"], found["head"]) == (10, 5, 5)


@pytest.mark.parametrize("division", some_of(DIVISIONS[5:], DIVISIONS[:5]), ids=str)
def test_what_fits_is_what_the_run_takes(division: Division) -> None:
    """The least budgets work in both, and a page less in neither, on processors and beside a device."""
    work = workload_of(tiny_llama(), "test", batch=2, seq=16, batches=1, dtype="bfloat16")

    def fits(host: int, device: int = 0) -> dict[str, int]:
        machine = replace(INSTANT, device=DEVICE if device else None, link=Link(rate=1e14))
        config = configured(host, device)
        settings = plan_settings(config, machine, division.ranks, work, commits=True, copies=division.copies)
        found = predict(work, machine, settings)
        try:
            shared = drawn(tiny_llama, division, config)
        except tiermem.BudgetError:
            assert not found.fits
        else:
            assert found.fits
            assert found.design is not None
            assert (found.design.footprint, found.design.device) == (shared.footprint, shared.device)
        return dict(found.missing)

    least = 4096 + fits(4096)["host_memory"]
    assert fits(least) == {}
    assert fits(least - 4096) == {"host_memory": 4096}
    below = 4096 + fits(4096, 64 * MIB)["host_memory"]
    above = 4096 + fits(64 * MIB, 4096)["device_memory"]
    assert fits(below, above) == {}
    assert fits(below - 4096, above) == {"host_memory": 4096}
    assert fits(below, above - 4096) == {"device_memory": 4096}
    assert fits(below - 4096, above - 4096) == {"host_memory": 4096, "device_memory": 4096}
    assert fits(64 * MIB, 12 * MIB) == {}


def several(device: bool) -> Machine:
    return replace(MACHINE, device=replace(DEVICE, memory=8 << 30) if device else None, link=Link(rate=1e9))


@pytest.mark.parametrize("update", ["forward", "backward", "step"])
@pytest.mark.parametrize(("host", "device"), [(40, None), (64, 40)])
def test_the_forecast_goes_through_the_schedule_once_a_step(update: str, host: int, device: int | None) -> None:
    plan = PlanSettings(host_memory=host * MIB, device_memory=device and device * MIB, update=update, ranks=4)
    design = make_design(workload([1_000_000] * 30, batches=2), several(device is not None), plan)
    assert design.beside
    world = World(design)
    gone = steps_gone(world.residency.forecast)
    run_steps(world, 3)
    assert max(gone) <= 1


@pytest.mark.parametrize("update", ["forward", "backward"])
@pytest.mark.parametrize("device", [None, 40])
def test_where_all_have_all_parameters_the_next_unit_is_used_while_one_is_added_up(
    update: str, device: int | None
) -> None:
    """The schedule had it behind that, and each tile that was added up surprised the forecast."""
    work = workload([1 << 20] * 6)
    machine = replace(several(device is not None), link=Link(rate=1e10, latency=1e-4))
    host, above = 40 * MIB, None if device is None else device * MIB
    settings = PlanSettings(
        host_memory=host, device_memory=above, update=update, ranks=2, stage=2, tile_nbytes=MIB // 2, look_ahead=0
    )
    design = make_design(work, machine, settings)
    assert design.beside
    assert design.tiles(0) > 4
    world = World(design)
    run_steps(world, 3)
    assert world.residency.forecast.surprises <= 3 * 2 * len(work.units)


@pytest.mark.parametrize(("stage", "device", "most"), [(3, None, 10), (2, None, 19), (2, 40, 12), (3, 40, 9)])
def test_the_schedule_has_buckets_and_sums_of_several_batches_where_the_computation_has_them(
    stage: int, device: int | None, most: int
) -> None:
    """Each that came elsewhere surprised the forecast: it did by half as many again, and up to five times as many.

    A gradient that is added to again is no access that leads anywhere, and counts as one, too: about one a unit.
    """
    host, above = 40 * MIB if device is None else 64 * MIB, device and device * MIB
    plan = PlanSettings(host_memory=host, device_memory=above, update="backward", ranks=4, stage=stage)
    design = make_design(workload([1_000_000] * 12, batches=2), several(device is not None), plan)
    assert design.beside
    world = World(design)
    run_steps(world, 2)
    before = world.residency.forecast.surprises
    run_steps(world, 2)
    assert world.residency.forecast.surprises - before <= 2 * most


@pytest.mark.parametrize(("memory", "update"), half_of([(150, None), (96, 40), (256, 200)], ["forward", "backward"]))
def test_fewer_units_stand_for_many_over_ranks_too(update: str, memory: tuple[int, int | None]) -> None:
    host, device = memory
    plan = PlanSettings(
        host_memory=host * MIB,
        device_memory=None if device is None else device * MIB,
        update=update,
        update_on="auto",
        ranks=6 if device == 200 else 4,
        copies=2,
    )
    exact = make_design(workload([1_000_000] * 90), several(device is not None), plan)
    quick, stood_in = simulate_quickly(exact)
    whole = simulate(exact)
    assert stood_in
    assert quick.seconds == pytest.approx(whole.seconds, rel=0.15)
    for tier in quick.tiers:
        assert tier.high_water <= tier.budget


def test_what_ranks_exchange_takes_time_and_less_inside_a_node() -> None:
    """Copies are gathered inside a node, where that is faster, and only sums of gradients go between nodes."""
    machine = replace(several(device=True), link=Link(rate=1e8, node_rate=1e11), device=replace(DEVICE, count=2))
    plan = PlanSettings(host_memory=256 * MIB, device_memory=64 * MIB, update="step", ranks=4)
    work = workload([1_000_000] * 6)
    one, two = (make_design(work, machine, replace(plan, copies=copies)) for copies in (1, 2))
    assert one.times[0].gather == pytest.approx(2e-5 + 0.75 * 2e6 / 1e8, rel=1e-3)
    assert two.times[0].gather == pytest.approx(2e-5 + 0.5 * 2e6 / 1e11, rel=1e-3)
    # Sums of half a unit, sent in float32, and back in 16 bits.
    assert two.times[0].exchange == pytest.approx(two.times[0].gather + 4e-5 + 0.5 * (2e6 + 1e6) / 1e8, rel=1e-3)
    slow, fast = simulate(one), simulate(two)
    assert slow.stalls["ranks"] > fast.stalls["ranks"] > 0
    assert fast.seconds < slow.seconds


@pytest.mark.parametrize(("ranks", "copies", "message"), [(4, 3, "each in as many parts"), (4, 4, "at least two")])
def test_copies_that_ranks_cannot_keep_are_refused(ranks: int, copies: int, message: str) -> None:
    with pytest.raises(tiermem.ConfigError, match=message):
        make_design(
            workload([100_000]), several(device=False), PlanSettings(host_memory=4 * MIB, ranks=ranks, copies=copies)
        )
