"""A machine that was not measured, models described by their units, a simulation and a training one step at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from doubles_models import small_llama
from hypothesis import strategies as st
from torch import nn

import tiermem
from tiermem.errors import BudgetError
from tiermem.memory.arena import rounded
from tiermem.pager.ahead import Ahead
from tiermem.pager.forecast import Forecast
from tiermem.pager.page import Lane
from tiermem.pager.plan import Plan
from tiermem.planner.actors import Steps, UpdateActor
from tiermem.planner.clock import Signal, carried_out
from tiermem.planner.exchanges import compute_actor
from tiermem.planner.footprint import UnitSize, plan_footprint
from tiermem.planner.machine import Drive, Host, Machine
from tiermem.planner.workload import UnitWork, Workload, order_of
from tiermem.planner.world import World
from tiermem.stats import StepStatistics

MACHINE = Machine(
    name="test",
    source="described for a test",
    host=Host(
        flops={"bfloat16": 1e12, "float32": 5e11},
        update_rate={"bfloat16": 1e9, "float32": 2e9},
        compute_beside_update=0.5,
        update_beside_compute=0.3,
    ),
    drive=Drive(read=2e9, write=1.5e9, mixed=1.2e9),
)

MIB = 1 << 20

EDGES = ("host->device", "device->host", "swap->host", "host->swap")

# As the inline backend: a transfer has ended when it was started.
INSTANT = Machine(
    name="test",
    source="described for a test",
    host=Host(flops={"bfloat16": 1e12, "float32": 1e12}, update_rate={"bfloat16": 1e9, "float32": 1e9}),
    drive=Drive(read=1e14, write=1e14, mixed=1e14, latency=0.0),
)


@st.composite
def unit_sizes(draw: st.DrawFn) -> UnitSize:
    itemsize = draw(st.sampled_from([2, 4]))
    trainable = draw(st.one_of(st.just(0), st.integers(1, 10_000), st.integers(1, 50_000_000)))
    frozen = draw(st.integers(0 if trainable else 1, 5_000_000))
    return UnitSize(
        name=f"unit {draw(st.integers(0, 99))}",
        param_nbytes=(trainable + frozen) * itemsize,
        trainable_numel=trainable,
        grad_itemsize=itemsize,
        state_itemsize=draw(st.sampled_from([3, 5, 8, 10, 12])),
        nested_nbytes=rounded(draw(st.integers(0, 50 * MIB))),
        wide_numel=draw(st.integers(0, trainable)),
        wide_itemsize=draw(st.sampled_from([0, 5])),
    )


MODELS = st.lists(unit_sizes(), min_size=1, max_size=6)
TILES = st.sampled_from([1, 4096, MIB, 16 * MIB])


def least_of(units: list[UnitSize]) -> int:
    with pytest.raises(BudgetError) as caught:
        plan_footprint(units, 0, MIB)
    return int(str(caught.value).split("at least ")[1].split()[0])


def workload(numels: list[int], *, tokens: int = 256, batches: int = 1, dtype: str = "bfloat16") -> Workload:
    """A chain of units; the first has no gradient to hand on."""
    units = tuple(UnitWork(f"unit {n}", numel, numel, 2.0 * numel * tokens) for n, numel in enumerate(numels))
    order = order_of([(number, number > 0) for number in range(len(numels))])
    return Workload("test", units, order, tokens, batches, dtype)


def run_steps(world: World, count: int) -> list[StepStatistics]:
    """What happened in each of the next steps."""
    compute, steps = compute_actor(world, UpdateActor(world)), []
    for _ in range(count):
        ended = Signal()

        def process(ended: Signal = ended) -> Steps:
            yield from compute.step()
            world.clock.fire(ended)

        world.clock.start(process())
        assert carried_out(world.clock.running_until(ended)), "a design that was accepted does not stand still"
        steps.append(world.counters.step())
    return steps


def trained(model: nn.Module, runtime: tiermem.Runtime, *, batches: int = 1) -> Iterator[StepStatistics]:
    """Train a language model of 512 words; yields what was counted in each step, behind it."""
    optimizer = tiermem.AdamW(model.parameters())
    while True:
        for _ in range(batches):
            tokens = torch.randint(512, (2, 16))
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        last = runtime.statistics().last
        assert last is not None
        yield last


def steps_gone(forecast: Forecast) -> list[float]:
    """How far the computation is believed to have come in each step from now on, in steps, where it ends."""
    gone: list[float] = []
    begin_step = forecast.begin_step

    def noted() -> bool:
        assert forecast._schedule is not None
        gone.append(forecast._lanes[Lane.COMPUTE].cursor / forecast._schedule.period - forecast._step)
        return begin_step()

    forecast.begin_step = noted  # type: ignore[method-assign]
    return gone


def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The pager's plans, from now on; the list grows with them."""
    plans: list[Plan] = []
    make_plan = Ahead.make_plan

    def noted(ahead: Ahead, *arguments: Any) -> Plan:
        plans.append(make_plan(ahead, *arguments))
        return plans[-1]

    monkeypatch.setattr(Ahead, "make_plan", noted)
    return plans


def tiny_llama(*, tied: bool = False, layers: int = 5) -> nn.Module:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"width": 128, "mlp_width": 344, "layers": layers, "heads": 4, "key_value_heads": 4}
    return small_llama(words=512, **shape, tie_word_embeddings=tied, use_cache=False)


def moved_at_rest(runtime: tiermem.Runtime) -> Counter[str]:
    """Bytes moved over each edge so far, when no update is left and nothing moves.

    A step is closed while its last gradients are on their way down and the next step's parameters on their way up, so
    what is counted in one step is, by a unit or several, in one run this step's and in the next run the next one's.
    """
    runtime.settle()
    pager = runtime._house.storage.pager
    core, at_rest = pager._core, 0
    for _ in range(10_000):
        # Behind each call the pager may start moves; behind one that finds none it has nothing more to start.
        busy = pager._loop.call(lambda: core.residency.moves + core._kernels + len(core.service.waiting))
        at_rest = 0 if busy else at_rest + 1
        if at_rest == 2:
            total = runtime.statistics().total
            return Counter({edge: total.edge(edge).nbytes for edge in EDGES})
        time.sleep(0.001 * bool(busy))
    raise AssertionError(f"{busy} moves, kernels and requests after ten seconds without a step")
