"""Which units are updated behind backward, though others are updated under it, because their pages can stay in memory.

Owns the choice, from sizes and the way a budget is shared out. Does not know pages, ranks or when anything happens.
Guarantees that what it chooses fits into host memory from step to step beside everything in use, and nothing where
updates are to wait for the computation anyway.

Why. An update that may have to be undone needs the old bytes in SWAP: a page that only memory has is written there
before (`optim/README.md`, "What taking back costs"). For pages that have to leave in every step that is nothing more;
for those that can stay it is a write a step for nothing. So these wait for the step, and are updated under the next
forward. They are the first units of the model: their gradients come last in backward, where their update has little to
hide behind.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from tiermem.planner.footprint import Footprint, UnitSize, rounded


def resting_units(units: Sequence[UnitSize], footprint: Footprint, elsewhere: Container[int] = ()) -> tuple[int, ...]:
    """The units whose pages are to stay in host memory over a whole step, by number; from the first on.

    `elsewhere`: units that take no host memory, because they are settled on a device.
    """
    if footprint.serial:
        return ()
    # What the plan of what stays leaves besides: see `pager.ahead.Ahead.make_plan`.
    free = footprint.passing - footprint.look_ahead - 2 * footprint.reserve - footprint.lead
    found = []
    for number, unit in enumerate(units):
        if not unit.trainable_numel or number in elsewhere:
            continue
        free -= _resting_nbytes(unit)
        if free < 0:
            break
        found.append(number)
    return tuple(found)


def _resting_nbytes(unit: UnitSize) -> int:
    """Bytes of a unit's parameters (those kept by choice are there anyway), gradients and state."""
    states = unit.trainable_numel * unit.state_itemsize + unit.wide_numel * unit.wide_itemsize
    parameters = 0 if unit.kept else rounded(unit.param_nbytes)
    return parameters + rounded(states) + rounded(unit.trainable_numel * unit.grad_itemsize)
