"""What is known of one step's gradients, wherever they are added up: by one rank (`reduce`) or several (`exchange`).

Owns for each parameter whether it has a gradient in this step, and its norm; the list of pages written; and which
parameters had none because they were frozen. Does not know how a gradient comes into its pages. Guarantees that
`p.grad` is None once it was taken, and that nothing of a step is left in the next but which parameters were frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from torch import nn

from tiermem.pager.page import Intent, PageKey
from tiermem.pager.pager import Pager
from tiermem.pager.tiling import tile_ranges
from tiermem.zero3.conductor import Act
from tiermem.zero3.layout import UnitLayout
from tiermem.zero3.norm_reader import NormReader


class StepGradients:
    """What is known of this step's gradients, wherever they come from: their norms, and the pages they were put in."""

    apart: Container[int] = ()
    alone = True  # whether there are no other ranks
    holds = True  # whether all of a unit's pages are held from its first gradient until another unit's comes

    def __init__(self, pager: Pager, layouts: Sequence[UnitLayout], parameters: Sequence[nn.Parameter]) -> None:
        self._pager = pager
        self._parameters = tuple(parameters)
        self._trainable = tuple(tuple(slot.parameter for slot in layout.trainable) for layout in layouts)
        self._written: set[PageKey] = set()
        self._norms: dict[int, torch.Tensor] = {}
        self._reader = NormReader()
        # Parameters that a backward of this step, and of the step before, has found frozen; those had no gradient.
        self._found_frozen: frozenset[int] = frozenset()
        self._were_frozen: frozenset[int] = frozenset()

    def numbers(self, unit: int) -> tuple[int, ...]:
        """The global numbers of the unit's parameters that have a gradient in this step (on some rank), by place."""
        norms = self._norms
        return tuple([number for number in self._trainable[unit] if number in norms]) if norms else ()

    def trainable(self, unit: int) -> tuple[int, ...]:
        """The global numbers of all the unit's trainable parameters, by place."""
        return self._trainable[unit]

    def norm(self, parameter: int) -> torch.Tensor:
        """The L2 norm of the whole gradient accumulated so far: 0-d float32 (float64 for float64)."""
        return self._norms[parameter]

    def are_known(self, parameters: Sequence[int]) -> bool:
        """Whether these norms can be read without waiting for a device; else they are on their way from now on."""
        return self._reader.are_known({number: self.norm(number) for number in parameters})

    def read_norms(self, parameters: Sequence[int]) -> list[torch.Tensor]:
        """The norms, in host memory if all of them are known."""
        return self._reader.read({number: self.norm(number) for number in parameters})

    def reset(self) -> None:
        """Begin a new step: the pages now belong to whoever took note of them."""
        self._end()
        if self._norms:
            self._were_frozen = self._found_frozen.difference(self._norms)
        self._found_frozen = frozenset()
        self._written.clear()
        self._norms.clear()
        self._reader.clear()

    def drop(self) -> None:
        """Forget this step's gradients and their pages."""
        self._end()
        pages = list(self._written)
        self._norms.clear()  # of a step that is begun again nothing is remembered
        self.reset()
        if pages:
            self._pager.start_discard(pages)

    def drop_unfinished(self) -> None:
        """Forget pages in which an error or an interrupt has left gradients that do not count yet."""
        unfinished = self._unfinished()
        self._written.difference_update(unfinished)
        if unfinished:
            self._pager.start_discard(unfinished)

    def forget(self, parameters: Sequence[int], *, taken: bool) -> None:
        """Forget these parameters' gradients only: the next contribution to one of them begins anew.

        `taken`: their pages belong to whoever took note of them; otherwise nobody wants those.
        """
        self._end()
        for parameter in parameters:
            self._norms.pop(parameter, None)
        if taken:
            self._written.difference_update(self._unfinished())
        else:
            self.drop_unfinished()

    def backward_ended(self, *, together: bool) -> None:  # noqa: ARG002 - for those that still hold something
        """A backward is through. Which parameters are frozen is seen here, where none is used.

        `together`: the next micro-batch may go through the same unit at once.
        """
        numbers = [number for unit in self._trainable for number in unit]
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - absent.py has nothing to say to this
            frozen = [number for number in numbers if not self._parameters[number].requires_grad]
        self._found_frozen = self._found_frozen.union(frozen)

    def are_thawed(self, unit: int) -> bool:
        """Whether one of the unit's that was frozen in the step before is trained now, and nobody expected it."""
        frozen = self._were_frozen.intersection(self._trainable[unit]) if self._were_frozen else ()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - absent.py has nothing to say to this
            return any(self._parameters[number].requires_grad for number in frozen)

    def catch_up(self, unit: int | None) -> None:
        """Nothing is left to be said later, where there are no other ranks."""

    def line_up(self, act: Act = Act.SETTLE, alike: Callable[[], str] = lambda: "") -> None:
        """Wait for other ranks: there are none."""

    def _unfinished(self) -> list[PageKey]:
        """Pages that were written, of units of which no parameter has a gradient."""
        return [key for key in self._written if not self.numbers(key.unit)]

    def _end(self) -> None:
        """Have nothing open or under way."""
        raise NotImplementedError


def take_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """What autograd has left in `parameter.grad`, which is None from then on."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - absent.py has nothing to say to this
        gradient, parameter.grad = parameter.grad, None
    return gradient


def copy_out(pager: Pager, layout: UnitLayout, start: int, out: torch.Tensor) -> None:
    """Fill `out` with a gradient's elements, from `start` on in the tiles that lie here; waits for the pages."""
    for piece in tile_ranges(start, out.numel(), layout.tile_numel):
        key = layout.gradient_key(piece.tile)
        with pager.lease([key], Intent.READ) as lease:
            kept = lease.tensor(key).view(out.dtype)[piece.begin_in_tile : piece.begin_in_tile + piece.length]
            out[piece.begin : piece.begin + piece.length].copy_(kept)


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """Dense, and free of a graph of its own (backward with create_graph), in which case it is not changed either."""
    if gradient.layout is not torch.strided:
        gradient = gradient.detach().to_dense()
    return gradient.detach().clone() if gradient.requires_grad else gradient
