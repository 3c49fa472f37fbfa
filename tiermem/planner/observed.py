"""What a run's own timeline says about its steps, and the design of such a step.

Owns the way from recorded events to seconds by unit, kernel seconds and bandwidths. Does not record anything, and knows
events only as `tiermem.timeline` and their lanes tell. Guarantees that a stall is counted as nobody's computation, and
that what a step of this kind cannot be simulated for is a ConfigError that says so.

Rates are as they were seen: beside whatever else ran at that time. So nothing is taken to slow anything else down in
the design; how much computation and kernel hindered each other is in their seconds already.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from tiermem.errors import ConfigError
from tiermem.planner.design import Design, UnitTimes
from tiermem.planner.footprint import Footprint, UnitSize
from tiermem.planner.lines import DriveSpeed
from tiermem.planner.settings import PlanSettings
from tiermem.planner.workload import UnitWork, Workload, itemsize, state_itemsize
from tiermem.stats import READ_EDGE, WRITE_EDGE
from tiermem.timeline import COMPUTE_LANE, STALL, STEP_LANE, UPDATE_LANE, Event
from tiermem.zero3.order import Access, Phase

Runs = Mapping[int, Sequence[tuple[int, int]]]

# A bandwidth seen in less than this share of the time in which bytes moved is not believed.
_SEEN = 0.05
# How much bandwidths are drawn to their mean, as a share; and how many times it they may be.
_DRAWN, _APART = 0.1, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The mean of some steps.

    Attributes:
        forward, backward: seconds in which a unit was computed, by its number, without stalls.
        elsewhere: seconds in no unit and no stall.
        updating: seconds of update kernels.
        read, write, mixed: bytes a second while only reads, only writes, both were in flight; 0: nothing moved.
    """

    forward: Mapping[int, float]
    backward: Mapping[int, float]
    elsewhere: float
    updating: float
    read: float
    write: float
    mixed: float


def observe(events: Sequence[Event], most: int) -> Observed:
    """The last `most` steps of which all events are there. Raises ConfigError if there is none."""
    steps = whole_steps(events, most)
    if not steps:
        raise ConfigError("a step has more events than are kept")
    begin, end, count = steps[0].start, steps[-1].end, len(steps)
    within = [each for each in events if begin <= each.start and each.end <= end]
    computed = [each for each in within if each.lane == COMPUTE_LANE and each.name != STALL]
    stalls = [each for each in within if each.lane == COMPUTE_LANE and each.name == STALL]
    by_phase, outside = _without_stalls(computed, stalls)
    busy = sum(_length(each) for each in computed) + outside
    reads, writes = ([each for each in within if each.lane == edge] for edge in (READ_EDGE, WRITE_EDGE))
    read, write, mixed = bandwidths(reads, writes)
    return Observed(
        forward={unit: seconds / count for unit, seconds in by_phase[Phase.FORWARD].items()},
        backward={unit: seconds / count for unit, seconds in by_phase[Phase.BACKWARD].items()},
        elsewhere=max(0.0, (end - begin - busy) / count),
        updating=sum(_length(each) for each in within if each.lane == UPDATE_LANE) / count,
        read=read,
        write=write,
        mixed=mixed,
    )


def whole_steps(events: Sequence[Event], most: int) -> list[Event]:
    """The last `most` steps of which all events are there; these are in the order of their ends, the newest ones."""
    return [each for each in events if each.lane == STEP_LANE and each.start >= events[0].end][-most:]


def _length(event: Event) -> float:
    return event.end - event.start


def _without_stalls(computed: list[Event], stalls: Iterable[Event]) -> tuple[dict[Phase, Counter[int]], float]:
    """Seconds of each unit without the stalls inside its spans, and those of the stalls in no span."""
    computed.sort(key=lambda each: each.start)
    starts = [each.start for each in computed]
    seconds: dict[Phase, Counter[int]] = {Phase.FORWARD: Counter(), Phase.BACKWARD: Counter()}

    def add(span: Event, difference: float) -> None:
        phase = Phase.FORWARD if span.name.startswith(Phase.FORWARD.value) else Phase.BACKWARD
        seconds[phase][int(str(span.details["unit"]))] += difference  # type: ignore[assignment]

    for span in computed:
        add(span, _length(span))
    outside = 0.0
    for stall in stalls:
        index = bisect_right(starts, stall.start) - 1
        if index >= 0 and stall.start < computed[index].end:
            add(computed[index], -_length(stall))
        else:
            outside += _length(stall)
    return seconds, outside


def bandwidths(reads: Iterable[Event], writes: Iterable[Event]) -> tuple[float, float, float]:
    """Bytes a second while only reads, only writes, both were in flight; zeros where nothing was.

    A transfer's bytes are taken to have moved evenly over its time. What was hardly seen is taken from the others.
    """
    turns: list[tuple[float, int, int, float]] = []
    for way, moves in enumerate((reads, writes)):
        for move in moves:
            if move.end > move.start:
                rate = float(str(move.details["bytes"])) / _length(move)
                turns += [(move.start, way, 1, rate), (move.end, way, -1, -rate)]
    flying, rates, before = [0, 0], [0.0, 0.0], 0.0
    nbytes, seconds = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]  # reads alone, writes alone, both
    for moment, way, difference, rate in sorted(turns):
        if any(flying):
            kind = 2 if all(flying) else 0 if flying[0] else 1
            nbytes[kind] += (moment - before) * sum(rates)
            seconds[kind] += moment - before
        flying[way] += difference
        rates[way] = rates[way] + rate if flying[way] else 0.0
        before = moment
    total = sum(seconds)
    if not total:
        return 0.0, 0.0, 0.0
    read, write, mixed = (
        moved / taken if taken >= _SEEN * total else 0.0 for moved, taken in zip(nbytes, seconds, strict=True)
    )
    alone = [rate for rate in (read, write) if rate]
    mixed = mixed or sum(alone) / max(1, len(alone))
    return read or mixed, write or mixed, mixed


def bandwidths_by_stretch(reads: Iterable[Event], writes: Iterable[Event]) -> tuple[float, float, float]:
    """As `bandwidths`, from all the bytes of each stretch of time in which something was in flight.

    A transfer that waits for others while both ways are busy, and ends alone, has a low rate over its whole time, which
    `bandwidths` takes for the rate alone. Here nothing is taken of when a transfer's bytes moved: the three bandwidths
    are those that explain the bytes of the stretches best (least squares), drawn towards their mean by `_DRAWN` of what
    was seen, for stretches may be much alike.
    """
    turns: list[tuple[float, int, int, float]] = []
    for way, moves in enumerate((reads, writes)):
        for move in moves:
            if move.end > move.start:
                turns += [(move.start, 1, way, 0.0), (move.end, -1, way, float(str(move.details["bytes"])))]
    stretches, flying, before = [np.zeros(4)], [0, 0], 0.0
    for moment, difference, way, nbytes in sorted(turns):  # an end before a beginning at the same time
        if any(flying):
            stretches[-1][2 if all(flying) else 0 if flying[0] else 1] += moment - before
        flying[way] += difference
        stretches[-1][3] += nbytes
        before = moment
        if not any(flying):
            stretches.append(np.zeros(4))
    seconds, arrived = np.hsplit(np.array(stretches), [3])
    total = seconds.sum()
    mean = float(arrived.sum() / total) if total else 0.0
    if not mean:
        return 0.0, 0.0, 0.0
    drawn = np.diag(_DRAWN * seconds.sum(axis=0) * total / len(turns) + 1e-12 * total**2)
    found = np.linalg.solve(seconds.T @ seconds + drawn, seconds.T @ arrived[:, 0] + drawn @ np.full(3, mean))
    read, write, mixed = (float(rate) for rate in np.clip(found, mean / _APART, mean * _APART))
    return read, write, mixed


def one_batch(accesses: Sequence[Access]) -> tuple[tuple[Access, ...], int]:
    """The order of one batch, and how many of them make a step of these accesses: see `Workload.step_order`.

    Raises ConfigError where a unit's gradient comes in several parts, which is not simulated.
    """
    for batches in range(accesses.count(accesses[0]), 0, -1) if accesses else ():
        order = tuple(accesses[: len(accesses) // batches])
        if order * batches == tuple(accesses):
            gradients = [access for access in order if access.phase is Phase.GRADIENT]
            if len(set(gradients)) < len(gradients):
                raise ConfigError("the gradient of a unit arrives in several parts")
            return order, batches
    return tuple(accesses), 1


def observed_design(
    observed: Observed,
    accesses: Sequence[Access],
    units: Sequence[UnitSize],
    settings: PlanSettings,
    footprint: Footprint,
    *,
    types: tuple[str, str],
    runs: Runs = MappingProxyType({}),
) -> Design:
    """The design of a step like those observed, alone and without a device.

    Args:
        observed: the steps.
        accesses: what each of them did.
        units: all units, by number.
        settings: budget, update schedule, how the drive is asked.
        footprint: how the budget is shared out.
        types: of parameters, of moments.
        runs: of each unit, where the gradients lie that arrive, in that order; see `UnitWork`.

    Raises ConfigError where nothing was moved or updated, or the step is of a kind that is not simulated.
    """
    order, batches = one_batch(accesses)
    trained = sum(unit.trainable_numel for unit in units)
    if not observed.read or not observed.updating or not trained:
        raise ConfigError("nothing is moved or updated")
    calls = Counter(accesses)
    times, unseen = [], observed.elsewhere
    for number in range(len(units)):
        both = []
        for phase, seconds in ((Phase.FORWARD, observed.forward), (Phase.BACKWARD, observed.backward)):
            count, taken = calls[Access(number, phase)], seconds.get(number, 0.0)
            both.append(taken / count if count else 0.0)
            unseen += 0.0 if count else taken
        times.append(UnitTimes(both[0], both[1], 0.0, 0.0))
    works = [_work(unit, types, runs.get(number, ())) for number, unit in enumerate(units)]
    return Design(
        workload=Workload("observed", tuple(works), order, 1, batches, types[0], types[1]),
        settings=settings,
        footprint=footprint,
        times=tuple(times),
        update_seconds=observed.updating / trained,
        drive=DriveSpeed(
            read=observed.read,
            write=observed.write,
            mixed=observed.mixed,
            latency=0.0,
            depth=settings.queue_depth,
            block=settings.block_size,
        ),
        wires=None,
        slower=(0.0, 0.0, 0.0, 0.0),
        lease_seconds=0.0,
        step_seconds=unseen,
    )


def _work(unit: UnitSize, types: tuple[str, str], runs: Sequence[tuple[int, int]]) -> UnitWork:
    numel = unit.param_nbytes // itemsize(types[0])
    # Where they lie is not known here, how many there are is enough.
    wide = unit.trainable_numel if unit.state_itemsize > state_itemsize(*types) else unit.wide_numel
    exact = ((0, wide),) if wide else ()
    return UnitWork(unit.name, numel, unit.trainable_numel, 0.0, kept=unit.kept, runs=tuple(runs), exact=exact)
