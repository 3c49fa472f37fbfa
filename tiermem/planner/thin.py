"""A long step seen through two short ones: fewer of its equal units, and the straight line through both.

Owns which units repeat, the design of a step with fewer of them, and the drawing of the line. Does not simulate.
Guarantees that every unit, tile and request that is left has its real size, that what is in use at one time has as many
bytes as in the whole step, that of the rest of the budget and of the states the same share is left, and that what grows
by the same amount with each unit comes out exactly.

Why a line: after its first few units a step of equal units does the same for each of them, so seconds and bytes
grow with their number by a constant amount; what the ends of a step and the pages in use cost is there in both short
steps, and so in the line. What is lost: what happens once in many units (a write that is late every hundredth unit is
late in none of seventy), and how units that differ in seconds are mixed, since one repetition's are taken for equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tiermem.memory.arena import rounded
from tiermem.pager.page import Kind
from tiermem.planner.design import Design, UnitTimes
from tiermem.planner.device import EXPOSED, DeviceFootprint, leased_nbytes
from tiermem.planner.parts import unit_sizes
from tiermem.planner.simulate import Simulation, combined
from tiermem.planner.workload import UnitWork, Workload
from tiermem.stats import TierStatistics
from tiermem.zero3.order import Phase

# A repetition is of at most so many units (attention and feed-forward apart, say), and comes at least so many times.
_LONGEST_BLOCK, _FEWEST_TIMES = 4, 4
# Of each repetition so many are left at least: one has a neighbour then.
_LEAST_LEFT = 2

Alike = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class Repetition:
    """`units`, in the order of forward: `times` blocks of `block` units that are alike from block to block."""

    units: tuple[int, ...]
    block: int

    @property
    def times(self) -> int:
        """How many blocks there are."""
        return len(self.units) // self.block


def repetitions(workload: Workload) -> list[Repetition]:
    """Units that come again and again in the order of forward, each unit in one repetition at most."""
    phases: dict[int, list[Phase]] = {unit: [] for unit in range(len(workload.units))}
    for access in workload.order:
        phases[access.unit].append(access.phase)

    def alike(one: int, other: int) -> bool:
        return phases[one] == phases[other] and _alike(workload.units[one], workload.units[other])

    forward = list(dict.fromkeys(access.unit for access in workload.order if access.phase is Phase.FORWARD))
    found, begin = [], 0
    while begin < len(forward):
        best = max(_candidates(forward, begin, alike), key=_covered)
        if best.times >= _FEWEST_TIMES:
            found.append(best)
            begin += len(best.units)
        else:
            begin += 1
    return found


def _candidates(forward: Sequence[int], begin: int, alike: Alike) -> Iterator[Repetition]:
    """What repeats from `begin` on, by blocks of each length, shortest first; nothing after one that covers all."""
    for block in range(1, _LONGEST_BLOCK + 1):
        found = _repeated(forward, begin, block, alike)
        yield found
        if found.times >= _FEWEST_TIMES and begin + len(found.units) == len(forward):
            return


def _covered(repetition: Repetition) -> tuple[int, int]:
    """The most units; of as many, the shortest block."""
    return (len(repetition.units) if repetition.times >= _FEWEST_TIMES else 0), -repetition.block


def _repeated(forward: Sequence[int], begin: int, block: int, alike: Alike) -> Repetition:
    end = begin + block
    while end < len(forward) and alike(forward[begin + (end - begin) % block], forward[end]):
        end += 1
    return Repetition(tuple(forward[begin : begin + (end - begin) // block * block]), block)


def _alike(one: UnitWork, other: UnitWork) -> bool:
    sizes = abs(one.numel - other.numel) <= 1 and abs(one.trainable - other.trainable) <= 1
    return sizes and one.kept == other.kept and one.exact == other.exact


def thinned(design: Design, most: int) -> Design:
    """The same step with about `most` units; the design itself where it has no more, or nothing in it repeats."""
    workload = design.workload
    if len(workload.units) <= most:
        return design
    found = repetitions(workload)
    repeated = sum(len(repetition.units) for repetition in found)
    room = max(0, most - (len(workload.units) - repeated))
    gone: set[int] = set()
    times = list(design.times)
    for repetition in found:
        left = min(repetition.times, max(_LEAST_LEFT, round(repetition.times * room / repeated)))
        gone.update(repetition.units[left * repetition.block :])
        for place in range(repetition.block):
            alike = repetition.units[place :: repetition.block]
            mean = _mean([design.times[unit] for unit in alike])
            for unit in alike:
                times[unit] = mean
    if not gone:
        return design
    return _without(design, gone, times)


def _mean(times: Sequence[UnitTimes]) -> UnitTimes:
    """Measured units that are alike still differ in their seconds."""
    names = [item.name for item in dataclasses.fields(UnitTimes)]
    return UnitTimes(**{name: sum(getattr(each, name) for each in times) / len(times) for name in names})


def _without(design: Design, gone: set[int], times: Sequence[UnitTimes]) -> Design:
    """The design without some units, and without their share of the budgets."""
    workload = design.workload
    kept = [unit for unit in range(len(workload.units)) if unit not in gone]
    numbers = {unit: number for number, unit in enumerate(kept)}
    order = tuple(replace(each, unit=numbers[each.unit]) for each in workload.order if each.unit in numbers)
    fewer = replace(workload, units=tuple(workload.units[unit] for unit in kept), order=order)
    thin = replace(design, workload=fewer, times=tuple(times[unit] for unit in kept))
    trained = _trained(thin)
    thin = replace(thin, resting=tuple(trained[: len(design.resting) * len(trained) // max(1, len(_trained(design)))]))
    # What is kept by choice takes its bytes, whatever the rest of the budget does.
    stays, left = design.kept_nbytes, thin.kept_nbytes
    shared = design.settings.host_memory - stays
    host = left + _less(shared, _in_use(design), design.nbytes(*_HOST) - stays, thin.nbytes(*_HOST) - left)
    thin = replace(thin, settings=replace(design.settings, host_memory=host))
    return thin if design.device is None else _with_less_device(thin, design, design.device)


def _with_less_device(thin: Design, design: Design, device: DeviceFootprint) -> Design:
    """`thin` with the share of the device's memory that `design` has, and as large a part of its units settled there.

    What is settled takes its bytes, as what is kept in host memory does.
    """
    whole, part = design.nbytes(*_DEVICE), thin.nbytes(*_DEVICE)
    trained, of = _could_settle(thin), len(_could_settle(design))
    count = len(design.settled) * len(trained) // max(1, of)
    less = replace(device, settled=tuple(trained[: max(count, min(EXPOSED, len(design.settled)))]))
    thin = replace(thin, device=less)
    taken, left = _settled_nbytes(design), _settled_nbytes(thin)
    shared, whole, part = device.nbytes - taken[0], whole - taken[1], part - left[1]
    rest = _less(shared, min(shared, _on_device(design)), whole, part) if whole > 0 and part > 0 else shared
    return replace(thin, device=replace(less, nbytes=left[0] + rest))


def _trained(design: Design) -> list[int]:
    return [unit for unit, work in enumerate(design.workload.units) if work.trainable]


def _could_settle(design: Design) -> list[int]:
    return [unit for unit, work in enumerate(design.workload.units) if work.trainable and not work.kept]


def _settled_nbytes(design: Design) -> tuple[int, int]:
    """Bytes of what is settled on the device: all of it, and without the states."""
    settled = (page for unit in design.settled for page in design.pages_of(unit))
    pages = [(key, rounded(nbytes)) for key, nbytes in settled if key.kind in _HOST]
    return sum(nbytes for _, nbytes in pages), sum(nbytes for key, nbytes in pages if key.kind in _DEVICE)


_HOST = (Kind.PARAM, Kind.GRAD, Kind.STATE)
_DEVICE = (Kind.PARAM, Kind.GRAD)


def _less(budget: int, in_use: int, whole: int, part: int) -> int:
    """What of a budget is for `part` of `whole` bytes: what is in use, and of the rest as large a share.

    What is in use counts the less the more of the whole the budget holds: what fits, or nearly does, still does.
    """
    share, held = part / whole, min(1.0, budget / whole)
    wanted = budget * share + in_use * (1 - held) * (1 - share)
    return min(budget, rounded(int(max(wanted, min(in_use, part)))))


def _in_use(design: Design) -> int:
    """Bytes of host memory that computation, update and read-ahead have in hand at one time."""
    footprint, shared = design.footprint, design.settings.host_memory - design.kept_nbytes
    # What passes does so beside one tile of the update, which has `depth`; two more arrive and leave.
    tiles = (footprint.depth - 1 + 2) * footprint.reserve
    return min(shared, shared - footprint.passing + tiles + footprint.look_ahead + footprint.lag)


def _on_device(design: Design) -> int:
    """Bytes of the device that the computation has in hand at one time."""
    workload = design.workload
    if design.several:
        sizes = unit_sizes(workload, design.settings.division)
        return leased_nbytes(sizes, design.footprint.tile_numel, roomy=design.beside)
    return max(
        2 * rounded(unit.numel * workload.itemsize) + rounded(unit.trainable * workload.itemsize)
        for unit in workload.units
    )


def drawn_out(
    short: tuple[Design, Simulation],
    longer: tuple[Design, Simulation],
    whole: Design,
) -> Simulation:
    """What the simulation of `whole` would say, on the line through two of the same step with fewer units.

    What the plan does is that of the longer one.
    """
    at = [float(design.workload.parameters) for design in (short[0], longer[0], whole)]
    reach = (at[2] - at[0]) / (at[1] - at[0])

    def number(one: float, other: float) -> float:
        return max(0.0, one + (other - one) * reach)

    one, other = short[1], longer[1]
    return Simulation(
        **combined(one, other, number),
        tiers=tuple(_tiers(one.tiers, other.tiers, whole, number)),
        plan=other.plan,
    )


Number = Callable[[float, float], float]


def _tiers(
    one: Sequence[TierStatistics], other: Sequence[TierStatistics], whole: Design, number: Number
) -> Iterator[TierStatistics]:
    budgets = {"HOST": whole.settings.host_memory, "DEVICE": whole.device_budget}
    for first, second in zip(one, other, strict=True):
        budget = budgets[first.name] or second.budget
        reserved = min(budget, round(number(first.reserved, second.reserved)))
        high_water = min(budget, round(number(first.high_water, second.high_water)))
        yield TierStatistics(first.name, budget, reserved, max(reserved, high_water))
