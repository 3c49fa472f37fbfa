"""A machine that was not measured, models described by their units, and a simulation one step at a time."""

from __future__ import annotations

from tiermem.planner.actors import ComputeActor, Steps, UpdateActor
from tiermem.planner.clock import Signal
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


def workload(numels: list[int], *, tokens: int = 256, batches: int = 1, dtype: str = "bfloat16") -> Workload:
    """A chain of units; the first has no gradient to hand on."""
    units = tuple(UnitWork(f"unit {n}", numel, numel, 2.0 * numel * tokens) for n, numel in enumerate(numels))
    order = order_of([(number, number > 0) for number in range(len(numels))])
    return Workload("test", units, order, tokens, batches, dtype)


def run_steps(world: World, count: int) -> list[StepStatistics]:
    """What happened in each of the next steps."""
    compute, steps = ComputeActor(world, UpdateActor(world)), []
    for _ in range(count):
        ended = Signal()

        def process(ended: Signal = ended) -> Steps:
            yield from compute.step()
            world.clock.fire(ended)

        world.clock.start(process())
        assert world.clock.run_until(ended), "a design that was accepted does not stand still"
        steps.append(world.counters.step())
    return steps
