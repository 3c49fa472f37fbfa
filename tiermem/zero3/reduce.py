"""Gradients of one rank, from autograd into pages (of several: `exchange`).

Owns the leases on GRAD tiles. Does not know modules, the order of units or the update. Guarantees the bits of plain
accumulation (old plus new, in the parameter's dtype) and that a tile is read only after it was written in this step.

A tile holds several parameters: the first write of a step takes it FRESH, every later one WRITE. What lies in the gaps,
and in the place of a parameter without gradient, is undefined; `numbers` says which parameters count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence

import torch
from torch import nn

from tiermem.errors import InvariantError
from tiermem.pager.lease import Lease, PendingLease
from tiermem.pager.page import Intent, PageKey
from tiermem.pager.pager import Pager
from tiermem.zero3.asked import AskedAhead
from tiermem.zero3.engine import viewers
from tiermem.zero3.layout import Slot, UnitLayout, memory_order
from tiermem.zero3.norms import add_pair, gradient_norm, may_pair, measuring_copy, team_loops
from tiermem.zero3.step_gradients import StepGradients, copy_out, plain, take_gradient
from tiermem.zero3.waiting import Waiting

# A norm that is taken from the pages, if anybody asks.
_NOT_YET = torch.tensor(float("nan"), dtype=torch.float32, device="cpu")


class GradientStore(StepGradients):
    """Takes gradients of parameters (by global number) and keeps them as pages.

    `hold_tiles`: lease all tiles of a unit at its first gradient and keep them until `release` or until another
    unit's gradient comes (one visit to the pager per unit). Otherwise each tile is leased while it is written, which
    needs the memory of a single tile. `apart`: units for which it is always so, beside the tiles that are held: parts
    of other units' roots, whose gradients come in between. `pairing_nbytes`: of bfloat16 gradients that may wait for
    those of the next micro-batch, beside the pages, where several go through a unit together.
    """

    def __init__(
        self,
        pager: Pager,
        layouts: Sequence[UnitLayout],
        parameters: Sequence[nn.Parameter],
        *,
        hold_tiles: bool = True,
        apart: Container[int] = (),
        pairing_nbytes: int = 0,
    ) -> None:
        super().__init__(pager, layouts, parameters)
        self.apart = apart
        self._layouts = tuple(layouts)
        self.holds = hold_tiles
        self._places: dict[int, tuple[int, Slot]] = {
            slot.parameter: (layout.unit, slot) for layout in layouts for slot in layout.trainable
        }
        self._held: tuple[int, Lease] | None = None
        self._asked = AskedAhead()
        self._waiting = Waiting(pairing_nbytes)

    def prepare_together(self) -> None:
        """Have the loops compiled that add two gradients in one pass, if there is any use for them."""
        if self._waiting.capacity and any(slot.dtype == torch.bfloat16 for _, slot in self._places.values()):
            team_loops()

    def expect(self, unit: int | None) -> None:
        """The unit's gradients come next: room for them is made from now on. Does not wait. None: none come next.

        Not while another unit's tiles are held: the budget has room for those of one.
        """
        if unit is None or unit in self.apart or not self.holds or self._held is not None or self._asked.is_open:
            return
        layout = self._layouts[unit]
        if layout.tiles:
            keys, intent = self._wanted(layout, range(layout.tiles))
            self._asked.put(unit, self._pager.start_lease(keys, intent))

    def accumulate(self, parameter: int, *, more: bool = False, together: bool = False) -> None:
        """Move `p.grad` of this parameter into its pages, adding to what it had in this step; waits for the pages.

        `more`: further gradients are expected, so that the norm is taken only if somebody asks for it. `together`: and
        come soon, so that this one may wait for the next. Sparse gradients are made dense. Raises what the pager
        raises.
        """
        gradient = take_gradient(self._parameters[parameter])
        if gradient is None:
            return
        gradient = plain(gradient)
        flat = memory_order(gradient, self._places[parameter][1])
        earlier = self._waiting.pop(parameter)
        if earlier is None and more and together and self._waiting.accepts(parameter, flat):
            return
        if earlier is None or may_pair(flat):
            self._take(parameter, flat, earlier, more=more)
        else:
            self._take(parameter, earlier, more=True)
            self._take(parameter, flat, more=more)

    def _take_waiting(self) -> None:
        """Add what waits for a gradient that did not come, or does not come soon."""
        for parameter, flat in self._waiting.pop_all():
            self._take(parameter, flat, more=True)

    def _take(self, parameter: int, flat: torch.Tensor, earlier: torch.Tensor | None = None, *, more: bool) -> None:
        """Add a gradient, and the one `earlier` before it."""
        unit, slot = self._places[parameter]
        layout = self._layouts[unit]
        apart = unit in self.apart
        if not apart and self._held is not None and self._held[0] != unit:
            self._let_go(None)
        if not apart and self.holds and self._held is None and layout.tiles:
            self._held = (unit, self._lease(layout, range(layout.tiles), self._asked.take(unit)))
        add = parameter in self._norms
        sums = _room_for_sums(flat, slot) if add and not more and measuring_copy(flat) is None else None
        squares = self._store(layout, slot, flat, earlier, sums, add=add, measure=not more)
        # As torch.nn.utils.clip_grad_norm_ measures it, but in float32 whatever the gradient's dtype; not read here,
        # so that a device is not waited for.
        summed, whole = add or earlier is not None, flat if sums is None else sums
        overflown = summed and squares is not None and not math.isfinite(squares)  # and the sums are in pages alone
        self._norms[parameter] = _NOT_YET if more or overflown else gradient_norm(whole, squares)

    def norm(self, parameter: int) -> torch.Tensor:
        """See `StepGradients.norm`; waits for the pages of a gradient that was expected to grow, and did not."""
        norm = super().norm(parameter)
        if norm is _NOT_YET:
            norm = self._norms[parameter] = gradient_norm(self._whole(parameter))
        return norm

    def release(self, unit: int | None = None) -> None:
        """Give back the tiles of the unit written last, and the room of one whose gradients have not come.

        With `unit`: only its tiles, if they are held.
        """
        self._take_waiting()
        self._let_go(unit)
        if unit is None:
            self._asked.give_up()

    def backward_ended(self, *, together: bool) -> None:
        """Let go of everything, unless the tiles that are held are about to be wanted again."""
        super().backward_ended(together=together)
        if not together:
            self.release()

    def batch_complete(self, unit: int) -> None:
        """The unit has its gradients of this batch: let go of its tiles."""
        self._let_go(unit)

    def complete(self, unit: int, then: Callable[[int], None]) -> None:
        """The unit's gradients are all here: let go of its tiles and say so."""
        self._take_waiting()
        self._let_go(unit)
        then(unit)

    def read(self, parameter: int) -> torch.Tensor | None:
        """Return a copy of this step's gradient in the parameter's shape, or None if it has none; waits."""
        if parameter not in self._norms:
            return None
        _, slot = self._places[parameter]
        return self._whole(parameter).as_strided(slot.shape, slot.stride)

    def _whole(self, parameter: int) -> torch.Tensor:
        """A copy of what the pages hold of a gradient, 1-D in memory order."""
        self.release()
        unit, slot = self._places[parameter]
        whole = torch.empty(slot.numel, dtype=slot.dtype, device=self._parameters[parameter].device)
        copy_out(self._pager, self._layouts[unit], slot.start, whole)
        return whole

    def _end(self) -> None:
        self.release()

    def _let_go(self, unit: int | None) -> None:
        if self._held is not None and unit in (None, self._held[0]):
            self._held[1].release()  # first: an interrupt may come before it has begun, and then it is done again
            self._held = None

    def _lease(self, layout: UnitLayout, tiles: Sequence[int], asked: PendingLease | None = None) -> Lease:
        keys, intent = self._wanted(layout, tiles)
        lease = self._pager.lease(keys, intent) if asked is None else asked.wait()
        self._written.update(keys)
        return lease

    def _wanted(self, layout: UnitLayout, tiles: Sequence[int]) -> tuple[list[PageKey], Intent]:
        keys = [layout.gradient_key(tile) for tile in tiles]
        fresh = [key not in self._written for key in keys]
        if any(fresh) and not all(fresh):
            raise InvariantError(f"some gradient tiles of unit {layout.name} are written in this step and some are not")
        return keys, Intent.FRESH if all(fresh) else Intent.WRITE

    def _store(
        self,
        layout: UnitLayout,
        slot: Slot,
        flat: torch.Tensor,
        earlier: torch.Tensor | None,
        sums: torch.Tensor | None,
        *,
        add: bool,
        measure: bool,
    ) -> float | None:
        """Write `flat` to the pages, or with `add` add it to what they hold; `earlier` before it.

        `measure`: its norm is taken now; where it is added, `sums` is to be what comes of that, too, unless the squares
        are returned: then they were added up on the way.
        """
        held = self._held[1] if self._held is not None and self._held[0] == layout.unit else None
        measuring = measuring_copy(flat) if measure else None
        for piece in layout.ranges(slot):
            lease = held or self._lease(layout, [piece.tile])
            try:
                page = lease.tensor(layout.gradient_key(piece.tile)).view(slot.dtype)
                kept = page[piece.begin_in_tile : piece.begin_in_tile + piece.length]
                cut = slice(piece.begin, piece.begin + piece.length)
                fresh = flat if piece.length == slot.numel else flat[cut]
                if earlier is not None and measuring is not None:
                    measuring.add_pair(earlier, piece.begin, kept, adds=add)
                elif earlier is not None:
                    add_pair(earlier[cut], fresh, kept, adds=add)
                elif measuring is not None:
                    (measuring.add if add else measuring.copy)(piece.begin, kept)
                elif add and sums is None:
                    kept.add_(fresh)
                else:
                    kept.copy_(fresh if sums is None else torch.add(fresh, kept, out=sums[cut]))
                if held is None:
                    lease.release()
            except BaseException as error:
                if held is not None:
                    self._held = None
                lease.fail(error)
                raise
        return None if measuring is None else measuring.squares


def _room_for_sums(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Where what comes of adding to a gradient, [n], goes: in its place, as torch adds, if nobody else looks at it.

    A view's gradient is a view of what goes on upstream. The caller has the gradient in its own shape, too.
    """
    ours = viewers(torch.empty(1, device="cpu")) + (len(slot.shape) != 1)
    return flat if viewers(flat) <= ours else flat.new_empty(flat.shape)
