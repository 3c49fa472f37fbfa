"""Between optimizers and the queue of updates.

Owns who optimizes which parameter, and clipping coefficients that wait for a step. Does not know pages, modules or
when to update (the schedule decides). Guarantees that an update carries the settings of the moment it was queued, that
every gradient is claimed by one update only, that a step with a non-finite norm changes nothing, and that in
"backward", where the norm comes too late, no unit with a non-finite gradient is updated. Used from the compute thread
only.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NoReturn

import torch

from tiermem.errors import ConfigError, TiermemError
from tiermem.optim.clip import clip_coefficient, is_finite, total_norm
from tiermem.optim.schedules import UpdateSchedule
from tiermem.optim.service import GradientBook, SettingsSource, StepResult, UpdateQueue
from tiermem.optim.tiles import UnitState
from tiermem.optim.updates import SegmentUpdate, UnitUpdate


class UpdateCoordinator:
    """The `UpdateService` of a runtime. `units` come in forward order."""

    def __init__(
        self, units: Sequence[UnitState], queue: UpdateQueue, gradients: GradientBook, schedule: UpdateSchedule
    ) -> None:
        self._units = {state.unit: state for state in units}
        self._queue = queue
        self._gradients = gradients
        self._schedule = schedule
        self._source_of: dict[int, SettingsSource] = {}
        self._scale_of: dict[int, float] = {}
        # A unit of this step was refused: what is left of the step is dropped by the next step or zero_grad.
        self._refused = False

    # What an optimizer asks (UpdateService).

    def attach_optimizer(self, source: SettingsSource, parameters: Sequence[int]) -> None:
        """Make `source` the optimizer of `parameters`; the latest one to ask for a parameter has it."""
        self._source_of.update(dict.fromkeys(parameters, source))

    def optimizers(self) -> list[SettingsSource]:
        """The optimizers that own a parameter, in the order of the parameters they were made for."""
        return list(dict.fromkeys(self._source_of.values()))

    def parameters_of(self, source: SettingsSource) -> list[int]:
        """The parameters that an optimizer has."""
        return [number for number, owner in self._source_of.items() if owner is source]

    def step(self, source: SettingsSource) -> StepResult:
        """Update what has a gradient. In the "step" schedule this waits and raises the errors of the updates.

        In the others, an error of an earlier step's update is raised here, or by `unit_needed`. A gradient norm that
        is not finite skips the step; if some of its units are updated already, this raises TiermemError instead, and
        the next call ends the step.
        """
        if source not in self._source_of.values():
            raise ConfigError("another optimizer was made for the same parameters since; step that one")
        self._queue.raise_failed()  # before anything is claimed for a step that makes no sense any more
        norm: torch.Tensor | None = None
        if source.max_grad_norm is not None:
            norm = self._clip(source, source.max_grad_norm)
        parameters = self._present(source)
        if self._refused or not self._all_finite(parameters):
            if not self._refused and self._gradients.begun(self._owned(source)):
                self._refuse("what is left of this step")
            self.drop_gradients(source)
            return StepResult(norm, skipped=True)
        ready = set(parameters)
        units = [unit for unit in self._units if not ready.isdisjoint(self._gradients.present(unit))]
        self._schedule.step(units, _StarterFor(self, source))
        return StepResult(norm, skipped=False)

    def clip_gradients(self, source: SettingsSource, max_norm: float) -> torch.Tensor:
        """Remember the coefficient for the next step; return the norm. Raises `ConfigError` in "backward"."""
        if not self._schedule.honours_clip_call:
            raise ConfigError(
                f"update={self._schedule.name!r} updates units before all gradients are known, so clip_grad_norm_ "
                "comes too late; choose update='forward' or update='step', or pass max_grad_norm to the optimizer"
            )
        return self._clip(source, max_norm)

    def drop_gradients(self, source: SettingsSource) -> None:
        """Forget the gradients of `source` that no update has claimed, and their clipping.

        After a refusal: of everybody, since the backward that brought them did not run to its end.
        """
        if self._refused:
            self._refused = False
            self._scale_of.clear()
            self._schedule.abandon()
            self._gradients.abandon()
            return
        parameters = self._present(source)
        for parameter in parameters:
            self._scale_of.pop(parameter, None)
        if parameters:
            self._gradients.drop(parameters)

    def wait_updates(self) -> None:
        """Wait for everything queued. Raises the error of an update that failed."""
        self._queue.wait_all()

    # What the gather scheduler reports.

    def unit_needed(self, unit: int) -> None:
        """Wait for a pending update of a unit that is about to be used, ahead of the others. Raises its error."""
        if self._queue.pending(unit):
            self._queue.hurry(unit)
            self._queue.wait(unit)

    def gradients_complete(self, unit: int) -> bool:
        """All gradients of a unit have arrived: "backward" updates it now, with the settings as they are.

        Returns whether an update has begun. Raises TiermemError for a gradient that is not finite, and changes nothing.
        """
        return unit in self._units and self._schedule.gradients_complete(unit, _StarterFor(self, None))

    # Inside.

    def start_unit(self, unit: int, source: SettingsSource | None) -> None:
        """Queue the update of what has a gradient in a unit and belongs to `source` (None: to anybody)."""
        present = self._gradients.present(unit)
        mine = [p for p in present if p in self._source_of and source in (None, self._source_of[p])]
        if source is None and not self._all_finite(mine):
            self._refuse(f"unit {unit}")
        by_scale: dict[tuple[int, float], list[int]] = {}
        for parameter in mine:
            key = (id(self._source_of[parameter]), self._scale_of.pop(parameter, 1.0))
            by_scale.setdefault(key, []).append(parameter)
        state = self._units[unit]
        left = len(present)
        for (_, scale), parameters in by_scale.items():
            left -= len(parameters)
            settings = self._source_of[parameters[0]].claim(parameters)
            here = [p for p in sorted(parameters) if state.has(p)]  # the rest of the unit is other ranks'
            segments = tuple(SegmentUpdate(state.segment_of(p), settings[p]) for p in here)
            self._gradients.claimed(unit, parameters)
            self._queue.start(UnitUpdate(unit, segments, grad_scale=scale, discard_gradients=left == 0))

    @property
    def owned(self) -> Container[int]:
        """The parameters that some optimizer has."""
        return self._source_of.keys()

    @property
    def clipping(self) -> bool:
        """Whether some optimizer clips as part of its step."""
        return any(source.max_grad_norm is not None for source in self._source_of.values())

    def _owned(self, source: SettingsSource) -> list[int]:
        return [p for p, owner in self._source_of.items() if owner is source]

    def _present(self, source: SettingsSource) -> list[int]:
        with_gradient = {p for unit in self._units for p in self._gradients.present(unit)}
        return [p for p in self._owned(source) if p in with_gradient]

    def _all_finite(self, parameters: Sequence[int]) -> bool:
        """Whether the norm over these gradients is finite, and what they are to be multiplied by."""
        scales = (self._scale_of.get(p, 1.0) for p in parameters)
        return all(map(is_finite, scales)) and is_finite(total_norm(self._gradients.norms(parameters)))

    def _refuse(self, what: str) -> NoReturn:
        self._refused = True
        raise TiermemError(
            f"{what} was not updated: a gradient is not finite. With update={self._schedule.name!r} other units may be "
            "updated already; optimizer.step() or zero_grad() ends this step without the rest. "
            "update='forward' and update='step' skip such a step as a whole"
        )

    def _clip(self, source: SettingsSource, max_norm: float) -> torch.Tensor:
        parameters = self._present(source)
        norms = self._gradients.norms(parameters)
        total = total_norm([norm * self._scale_of.get(p, 1.0) for p, norm in zip(parameters, norms, strict=True)])
        coefficient = clip_coefficient(total, max_norm)
        for parameter in parameters:
            self._scale_of[parameter] = self._scale_of.get(parameter, 1.0) * coefficient
        if not is_finite(total):
            self._scale_of.update(dict.fromkeys(parameters, float("nan")))
        return total


class _StarterFor:
    """The schedule's view of the coordinator during one call, for one optimizer or for all."""

    def __init__(self, coordinator: UpdateCoordinator, source: SettingsSource | None) -> None:
        self._coordinator = coordinator
        self._source = source

    @property
    def clipping(self) -> bool:
        return self._coordinator.clipping

    def start(self, unit: int) -> None:
        self._coordinator.start_unit(unit, self._source)

    def wait_all(self) -> None:
        self._coordinator.wait_updates()
