"""What the AdamW face, the schedules and the runtime ask of each other.

Owns the protocols between the rooms and the small records they exchange. Does not know who implements them. Guarantees
that parameters are named by their global index here, so that no module, and no tensor but a gradient norm and moments
that are loaded or saved, crosses this line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from tiermem.future import Future
from tiermem.optim.updates import Settings, UnitUpdate
from tiermem.pager.protection import Protection

Moments = tuple[torch.Tensor, torch.Tensor]
"""First and second moment of a parameter, each of its shape, whole whatever the rank."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did: the gradient norm before clipping (None if nobody asked), and whether it was skipped.

    `partial`: the norm is not finite, but some units had been updated early, for good; the other gradients are dropped.
    `outdated`: such units were updated with settings that have changed since.
    """

    grad_norm: torch.Tensor | None
    skipped: bool
    partial: bool = False
    outdated: bool = False


class SettingsSource(Protocol):
    """An optimizer, as seen from below: it knows hyperparameters and step counts."""

    @property
    def max_grad_norm(self) -> float | None:
        """Clip every step to this norm, or do not clip."""

    def settings(self, parameters: Iterable[int]) -> Mapping[int, Settings]:
        """Settings of these parameters as they are now, for their next update; counts nothing."""

    def count(self, settings: Mapping[int, Settings]) -> None:
        """These parameters have been updated with these settings, whose `step` is their count from now on."""

    def step_counts(self) -> Mapping[int, int]:
        """How many updates each parameter has had, or has queued."""

    def state_dict(self) -> dict[str, Any]:
        """Settings and step counts as torch's optimizers give them."""


@runtime_checkable
class UpdateService(Protocol):
    """What an optimizer asks of the runtime that owns its parameters."""

    def attach_optimizer(self, source: SettingsSource, parameters: Sequence[int]) -> Mapping[int, int]:
        """From now on `source` is the optimizer of `parameters` (all of them, in its own order).

        Returns how many updates those of them have had that come from a resumed run, or from another optimizer.
        """

    def step(self, source: SettingsSource, *, unscale: float = 1.0) -> StepResult:
        """Update every parameter of `source` that has a gradient, according to the schedule.

        `unscale`: what gradients are multiplied by first; where they have been used up, only 1.
        """

    def clip_gradients(self, source: SettingsSource, max_norm: float) -> torch.Tensor:
        """Scale the gradients of `source` so that their norm is at most `max_norm`; return the norm before."""

    def drop_gradients(self, source: SettingsSource) -> None:
        """Forget the gradients of `source` that no update has claimed; if some were, the step ends with that."""

    def prepare_moments(self, given: Mapping[int, Moments]) -> Callable[[], None]:
        """Check moments that are to replace those of these parameters; the function that does it, between steps."""

    def read_moments(self, parameters: Sequence[int]) -> list[Moments]:
        """A copy of the moments of these parameters, float32, between steps. Every rank asks for the same."""


class GradientBook(Protocol):
    """Who has a gradient; kept by the runtime. Called on the compute thread only."""

    def present(self, unit: int) -> Sequence[int]:
        """The parameters of a unit that have a gradient which no update has claimed."""

    def norms(self, parameters: Sequence[int]) -> list[torch.Tensor]:
        """The 2-norm of each parameter's whole gradient: 0-dim float32 (float64 for float64). May wait for I/O."""

    def are_known(self, parameters: Sequence[int]) -> bool:
        """Whether their norms can be read without waiting for a device; else they are on their way from now on."""

    def read_norms(self, parameters: Sequence[int]) -> list[torch.Tensor]:
        """As `norms`, in host memory if all of them are known."""

    def claimed(self, parameters: Sequence[int]) -> None:
        """An update now owns these gradients: they are no longer present, and the next contribution starts anew."""

    def borrowed(self, parameters: Sequence[int]) -> None:
        """An update that may be undone uses these gradients; not present, but not claimed either."""

    def require_free(self, units: Iterable[int]) -> None:
        """Raise TiermemError if somebody keeps a view of the parameters of these units."""

    def catch_up(self) -> None:
        """Before updates are undone: have those begun of which all ranks know by now. All of them undo the same."""

    def given_back(self, units: Collection[int], parameters: Sequence[int]) -> None:
        """The updates of these units that borrowed these gradients are undone: they are present again.

        A rank may have had nothing to update in a unit whose parameters others have.
        """

    def drop(self, parameters: Sequence[int]) -> None:
        """Forget these gradients, as if backward had not produced them."""


class UpdateQueue(Protocol):
    """Carries updates out: the `Updater`, or what the runtime puts before it."""

    def prepare(self) -> None:
        """Do what need only be done once, before there is something to update. Raises TiermemError if that fails."""

    def start(self, update: UnitUpdate) -> None:
        """Queue an update."""

    def raise_failed(self) -> None:
        """Raise the error of an update that failed, if any did; does not wait."""

    def wait(self, unit: int) -> None:
        """Wait for the unit's queued updates. Raises the error of one that failed."""

    def wait_all(self) -> None:
        """Wait for all queued updates. Raises the error of one that failed."""

    def withdraw(self, protection: Protection) -> list[Future[None]]:
        """Give up the updates under this protection that have not begun; futures without errors of those that have."""

    def pending(self, unit: int) -> bool:
        """Whether an update of the unit is queued or running, or has failed."""

    def hurry(self, unit: int) -> None:
        """Move the unit's queued updates to the front."""


class Undo(Protocol):
    """How updates are undone; the pager and the space on disk, as the runtime joins them."""

    def has_room(self) -> bool:
        """Whether the disk has room for one more copy of everything that is updated. May wait for a commit."""

    def protection(self) -> Protection:
        """A new protection."""

    def revert(self, protection: Protection, running: Sequence[Future[None]]) -> None:
        """Wait for the updates that are running, then until everything protected is as it was before."""
