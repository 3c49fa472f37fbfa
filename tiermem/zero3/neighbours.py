"""What the scheduler asks of its neighbours: where gradients go, and who has to know.

Owns the protocols. Does not know who implements them: gradients go to `reduce.GradientStore` or, with several
ranks, to `exchange.RankGradients`; the listener is the runtime's. Guarantees nothing by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Protocol

import torch

from tiermem.zero3.conductor import Act


class Listener(Protocol):
    """Who has to know."""

    def unit_needed(self, unit: int) -> None:
        """Wait until no update of this unit is pending: its parameters or gradient pages are used next."""

    def may_update(self, unit: int) -> bool:
        """Whether this rank would take an update of the unit up, once all ranks have said so; nothing is begun."""

    def gradients_complete(self, unit: int) -> bool:
        """All gradients that this step will bring for the unit are in its pages; no lease on it is held here.

        Returns whether an update takes them now, after which no more may come.
        """

    def known_since(self) -> Sequence[int]:
        """Units whose gradients no update took because a device was not through with them, and now it is."""


class Norms(Protocol):
    """What is known of the size of this step's gradients."""

    def norm(self, parameter: int) -> torch.Tensor:
        """The L2 norm of a gradient accumulated so far, 0-d."""

    def are_known(self, parameters: Sequence[int]) -> bool:
        """Whether these norms can be read without waiting for a device; else they are on their way from now on."""

    def read_norms(self, parameters: Sequence[int]) -> list[torch.Tensor]:
        """The norms, in host memory if all of them are known."""


class Gradients(Norms, Protocol):
    """Where gradients go: `reduce.GradientStore`, or with several ranks `exchange.RankGradients`."""

    @property
    def apart(self) -> Container[int]:
        """Units whose gradients are taken beside those of others, so that no room is made for them ahead."""

    def expect(self, unit: int | None) -> None:
        """The unit's gradients are what comes next; None: something else is."""

    def prepare_together(self) -> None:
        """Micro-batches are about to go through units together: do what is done only once."""

    def accumulate(self, parameter: int, *, more: bool = False, together: bool = False) -> None:
        """Take `p.grad` of this parameter. `more`: others will be added to it, so that its norm means nothing yet.

        `together`: the next micro-batch's comes as soon as this one is through the unit.
        """

    def release(self, unit: int | None = None) -> None:
        """Let go of the unit written last; with `unit`, only if that is the one."""

    def backward_ended(self, *, together: bool) -> None:
        """A backward is through. `together`: the next micro-batch may go through the same unit at once."""

    def batch_complete(self, unit: int) -> None:
        """The unit has the gradients of this batch; more will come."""

    def complete(self, unit: int, then: Callable[[int], None]) -> None:
        """Let go of a unit that has all its gradients here; `then(unit)` follows when all ranks' are added up.

        On the calling thread: now, or in a later call of these verbs; not at all where another rank says less.
        """

    def catch_up(self, unit: int) -> None:
        """The unit is used next: what `complete` has promised for it is done first."""

    def line_up(self, act: Act = Act.SETTLE, alike: Callable[[], str] = lambda: "") -> None:
        """Wait until all ranks have come here, for the same `act` and with the same words, with all their gradients."""

    def drop_unfinished(self) -> None:
        """Forget pages in which an error or an interrupt has left gradients that do not count yet."""

    def numbers(self, unit: int) -> tuple[int, ...]:
        """The unit's parameters that have a gradient in this step, by place."""

    def trainable(self, unit: int) -> tuple[int, ...]:
        """All the unit's trainable parameters, by place."""

    def read(self, parameter: int) -> torch.Tensor | None:
        """A copy of a gradient in the parameter's shape."""

    def are_thawed(self, unit: int) -> bool:
        """Whether one of the unit's that was frozen in the step before is trained now, and nobody expected it."""

    def reset(self) -> None:
        """Begin a new step: the pages now belong to whoever took note of them."""

    def forget(self, parameters: Sequence[int]) -> None:
        """Forget these parameters' gradients only."""

    def drop(self) -> None:
        """Forget this step's gradients and their pages."""
