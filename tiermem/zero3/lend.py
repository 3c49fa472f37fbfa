"""Real storage for a while, outside of forward and backward.

Owns the borrowing of whole units by the user: to look, to write, to keep. Does not know hooks or optimizer state.
Guarantees that a written parameter is reported, so that its master can follow, and that placeholders return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from tiermem.errors import CapacityError
from tiermem.interrupts import empty_all_frames
from tiermem.zero3.engine import outside_inference
from tiermem.zero3.gather import Gatherer, Presence
from tiermem.zero3.layout import Slot, UnitLayout
from tiermem.zero3.looks import sum_of_bits, written_unasked

Written = Callable[[int, Slot, torch.Tensor], None]


@contextmanager
def lend(
    gatherer: Gatherer,
    layouts: Sequence[UnitLayout],
    units: Sequence[int],
    *,
    needed: Callable[[int], None],
    written: Written | None = None,
    watched: bool = False,
) -> Iterator[None]:
    """Gather `units` for the body; all of them are in memory together.

    `needed(unit)` is called before, and waits for updates. With `written` the body may write: afterwards it is called
    with (unit, slot, values: 1-D in memory order, the slot's dtype, CPU) for every parameter whose bytes changed.
    `watched`: the body is not ours, and may write without permission where torch does not notice (`parameter.data`).
    Raises TiermemError for that, or if a unit to be written is in use, and what the pager raises; in a CapacityError
    with what all of them take.
    """

    def let_go(unit: int) -> None:
        if gatherer.unhold(unit, lent=True) == 0:
            gatherer.reshard(unit)

    def look_round() -> None:
        gatherer.recheck()  # parameters that were given each other's values have let go of them
        gatherer.count_leaks()

    def look(unit: int, before: torch.Tensor, written: Written) -> None:
        try:
            try:
                gatherer.take_in(unit)
            finally:  # beside values that do not fit, others have been written
                _report(layouts[unit], gatherer.gather(unit), before, written)
        except BaseException as error:
            # Its frames have views of the unit, and ExitStack makes a reference cycle of it: they would be kept.
            empty_all_frames(error)
            raise

    gatherer.recheck()  # what lingers because a view of it was kept, which may be gone by now
    with ExitStack() as last:  # every unit is let go of, whatever happens to the others
        last.callback(look_round)
        for unit in units:
            if gatherer.presence(unit) is Presence.SHARDED:
                needed(unit)
            base = _take(gatherer, layouts, units, unit, writable=written is not None)
            gatherer.hold(unit, lent=True)
            last.callback(let_go, unit)
            if written is not None:
                last.callback(look, unit, base.clone(), written)
            elif watched:
                last.callback(
                    _refuse_written, layouts[unit], base, [sum_of_bits(base, slot) for slot in layouts[unit].slots]
                )
        yield


def _take(
    gatherer: Gatherer, layouts: Sequence[UnitLayout], units: Sequence[int], unit: int, *, writable: bool
) -> torch.Tensor:
    """Gather one of `units`; where there is no room beside the others, say what all of them take."""
    try:
        return gatherer.gather(unit, writable=writable)
    except CapacityError as error:
        if len(units) == 1:
            raise
        together = sum(layouts[each].nbytes for each in units)
        raise CapacityError(
            f"{len(units)} units are to be gathered at the same time, which takes {together} bytes: gather "
            f"fewer at a time (module by module), or raise the budget. {error}"
        ) from error


def copies(
    gatherer: Gatherer,
    layouts: Sequence[UnitLayout],
    parameters: Sequence[nn.Parameter],
    *,
    needed: Callable[[int], None],
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Every parameter with a copy of its values in host memory, taken unit by unit; waits, and changes nothing.

    Needs the memory of the whole model.
    """
    found = []
    for layout in layouts:
        with lend(gatherer, layouts, [layout.unit], needed=needed), outside_inference():
            for slot in layout.slots:
                parameter = parameters[slot.parameter]
                found.append((parameter, parameter.data.to("cpu", copy=True)))
    return found


def give(values: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Make values the parameters' own, and empty the list; what an interrupt has left in it is for another call."""
    while values:
        parameter, own = values[-1]
        parameter.data = own
        del values[-1]


def _refuse_written(layout: UnitLayout, base: torch.Tensor, before: Sequence[int]) -> None:
    """Raise TiermemError if the bytes of a parameter that was lent for reading have changed."""
    for slot, expected in zip(layout.slots, before, strict=True):
        if sum_of_bits(base, slot) != expected:
            raise written_unasked(slot.names[0])


def _report(layout: UnitLayout, now: torch.Tensor, before: torch.Tensor, written: Written) -> None:
    for slot in layout.slots:
        piece = slice(slot.offset, slot.offset + slot.nbytes)
        # Bytes, not values: a NaN is equal to itself and -0.0 is not 0.0.
        if not torch.equal(now[piece], before[piece]):
            written(layout.unit, slot, now[piece].view(slot.dtype).cpu())
