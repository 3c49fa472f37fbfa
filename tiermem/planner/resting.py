"""Which units are updated after backward, though others are updated under it, because their pages can stay in memory.

Owns the choice, from sizes and budgets. Does not know pages, ranks or when anything happens. Guarantees that what it
chooses takes no more than a given part of host memory, and is nothing where the budget has room for no more than what
is in use, or where updates are to wait for the computation anyway.

Why. An update that may have to be undone needs the old bytes in SWAP: a page that only memory has is written there
before (`optim/README.md`, "What taking back costs"), and its gradient waits to the end of backward. For pages that have
to leave in every step that is nothing more; for those that can stay it is a write a step for nothing. So these wait for
the step, and are updated under the next forward. They are the first units of the model, without any that is too large:
their gradients come last in backward, where their update has little to hide behind.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from tiermem.memory.arena import rounded
from tiermem.planner.footprint import Footprint, UnitSize

# Of the host budget, for what rests. A unit that rests and does not fit after all moves as in "forward", which costs
# less than the write of one that could have stayed: README.md, "What rests".
_SHARE = 1.1


def resting_units(
    units: Sequence[UnitSize], footprint: Footprint, budget: int, elsewhere: Container[int] = ()
) -> tuple[int, ...]:
    """The units whose pages are to stay in host memory over a whole step, by number.

    `budget`: of host memory, bytes; `elsewhere`: units that take none of it, because they are settled on a device.
    """
    # What the plan of what stays leaves besides: see `pager.ahead.Ahead.make_plan`.
    in_use = footprint.look_ahead + 2 * footprint.reserve + footprint.lead
    if footprint.serial or footprint.passing <= in_use:
        return ()
    free = int(_SHARE * budget) - sum(rounded(unit.param_nbytes) for unit in units if unit.kept)
    found = []
    for number, unit in enumerate(units):
        nbytes = resting_nbytes(unit)
        if unit.trainable_numel and number not in elsewhere and nbytes <= free:
            free -= nbytes
            found.append(number)
    return tuple(found)


def resting_nbytes(unit: UnitSize) -> int:
    """Bytes of a unit's parameters (those kept by choice are there anyway), gradients and state."""
    states = unit.trainable_numel * unit.state_itemsize + unit.wide_numel * unit.wide_itemsize
    parameters = 0 if unit.kept else rounded(unit.param_nbytes)
    return parameters + rounded(states) + rounded(unit.trainable_numel * unit.grad_itemsize)
