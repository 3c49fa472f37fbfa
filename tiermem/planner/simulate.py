"""A training step in simulated time: seconds, stalls by cause, bytes over each edge, high-water marks.

Owns the run of a few simulated steps and the record of the steady ones. Does not know files, torch or threads.
Guarantees that the same design gives the same record, and that a step which cannot go on is a CapacityError.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tiermem.errors import CapacityError
from tiermem.planner.actors import ComputeActor, UpdateActor
from tiermem.planner.clock import Signal, carried_out
from tiermem.planner.design import Design
from tiermem.planner.exchanges import compute_actor
from tiermem.planner.world import Action, World
from tiermem.stats import StepStatistics, TierStatistics

# Steps are run until one moves as many bytes as the one before it, but for this share, and takes as long; the last two
# are what counts. Two that by chance move as much while memory still fills up were seen to differ by 5 % in seconds.
_STEADY, _AS_LONG = 0.01, 0.03
_MOST_STEPS = 6
_COUNTED = 2


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one steady step does, in order, and what it keeps in memory over its end."""

    actions: tuple[Action, ...]
    kept: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What some stretch of simulated time was spent on.

    Attributes:
        seconds: how long it is.
        phases: seconds of "forward", "backward" and "step".
        stalls: seconds in which the computation waited, by cause: "read", "write" (for room), "copy", "update kernel",
            "ranks" (what goes between them).
        computing, updating: seconds in which the computation, the update kernel ran.
        reading, writing: seconds in which the drives read, wrote.
        edges: bytes over each edge.
    """

    seconds: float
    phases: Mapping[str, float]
    stalls: Mapping[str, float]
    computing: float
    updating: float
    reading: float
    writing: float
    edges: Mapping[str, float]


def combined(one: Spent, other: Spent, number: Callable[[float, float], float]) -> dict[str, Any]:
    """The fields of a `Spent` of which each number is made of those of two; what a table lacks is zero."""
    found: dict[str, Any] = {}
    for name in [item.name for item in fields(Spent)]:
        first, second = getattr(one, name), getattr(other, name)
        if isinstance(first, Mapping):
            found[name] = {key: number(first.get(key, 0.0), second.get(key, 0.0)) for key in {**first, **second}}
        else:
            found[name] = number(first, second)
    return found


def mean_since(late: Spent, early: Spent, count: int) -> dict[str, Any]:
    """The fields of the mean of `count` equal parts of what was spent between two instants, by the sums up to them."""
    return combined(late, early, lambda after, before: (after - before) / count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation(Spent):
    """Means over the steady steps.

    Attributes:
        tiers: budget, bytes at the end, and high-water mark of each memory tier.
        plan: what the last step did; None if nobody asked.
        marks: what was spent since the simulation began, at the end of each batch of the last step that counts.
    """

    tiers: tuple[TierStatistics, ...]
    plan: StepPlan | None = None
    marks: tuple[Spent, ...] = field(default=(), compare=False, repr=False)

    @property
    def bytes_read(self) -> float:
        """Bytes from the drives in a step."""
        return self.edges.get("swap->host", 0.0)

    @property
    def bytes_written(self) -> float:
        """Bytes to the drives in a step."""
        return self.edges.get("host->swap", 0.0)

    @property
    def stall_seconds(self) -> float:
        """Seconds of a step in which the computation waited."""
        return sum(self.stalls.values())


def simulate(design: Design, *, with_plan: bool = False) -> Simulation:
    """Run the design's step until it is steady.

    Args:
        design: what to run.
        with_plan: also run one step more, and write down what it does and why.

    Raises CapacityError where a lease never gets its room.
    """
    return carried_out(simulating(design, with_plan=with_plan))


def simulating(design: Design, *, with_plan: bool = False) -> Generator[None, None, Simulation]:
    """As `simulate`, in small portions with pauses between them; it returns the simulation."""
    yield
    world = World(design)
    compute = compute_actor(world, UpdateActor(world))
    steps: list[StepStatistics] = []
    marks: list[Spent] = []
    compute.batch_ended = lambda: marks.append(_spent(world, compute))
    totals = [_spent(world, compute)]
    while len(steps) < _MOST_STEPS and not _is_steady(steps):
        marks.clear()
        yield from _run_step(world, compute)
        steps.append(world.counters.step())
        totals.append(_spent(world, compute))
    counted = tuple(marks)
    actions: list[Action] = []
    if with_plan:
        world.listen(actions.append)
        yield from _run_step(world, compute)
    world.residency.check_invariants()
    return Simulation(
        **mean_since(totals[-1], totals[-1 - _COUNTED], _COUNTED),
        tiers=tuple(
            TierStatistics(tier.name, arena.capacity, arena.reserved, arena.high_water)
            for tier, arena in sorted(world.residency.chain.arenas.items())
        ),
        plan=StepPlan(tuple(actions), _kept(world)) if with_plan else None,
        marks=counted,
    )


def _is_steady(steps: list[StepStatistics]) -> bool:
    if len(steps) <= _COUNTED:
        return False
    moved = [sum(edge.nbytes for edge in step.edges) for step in steps[-2:]]
    seconds = [step.seconds for step in steps[-2:]]
    as_much = max(moved) - min(moved) <= _STEADY * max(moved)
    return as_much and max(seconds) - min(seconds) <= _AS_LONG * max(seconds)


def _run_step(world: World, compute: ComputeActor) -> Generator[None, None, None]:
    ended = Signal()

    def process() -> Generator[Signal, None, None]:
        yield from compute.step()
        world.clock.fire(ended)

    world.clock.start(process())
    if not (yield from world.clock.running_until(ended)):
        waiting = [page.key for request in world.service.waiting for page in request.lacking]
        raise CapacityError(f"the simulated step stands still; waited for: {', '.join(map(str, waiting[:8]))}")


def _spent(world: World, compute: ComputeActor) -> Spent:
    (computing, updating), (reading, writing) = world.cores.busy, world.drive.busy
    return Spent(
        seconds=world.clock.now,
        phases=dict(compute.phases),
        stalls=dict(world.stalls),
        computing=computing,
        updating=updating,
        reading=reading,
        writing=writing,
        edges={edge.name: float(edge.nbytes) for edge in world.counters.snapshot().total.edges},
    )


def _kept(world: World) -> dict[str, int]:
    """Bytes of each kind in each memory tier at the end of the step."""
    kept: dict[str, int] = {}
    for page in world.residency.pages.values():
        for tier in page.valid & set(page.frames):
            name = f"{page.key.kind.value} in {tier.name.lower()}"
            kept[name] = kept.get(name, 0) + page.nbytes
    return kept
