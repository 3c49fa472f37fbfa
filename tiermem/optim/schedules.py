"""When units are updated.

Owns the three schedules of the update, "step", "forward" and "backward", as strategy objects. Does not know gradients,
pages or optimizers: a schedule is told what happened and answers by starting units. Guarantees that each unit is
started once per step, in forward order where the schedule has the choice, so that all schedules give the same bits.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from tiermem.errors import ConfigError


class Starter(Protocol):
    """What a schedule acts on: gathers the update of a unit from its optimizers and queues it."""

    @property
    def clipping(self) -> bool:
        """Whether some optimizer clips by the global norm as part of its step."""

    def start(self, unit: int) -> None:
        """Queue the update of a unit with the settings as they are now."""

    def wait_all(self) -> None:
        """Wait for everything queued. Raises the error of an update that failed."""


class UpdateSchedule(ABC):
    """Decides when the units of a step are updated."""

    name: ClassVar[str]
    honours_clip_call: ClassVar[bool] = True
    """Whether gradients are still untouched between backward and step, so that `clip_grad_norm_` can scale them."""

    @abstractmethod
    def gradients_complete(self, unit: int, starter: Starter) -> bool:
        """All gradients of a unit have arrived, in backward. Returns whether its update was started."""

    @abstractmethod
    def step(self, units: Sequence[int], starter: Starter) -> None:
        """`optimizer.step()` was called; `units` still have gradients, in forward order."""

    def abandon(self) -> None:  # noqa: B027 - most have nothing to forget
        """The step ends without an update of what is left."""


class StepSchedule(UpdateSchedule):
    """Everything runs, and is waited for, inside `step()`."""

    name = "step"

    def gradients_complete(self, unit: int, starter: Starter) -> bool:  # noqa: ARG002 - part of the interface
        """Too early."""
        return False

    def step(self, units: Sequence[int], starter: Starter) -> None:
        """Start all and wait."""
        for unit in units:
            starter.start(unit)
        starter.wait_all()


class ForwardSchedule(UpdateSchedule):
    """`step()` queues in forward order and returns; the updates run in the shadow of the next forward."""

    name = "forward"

    def gradients_complete(self, unit: int, starter: Starter) -> bool:  # noqa: ARG002 - part of the interface
        """Too early."""
        return False

    def step(self, units: Sequence[int], starter: Starter) -> None:
        """Start all and return."""
        for unit in units:
            starter.start(unit)


class BackwardSchedule(UpdateSchedule):
    """A unit is updated as soon as its gradients are complete; `step()` queues what is left.

    With clipping as part of the step the norm must be known first: then this behaves as "forward", and warns once.
    """

    name = "backward"
    honours_clip_call = False

    def __init__(self) -> None:
        self._started: set[int] = set()
        self._warned = False

    def gradients_complete(self, unit: int, starter: Starter) -> bool:
        """Start the unit. Raises `ConfigError` when it was already updated in this step."""
        if starter.clipping:
            self._warn_once()
            return False
        if unit in self._started:
            raise ConfigError(
                f"unit {unit} received gradients again after update='backward' had already updated it in this step; "
                "to accumulate several backward passes choose update='forward' or update='step'"
            )
        starter.start(unit)
        self._started.add(unit)
        return True

    def step(self, units: Sequence[int], starter: Starter) -> None:
        """Start what is left and return."""
        self._started.clear()
        for unit in units:
            starter.start(unit)

    def abandon(self) -> None:
        """Forget what was started."""
        self._started.clear()

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "max_grad_norm needs the norm of all gradients before the first update: update='backward' behaves as "
                "'forward' here",
                stacklevel=2,
            )


def make_schedule(name: str) -> UpdateSchedule:
    """The schedule called `name`; "auto" is "forward". Raises `ConfigError` for an unknown name."""
    if name == "step":
        return StepSchedule()
    if name in ("forward", "auto"):
        return ForwardSchedule()
    if name == "backward":
        return BackwardSchedule()
    raise ConfigError(f"update={name!r}: expected 'backward', 'forward', 'step' or 'auto'")
