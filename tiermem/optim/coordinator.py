"""Between optimizers and the queue of updates.

Owns who optimizes which parameter, clipping coefficients that wait for a step, and the judgement whether what was
updated early may be kept. Does not know pages, modules or when to update (the schedule decides). Guarantees that an
update has the bits of one with the settings and the clipping of the moment of `step()`, that every gradient is used by
one update only, and that a step with a non-finite norm changes nothing. Used from the compute thread only.

The exception is "backward" with one optimizer that does not clip: there updates under backward are for good (see
`_for_good`), with the settings of that moment, and a norm that turns out not to be finite leaves the step partial.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, MutableSet, Sequence
from functools import partial

import torch

from tiermem.errors import ConfigError, TiermemError
from tiermem.optim.claims import Claim
from tiermem.optim.hyperparameters import norm_to_clip_by
from tiermem.optim.late import LateNorms
from tiermem.optim.scales import Scales
from tiermem.optim.schedules import UpdateSchedule
from tiermem.optim.service import GradientBook, SettingsSource, StepResult, UpdateQueue
from tiermem.optim.speculation import Speculation
from tiermem.optim.tiles import UnitState
from tiermem.optim.updates import SegmentUpdate, Settings, UnitUpdate


class UpdateCoordinator:
    """What an `UpdateService` and the gather scheduler ask of the update. `units` come in forward order."""

    def __init__(
        self,
        units: Sequence[UnitState],
        queue: UpdateQueue,
        gradients: GradientBook,
        schedule: UpdateSchedule,
        speculation: Speculation,
        *,
        patient: Container[int] = (),
    ) -> None:
        """`patient`: units that have nothing to gain from an update that may have to be undone, see `_start_early`."""
        self._units = {state.unit: state for state in units}
        self._queue = queue
        self._gradients = gradients
        self._schedule = schedule
        self._speculation = speculation
        self._patient = patient
        self._source_of: dict[int, SettingsSource] = {}
        self._sources: list[SettingsSource] = []  # those in `_source_of`, which is asked for every unit
        self._scales = Scales(gradients)
        # How many of an optimizer's parameters others have taken over; forgotten when the optimizer is gone.
        self._robbed: MutableMapping[SettingsSource, int] = weakref.WeakKeyDictionary()
        # Optimizers that clip by calls between backward and step, or drop gradients there.
        self._calling: MutableSet[SettingsSource] = weakref.WeakSet()
        self.late = LateNorms(gradients, lambda unit: [p for p in gradients.present(unit) if p in self._source_of])

    # What an optimizer asks.

    def attach_optimizer(self, source: SettingsSource, parameters: Sequence[int]) -> Mapping[int, int]:
        """Make `source` the optimizer of `parameters`; the latest one to ask for a parameter has it.

        Returns the updates that those which had another optimizer have had: their moments go on. So does what was
        learned of how the step ends: where that one clipped by calls, or dropped gradients, this one may, too.
        """
        self.settle_early()
        self._queue.prepare()
        had = {number: self._source_of[number] for number in parameters if number in self._source_of}
        done = {before: before.step_counts() for before in dict.fromkeys(had.values())}
        for before in done:
            self._robbed[before] = self._robbed.get(before, 0) + sum(owner is before for owner in had.values())
            if before in self._calling:
                self._calling.add(source)
        self._source_of.update(dict.fromkeys(parameters, source))
        self._sources = list(dict.fromkeys(self._source_of.values()))
        return {number: done[before][number] for number, before in had.items() if number in done[before]}

    def optimizers(self) -> list[SettingsSource]:
        """The optimizers that own a parameter, in the order of the parameters they were made for."""
        return list(self._sources)

    def parameters_of(self, source: SettingsSource) -> list[int]:
        """The parameters that an optimizer has."""
        return [number for number, owner in self._source_of.items() if owner is source]

    def step(self, source: SettingsSource, *, unscale: float = 1.0) -> StepResult:
        """Update what has a gradient. In the "step" schedule this waits and raises the errors of the updates.

        In the others, an error of an earlier step's update is raised here, or by `unit_needed`. A gradient norm that
        is not finite skips the step. What was updated early is kept if nothing is clipped, else undone and redone. If
        it was for good the step is `partial` instead of skipped, and a `max_grad_norm` set since is a `ConfigError`. So
        are gradients that have grown since they were clipped.
        """
        if source in self._robbed:
            raise ConfigError(
                f"another optimizer was made since for {self._robbed[source]} of this one's parameters, which only one "
                "can update: step that one, and make optimizers for parts of a model with parameters of their own. To "
                "change settings or add parameters use param_groups and add_param_group"
            )
        self._speculation.finish()
        self._queue.raise_failed()  # before anything is claimed for a step that makes no sense any more
        if unscale != 1.0 and (self.spent or (self._schedule.early and self._for_good)):
            raise ConfigError(
                "update='backward' updates units while their gradients are still scaled; choose update='forward', "
                "'step' or 'auto' for loss scaling"
            )
        spent, outdated = self.spent, self.spent and self._speculation.is_outdated(source)
        if outdated:
            self._calling.add(source)  # may do so again: then it can be undone
        with self._scales.unless_it_fails():
            norm, finite = self._settle(source, unscale)
        if not finite:
            self.drop_gradients(source)
            return StepResult(norm, skipped=not spent, partial=spent, outdated=outdated)
        ready = set(self._present(source))
        units = [unit for unit in self._units if not ready.isdisjoint(self._gradients.present(unit))]
        for unit in units:
            mine = [p for p in self._gradients.present(unit) if self._source_of.get(p) is source]
            for _, settings, update in self._updates(unit, mine):
                forget_scales = partial(self._scales.forget, list(settings))
                self._speculation.claims.make(Claim(source, settings, update, on_claimed=forget_scales))
        if self._schedule.waits:
            self.wait_updates()
        return StepResult(norm, skipped=False, outdated=outdated)

    def _settle(self, source: SettingsSource, unscale: float) -> tuple[torch.Tensor | None, bool]:
        """Find out what the step's gradients are multiplied by; keep or undo what was updated early.

        Returns their norm, if it is clipped, and whether all are finite.
        """
        self._scales.multiply(self._with_gradient(source) if unscale != 1.0 else (), unscale)
        max_norm = norm_to_clip_by(source.max_grad_norm)
        norm = None if max_norm is None else self.clip_gradients(source, max_norm, asked=False)
        parameters = self._with_gradient(source)
        self.late.forget()
        finite, clipped = self._scales.are_finite(parameters), self._scales.change(parameters)
        if finite and clipped:
            self._scales.require_ungrown(parameters)
        early = self._speculation.settings(source)
        if early and finite and not clipped and source.settings(early) == early:
            self._scales.forget(early)
            self._speculation.keep(source)
        elif early:
            self._speculation.take_back(redone=finite)
        if parameters:
            self._schedule.stepped(kept=finite and not clipped and not self._speculation.spoiled)
        self._speculation.end_step()
        return norm, finite

    def clip_gradients(self, source: SettingsSource, max_norm: float, *, asked: bool = True) -> torch.Tensor:
        """Remember the coefficient for the next step; return the norm. If somebody `asked`, he may do so again.

        Raises `ConfigError` if gradients have been used up, which happens in "backward" before the first such call, or
        if they were clipped before and have grown since.
        """
        self._speculation.finish()
        if asked:
            self._calling.add(source)
        if self.spent:
            raise ConfigError(
                "clipping comes too late: update='backward' has used gradients up. From the next step on it keeps "
                "them: call clip_grad_norm_ in every step, pass max_grad_norm to the optimizer, or choose update='auto'"
            )
        # In the model's order, whatever the groups: the sum's last bit is then that of what scripts call,
        # `clip_grad_norm_(model.parameters(), ...)`.
        return self._scales.clip(sorted(self._with_gradient(source)), max_norm)

    def drop_gradients(self, source: SettingsSource, *, asked: bool = False) -> None:
        """Forget the gradients of `source` that no update has claimed, and their clipping; undo its early updates.

        Those that were for good stay. If it was `asked` for that, as it may be again, the next ones are not for good.
        """
        self._speculation.finish()
        spent = self.spent
        if spent and asked:
            self._calling.add(source)
        if spent or self._speculation.settings(source):
            self._speculation.take_back(redone=False)
            self._speculation.end_step()
        parameters = self._present(source)
        self._scales.forget(parameters)
        if parameters:
            going = set(parameters)
            for unit in self._units:  # another optimizer's update may still have to read what is forgotten
                if self._queue.pending(unit) and not going.isdisjoint(self._gradients.present(unit)):
                    self._queue.wait(unit)
        if parameters or spent:
            self._gradients.drop(parameters)

    def wait_updates(self) -> None:
        """Wait for everything queued. Raises the error of an update that failed."""
        self._speculation.finish()
        self._queue.wait_all()

    # What the gather scheduler reports.

    def unit_needed(self, unit: int) -> None:
        """Wait for a pending update of a unit that is about to be used, ahead of the others. Raises its error.

        Before the step a unit is used with the values it has had so far: what was updated early is undone, unless that
        was for good.
        """
        self._speculation.finish()
        if self._speculation.holds(unit):
            self._gradients.catch_up()
            self._speculation.take_back(redone=True)
        if self._queue.pending(unit):
            self._queue.hurry(unit)
            self._queue.wait(unit)

    def gradients_complete(self, unit: int) -> bool:
        """All gradients of a unit have arrived: "backward" updates it now, with the settings as they are.

        Returns whether an update has begun.
        """
        return unit in self._units and self._schedule.gradients_complete(unit, self._start_early)

    def may_start_early(self, unit: int) -> bool:
        """Whether `_start_early` could, for all that one rank knows for itself: its room on disk, and its settings.

        The rest of its reasons, norms and what was taken back, are those of all ranks.
        """
        patient = unit in self._patient and not self._for_good
        may = not patient and self._speculation.may_begin(for_good=self._for_good)
        if not may:
            self._schedule.refused()
        return may

    def settle_early(self) -> None:
        """Before somebody changes parameters, or who optimizes them: undo what was updated early.

        Raises TiermemError where that was for good.
        """
        self._speculation.finish()
        self._gradients.catch_up()  # what that begins may be for good, too
        if self.spent:
            raise TiermemError(
                "parameters are to be changed, or given to another optimizer, between backward and step, but "
                "update='backward' has used their gradients up; do it after optimizer.step(), or choose update='auto'"
            )
        self._speculation.take_back(redone=True)

    # Inside.

    def _updates(
        self, unit: int, parameters: Iterable[int]
    ) -> Iterator[tuple[SettingsSource, Mapping[int, Settings], UnitUpdate]]:
        """The updates of these parameters of a unit, one for each optimizer and each factor of gradients."""
        groups: dict[tuple[SettingsSource, float], list[int]] = {}
        for parameter in parameters:
            groups.setdefault((self._source_of[parameter], self._scales.of(parameter)), []).append(parameter)
        left = len(self._gradients.present(unit))
        for (source, scale), numbers in groups.items():
            left -= len(numbers)
            settings = source.settings(numbers)
            yield source, settings, _update(self._units[unit], settings, scale=scale, last=left == 0)

    def _start_early(self, unit: int) -> bool:
        """Queue the update of what has a gradient in a unit, before it is known whether the step clips or is skipped.

        Returns False, and changes nothing, where that cannot be: a gradient is not finite, or a device has yet to say
        whether it is (`late` tells when it has), somebody has clipped already, there is no room on disk, or it was
        tried in this step and taken back. Neither is a `patient` unit updated where that might have to be undone: what
        it is made of is to stay in memory or on a device, while a copy of that in SWAP would cost as much as paging it
        does.
        """
        if unit in self._patient and not self._for_good:
            return False
        if self.late.put_off(unit):
            return False
        if self._speculation.given_up:
            return False  # as `begin` would say, after a look at every norm
        mine = [p for p in self._gradients.present(unit) if p in self._source_of]
        if mine and (self._scales.know(mine) or not self._scales.are_finite(mine)):
            self._speculation.give_up()
        if not mine or not self._speculation.begin(for_good=self._for_good):
            return False
        for source, settings, update in self._updates(unit, mine):
            self._speculation.start(source, update, settings)
        return True

    @property
    def owned(self) -> Container[int]:
        """The parameters that some optimizer has."""
        return self._source_of.keys()

    @property
    def spent(self) -> bool:
        """Whether units were updated early, for good, in the step under way."""
        return bool(self._speculation.spent)

    @property
    def _for_good(self) -> bool:
        """Whether an early update will not have to be undone: nobody clips, or steps without the others."""
        sources = self.optimizers()
        clipping = any(source.max_grad_norm is not None or source in self._calling for source in sources)
        return not (self._schedule.keeps_gradients or clipping or len(sources) > 1)

    def _present(self, source: SettingsSource) -> list[int]:
        with_gradient = {p for unit in self._units for p in self._gradients.present(unit)}
        return [p for p in self.parameters_of(source) if p in with_gradient]

    def _with_gradient(self, source: SettingsSource) -> list[int]:
        """Those present and those that an early update has borrowed or used up, in the optimizer's order."""
        found = {*self._present(source), *self._speculation.settings(source), *self._speculation.spent}
        return [p for p in self.parameters_of(source) if p in found]


def _update(state: UnitState, settings: Mapping[int, Settings], *, scale: float, last: bool) -> UnitUpdate:
    here = [p for p in sorted(settings) if state.has(p)]  # the rest of the unit is other ranks'
    segments = tuple(SegmentUpdate(state.segment_of(p), settings[p]) for p in here)
    return UnitUpdate(state.unit, segments, grad_scale=scale, discard_gradients=last)
