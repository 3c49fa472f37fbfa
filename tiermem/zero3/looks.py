"""Whether the bits of a parameter that was lent for reading are still the same.

Owns the sums of a unit's bits between its first gathers and their ends. Does not know leases. Guarantees that a layer
that writes into its weights through `.data` when it is first called is noticed.

Why. Torch counts writes into a parameter, but not those through its `.data`, as layers do that clip or normalise their
weights in forward; and what is written into a frame lent for reading is lost when the frame goes, or not, as it comes.
Whoever does so does it from the beginning. So the bits are compared at the first gather of a unit with gradients, and
at the first one without: two passes over its memory each, for which a device is waited for.

What torch counts need not be a write: a parametrization registered in forward sets its parameter to itself, as peft's
adapters of experts do. A unit where anything was counted is compared at every gather from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiermem.errors import TiermemError
from tiermem.zero3.layout import Slot, UnitLayout

# Elements that are summed at a time on the processor, where torch converts all that it sums first: half a MiB of memory
# for that. 2^14 to 2^20 took 0.20 to 0.36 ms a MB (two cores, probe).
_PIECE = 1 << 16


class FirstLooks:
    """The units of one model."""

    def __init__(self, layouts: Sequence[UnitLayout]) -> None:
        self._layouts = {layout.unit: layout for layout in layouts}
        self._done: set[tuple[int, bool]] = set()  # units, and whether with gradients
        self._counted: set[int] = set()  # units of which torch has counted a write
        self._sums: dict[int, dict[int, int]] = {}  # by unit and parameter

    def begin(self, unit: int, base: torch.Tensor) -> None:
        """The unit was gathered for reading; `base` are its bytes."""
        mode = unit, torch.is_grad_enabled()
        if mode not in self._done or unit in self._counted:
            self._done.add(mode)
            self._sums[unit] = {slot.parameter: sum_of_bits(base, slot) for slot in self._layouts[unit].slots}

    def forget(self, unit: int) -> None:
        """It is known that the unit was written."""
        self._sums.pop(unit, None)

    def unchanged(self, unit: int, base: torch.Tensor, slot: Slot) -> bool:
        """Whether a parameter of which torch has counted a write is known to have the same bits nevertheless."""
        self._counted.add(unit)
        sums = self._sums.get(unit)
        return sums is not None and sum_of_bits(base, slot) == sums[slot.parameter]

    def changed(self, unit: int, base: torch.Tensor) -> str | None:
        """The name of a parameter that was written since; None: there is none, or this was not a first look."""
        sums = self._sums.pop(unit, None)
        if sums is None:
            return None
        for slot in self._layouts[unit].slots:
            if sum_of_bits(base, slot) != sums[slot.parameter]:
                return slot.names[0]
        return None


def written_unasked(name: str, how: str = "through its .data") -> TiermemError:
    """The error of a parameter that was written without permission."""
    return TiermemError(
        f"parameter {name} was written {how} while it was gathered for reading; the write may be lost. "
        "Use `with runtime.gathered(module_or_parameters, write=True):` around it"
    )


def sum_of_bits(base: torch.Tensor, slot: Slot) -> int:
    """Of a parameter's bits, as integers: one pass over its memory, where a copy would need as much again."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}.get(slot.dtype.itemsize, torch.uint8)
    bits = base[slot.offset : slot.offset + slot.nbytes].view(integers)
    pieces = torch.split(bits, _PIECE) if bits.device.type == "cpu" else (bits,)
    return sum(int(piece.sum(dtype=torch.int64).item()) for piece in pieces)
