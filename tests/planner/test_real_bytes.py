"""The bytes a simulated step moves beside those of a real one: same model, same budget, same schedule."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from doubles_combinations import some_of
from doubles_planner import EDGES, INSTANT, moved_at_rest, plans_made, tiny_llama, trained
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tiermem
from tiermem.cli.modelwork import workload_of
from tiermem.memory.arena import rounded
from tiermem.pager.page import Kind
from tiermem.planner.design import PlanSettings, make_design
from tiermem.planner.machine import Device, Link
from tiermem.planner.simulate import Simulation, simulate
from tiermem.planner.thin import thinned
from tiermem.runtime.blueprint import draw
from tiermem.stats import StepStatistics
from tiermem.zero3.keep import Keeping

MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    update: str
    dtype: str
    host: int
    tied: bool
    look_ahead: int | str


def to_and_from_disk(steps: Iterator[StepStatistics]) -> list[tuple[int, int]]:
    """Bytes read and written in each of three steps, after three."""
    return [(step.bytes_read, step.bytes_written) for step in islice(steps, 3, 6)]


def both(case: Case, directory: Path) -> tuple[list[tuple[int, int]], Simulation]:
    config = tiermem.Config(
        device="cpu",
        host_memory=case.host,
        swap_dirs=[directory],
        param_dtype=case.dtype,  # type: ignore[arg-type]
        update=case.update,  # type: ignore[arg-type]
        tile_size="64KiB",
        look_ahead=case.look_ahead,
        io_backend="inline",
        commits=case.update == "auto",  # for the room on disk to take updates back
    )
    model = tiny_llama(tied=case.tied)
    work = workload_of(model, "small", batch=2, seq=16, batches=1, dtype=case.dtype)
    with tiermem.offload(model, config, coalesce=0) as runtime:
        moved = to_and_from_disk(trained(model, runtime))
        order = runtime._house.scheduler.order.expected
        assert order is not None
        assert order.accesses == work.step_order, "units are used in the order that was foreseen"
        footprint, acted = runtime._house.blueprint.footprint, runtime._house.steps.plans._schedule.acts_as
    settings = PlanSettings(
        host_memory=case.host,
        update=case.update,
        tile_nbytes=config.tile_nbytes,
        look_ahead=config.look_ahead_nbytes,
    )
    design = make_design(work, INSTANT, settings)
    assert design.footprint == footprint, "the budget is shared out alike"
    assert design.update == acted
    return moved, simulate(design)


@pytest.mark.parametrize(
    "case",
    some_of(
        [
            Case("step", "bfloat16", 4 * MIB, tied=True, look_ahead=0),
            Case("step", "float32", 2 * MIB, tied=False, look_ahead=0),
        ],
        [
            Case("step", "bfloat16", 2 * MIB, tied=False, look_ahead=0),
            Case("step", "float32", 4 * MIB, tied=False, look_ahead=0),
        ],
    ),
    ids=str,
)
def test_where_nothing_overlaps_a_step_moves_the_bytes_foreseen(case: Case, tmp_path: Path) -> None:
    # Nothing is timed here. What is left is who asks first, the computation's thread or the loop: on a machine at rest
    # no byte is different (where words are tied, 3 %), beside other work a few tiles are, 7 % of the bytes at most.
    real, foreseen = both(case, tmp_path)
    assert foreseen.bytes_read == pytest.approx(statistics.median(read for read, _ in real), rel=0.15)
    assert foreseen.bytes_written == pytest.approx(statistics.median(written for _, written in real), rel=0.15)


@pytest.mark.parametrize(
    ("update", "host"),
    some_of(
        [("auto", 6 * MIB)],
        [("auto", 4 * MIB), ("auto", 5 * MIB), ("auto", 8 * MIB), ("backward", 4 * MIB), ("forward", 4 * MIB)],
    ),
)
def test_where_updates_lag_it_is_near(update: str, host: int, tmp_path: Path) -> None:
    """By "auto" what may be undone is written before, and what rests (of 6 MiB one unit, of 8 two) is not."""
    real, foreseen = both(Case(update, "bfloat16", host, tied=False, look_ahead="auto"), tmp_path)
    assert foreseen.bytes_read == pytest.approx(statistics.median(read for read, _ in real), rel=0.4)
    assert foreseen.bytes_written == pytest.approx(statistics.median(written for _, written in real), rel=0.3)


@pytest.mark.parametrize("update", some_of(["auto"], ["step", "forward", "backward"]))
def test_what_fits_moves_nothing_in_either(update: str, tmp_path: Path) -> None:
    real, foreseen = both(Case(update, "bfloat16", 64 * MIB, tied=False, look_ahead="auto"), tmp_path)
    assert set(real) == {(0, 0)}
    assert (foreseen.bytes_read, foreseen.bytes_written) == (0, 0)


@pytest.mark.parametrize(("update", "share"), some_of([("backward", 0.3)], [("step", 0.7), ("forward", 0.5)]))
def test_beside_a_device_about_as_many_bytes_go_to_and_from_disk_as_the_plan_counts(
    update: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = plans_made(monkeypatch)
    model = tiny_llama()
    numel = sum(parameter.numel() for parameter in model.parameters())
    config = tiermem.Config(
        device="simulated",
        device_memory=3 * MIB // 2,  # three or four layers
        host_memory=int(share * 12 * numel) // 4096 * 4096,
        swap_dirs=[tmp_path],
        update=update,  # type: ignore[arg-type]
        tile_size="64KiB",
        io_backend="inline",
        commits=False,
    )
    with tiermem.offload(model, config, coalesce=0) as runtime:
        found = statistics.median(read + written for read, written in to_and_from_disk(trained(model, runtime)))
    # Host memory is in one piece, and for a place in it kept pages are written, too: up to 13 % was seen. This holds
    # the count against what happens; it does not show that the plan is why: next uses alone move a few percent more.
    assert found == pytest.approx(plans[-1].moved, rel=0.25)


BESIDE = replace(
    INSTANT,
    device=Device(
        memory=64 * MIB, flops={"bfloat16": 1e12, "float32": 1e12}, to_device=1e14, to_host=1e14, simulated=True
    ),
)
COUNTED = 3
LAYER_NBYTES = 2 * (4 * 128 * 128 + 3 * 128 * 344 + 2 * 128)  # attention, feed-forward, two norms, in bfloat16


def both_beside_a_device(
    update: str, device: int, host: int, update_on: str, directory: Path
) -> tuple[dict[str, float], dict[str, float], int]:
    """Bytes over each edge in three steps together, those that were foreseen, and how many units are settled."""
    config = tiermem.Config(
        device="simulated",
        device_memory=device,
        host_memory=host,
        swap_dirs=[directory],
        update=update,  # type: ignore[arg-type]
        update_on=update_on,  # type: ignore[arg-type]
        tile_size="64KiB",
        look_ahead=0,
        io_backend="inline",
        commits=False,
    )
    model = tiny_llama()
    work = workload_of(model, "small", batch=2, seq=16, batches=1, dtype="bfloat16")
    blueprint = draw(model, config, None)
    with tiermem.offload(model, config, coalesce=0) as runtime:
        steps = trained(model, runtime)
        list(islice(steps, 3))
        before = moved_at_rest(runtime)
        list(islice(steps, COUNTED))
        after = moved_at_rest(runtime)
    settings = PlanSettings(
        host_memory=host,
        device_memory=device,
        update=update,
        update_on=update_on,
        tile_nbytes=config.tile_nbytes,
        look_ahead=0,
    )
    design = make_design(work, BESIDE, settings)
    assert (design.footprint, design.device) == (blueprint.footprint, blueprint.device), "budgets are shared out alike"
    foreseen = simulate(design).edges
    real = {edge: float(after[edge] - before[edge]) for edge in EDGES}
    return real, {edge: COUNTED * foreseen.get(edge, 0.0) for edge in EDGES}, len(design.settled)


@pytest.mark.parametrize(
    ("update", "device", "settled"), some_of([("step", 64, 8), ("backward", 7, 2)], [("step", 7, 2), ("forward", 4, 1)])
)
def test_what_is_settled_on_a_device_and_what_is_not_move_as_foreseen(
    update: str, device: int, settled: int, tmp_path: Path
) -> None:
    real, foreseen, count = both_beside_a_device(update, device * MIB, 64 * MIB, "auto", tmp_path)
    assert count == settled
    # Device memory is in one piece and the simulated one is not: where it is tight, a layer's parameters may have to
    # go for a place of that size while others have room in pieces, and come again. Once in a step, and nothing else;
    # beside other work a layer less was moved once, in one of many runs: taken to have stayed where it was to go.
    again = real["host->device"] - foreseen["host->device"]
    assert abs(again) <= (COUNTED * LAYER_NBYTES if settled < 8 else 0)
    assert real == {**foreseen, "host->device": foreseen["host->device"] + again}
    assert (foreseen["host->device"] == 0) == (settled == 8), "of what is settled nothing moves, of the rest something"


@pytest.mark.parametrize(("update", "update_on"), some_of([("backward", "auto")], [("step", "host")]))
def test_and_to_and_from_disk_where_host_memory_is_small(update: str, update_on: str, tmp_path: Path) -> None:
    # Real memory is in one piece and the simulated one is not, so a few pages more have to make room; of the device's,
    # beside other work, more or less of them by at most a layer's parameters once in a step.
    real, foreseen, settled = both_beside_a_device(update, 7 * MIB, 3 * MIB, update_on, tmp_path)
    assert (settled > 0) == (update_on == "auto")
    assert real["swap->host"] == pytest.approx(foreseen["swap->host"], rel=0.1)
    assert real["host->swap"] == pytest.approx(foreseen["host->swap"], rel=0.2)
    assert abs(real["host->device"] - foreseen["host->device"]) <= COUNTED * LAYER_NBYTES


def is_small(name: str, parameter: torch.nn.Parameter) -> bool:
    return parameter.numel() <= 128 * 128


@pytest.mark.parametrize("units", [5, 80])
def test_what_is_kept_in_memory_by_choice_moves_in_neither(units: int, tmp_path: Path) -> None:
    """The budget of a run and of its simulation are shared out alike, and the simulation moves nothing that is kept."""
    shape = LlamaConfig(
        hidden_size=128, intermediate_size=344, num_hidden_layers=units, num_attention_heads=4, vocab_size=512
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(shape)
    work = workload_of(model, "small", batch=2, seq=16, batches=1, dtype="bfloat16", keep=is_small)
    kept = {number for number, unit in enumerate(work.units) if unit.kept}
    assert len(kept) == units + 1, "a part of each layer, and the last norm"
    host = 3 * MIB + units * 152 * 1024
    config = tiermem.Config(device="cpu", host_memory=host, swap_dirs=[tmp_path], tile_size="64KiB")
    design = make_design(work, INSTANT, PlanSettings(host_memory=host, tile_nbytes=config.tile_nbytes))
    assert design.footprint == draw(model, config, None, keeping=Keeping(is_small)).footprint
    assert design.kept_nbytes == sum(rounded(work.units[unit].numel * 2) for unit in kept)
    thin = thinned(design, 24)
    assert (len(thin.workload.units) < len(work.units)) == (units == 80)
    assert thin.settings.host_memory - thin.kept_nbytes <= host - design.kept_nbytes
    found = simulate(thin, with_plan=True)
    moved = {action.page.unit for action in found.plan.actions if action.page.kind is Kind.PARAM}
    assert moved, "others move"
    assert moved.isdisjoint(thin.kept)


@pytest.mark.parametrize("trained_part", ["layers.2", "q_proj", "lm_head", "norm", "embed"])
def test_backward_comes_to_no_frozen_layers_that_a_model_begins_with(trained_part: str, tmp_path: Path) -> None:
    """39 % more was foreseen to be read than was where the last layer and the head were trained."""

    def partly_frozen() -> nn.Module:
        model = tiny_llama()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained_part in name)
        return model

    work = workload_of(partly_frozen(), "test", batch=2, seq=16, batches=1, dtype="bfloat16")
    config = tiermem.Config(device="cpu", host_memory=64 * MIB, swap_dirs=[tmp_path], io_backend="inline")
    model = partly_frozen()
    with tiermem.offload(model, config, coalesce=0) as runtime:
        list(islice(trained(model, runtime), 2))
        accesses = runtime._house.scheduler.order.expected.accesses
        found, foreseen = Counter(accesses), Counter(work.step_order)
        assert not found - foreseen
        # What is frozen beside the first parameters that are trained may be foreseen once more than it is used.
        assert (foreseen - found).total() <= (trained_part in ("q_proj", "norm", "lm_head"))
    link = Link(rate=1e14, latency=0.0)
    for ranks in (1, 2):  # over ranks a gradient of what is frozen had no pages to come to
        design = make_design(work, replace(INSTANT, link=link), PlanSettings(host_memory=2 * MIB, ranks=ranks))
        assert simulate(design).seconds > 0
