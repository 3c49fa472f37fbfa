"""When units are updated.

Owns the schedules of the update, "step", "forward", "backward" and "auto", as strategy objects. Does not know
gradients, pages or optimizers: a schedule is told what happened, and says what begins before the step and whether the
step waits. Guarantees that what an update is does not depend on it, so that all schedules give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tiermem.errors import ConfigError
from tiermem.optim.choice import Choice


class UpdateSchedule:
    """Decides when the units of a step are updated: what has not begun before is queued by the step."""

    name: ClassVar[str]
    waits: ClassVar[bool] = False
    """Whether the step waits for all updates; else they run in the shadow of the next forward."""
    early: ClassVar[bool] = False
    """Whether it wants to know, during backward, which units have all their gradients."""
    keeps_gradients: ClassVar[bool] = False
    """Whether gradients of units that are updated early are kept until the step, so that nothing has to be refused."""

    @property
    def acts_as(self) -> str:
        """The name of the schedule by which the next step will go."""
        return self.name

    def gradients_complete(self, unit: int, start_early: Callable[[int], bool]) -> bool:  # noqa: ARG002 - most wait
        """All gradients of a unit have arrived, in backward. Returns whether its update was started.

        `start_early(unit)` queues it though the step may yet be clipped or skipped; whether that was possible.
        """
        return False

    def refused(self) -> None:
        """A unit with all its gradients could not be updated early here, before anybody was asked to start it."""

    def stepped(self, *, kept: bool) -> None:
        """A step has ended; `kept`: nothing that was updated early had, or would have had, to be taken back."""


class StepSchedule(UpdateSchedule):
    """Everything runs, and is waited for, inside `step()`."""

    name = "step"
    waits = True


class ForwardSchedule(UpdateSchedule):
    """`step()` queues and returns; the updates run in the shadow of the next forward."""

    name = "forward"


class BackwardSchedule(UpdateSchedule):
    """A unit is updated as soon as its gradients are complete; `step()` queues what is left, or what was taken back."""

    name = "backward"
    early = True

    def __init__(self) -> None:
        self._asked = self._began = self._refused = False

    @property
    def acts_as(self) -> str:
        """ "forward" after a step in which nothing could be started early: the next one is likely to be the same."""
        return "forward" if self._refused else "backward"

    def gradients_complete(self, unit: int, start_early: Callable[[int], bool]) -> bool:
        """Start the unit if that can be done."""
        began = start_early(unit)
        self._asked, self._began = True, self._began or began
        return began

    def refused(self) -> None:
        """Note that it was tried."""
        self._asked = True

    def stepped(self, *, kept: bool) -> None:  # noqa: ARG002 - part of the interface
        """Note whether anything was started early, where it was tried."""
        self._refused = self._asked and not self._began
        self._asked = self._began = False


class AutoSchedule(BackwardSchedule):
    """ "backward" as long as that seldom has to be taken back, otherwise "forward"; see `choice.py`."""

    name = "auto"
    keeps_gradients = True

    def __init__(self) -> None:
        super().__init__()
        self._choice = Choice()

    @property
    def acts_as(self) -> str:
        """ "backward" or "forward"."""
        return super().acts_as if self._choice.early else "forward"

    def gradients_complete(self, unit: int, start_early: Callable[[int], bool]) -> bool:
        """Start the unit if it is worth it and can be done."""
        return self._choice.early and super().gradients_complete(unit, start_early)

    def stepped(self, *, kept: bool) -> None:
        """Learn from the step whether "backward" is worth it."""
        super().stepped(kept=kept)
        self._choice = self._choice.after(kept=kept)


def make_schedule(name: str, *, worthwhile: bool = True) -> UpdateSchedule:
    """The schedule called `name`. Raises `ConfigError` for an unknown name.

    `worthwhile`: whether updating under backward could hide anything at all; otherwise "auto" is "forward".
    """
    if name == "step":
        return StepSchedule()
    if name == "forward" or (name == "auto" and not worthwhile):
        return ForwardSchedule()
    if name == "backward":
        return BackwardSchedule()
    if name == "auto":
        return AutoSchedule()
    raise ConfigError(f"update={name!r}: expected 'backward', 'forward', 'step' or 'auto'")
