"""The step as the runtime sees it: between the optimizer's face, the gather scheduler and the update.

Owns which gradients an update has claimed, and the ends of steps: when everything that backward brought has been
claimed or dropped, the scheduler begins anew, the counters close the step and the pager learns the order. Does not
know pages' places or how an update is carried out. Guarantees that a step is ended once, and that an optimizer which
steps some of the parameters leaves the gradients of the others as they are. Used from the compute thread only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from tiermem.errors import InvariantError, TiermemError
from tiermem.optim.coordinator import UpdateCoordinator
from tiermem.optim.service import Moments, SettingsSource, StepResult, UpdateQueue
from tiermem.optim.updates import in_words
from tiermem.process import HomeProcess
from tiermem.runtime.paged_moments import PagedMoments
from tiermem.runtime.plans import StepPlans
from tiermem.zero3.conductor import Act
from tiermem.zero3.engine import hidden
from tiermem.zero3.gather import Gatherer
from tiermem.zero3.layout import Slot
from tiermem.zero3.order import Phase, StepOrder
from tiermem.zero3.scheduler import GatherScheduler

# Calls of `step()` in a row, after which a step that none of them has ended will most likely stay open.
_PATIENCE = 100
# Turns of optimizers in a step, after which one whose gradients are dropped is taken never to step: the record of such
# a step would grow for ever.
_TURNS = 16


class GradientLedger:
    """Which parameters have a gradient nobody has claimed (`optim.service.GradientBook`)."""

    def __init__(self, units: Sequence[int], gatherer: Gatherer) -> None:
        """`units`: those that have trainable parameters."""
        self._units = units
        self._gatherer = gatherer
        self._claimed: set[int] = set()
        self._borrowed: set[int] = set()  # used by updates that may be undone; their pages stay meanwhile
        self.used: set[int] = set()  # claimed since their `zero_grad`: plain PyTorch would have these in `p.grad`
        self._turns = 0  # how often an optimizer has had its share of the step under way, which others have not
        self._scheduler: GatherScheduler | None = None

    def connect(self, scheduler: GatherScheduler) -> None:
        """Take `scheduler` as the source of gradients."""
        self._scheduler = scheduler

    @property
    def scheduler(self) -> GatherScheduler:
        """The source of gradients."""
        if self._scheduler is None:
            raise InvariantError("the ledger was used before its scheduler was connected")
        return self._scheduler

    def line_up(self, act: Act = Act.SETTLE, alike: Callable[[], str] = lambda: "") -> None:
        """Let go of what backward holds, and wait until all ranks have come here, for the same, with all gradients.

        `alike`: in words, what else has to be the same on all of them; asked for if there are others.
        """
        self.scheduler.settle()
        self.scheduler.gradients.line_up(act, alike)

    def present(self, unit: int) -> Sequence[int]:
        """The parameters of a unit with a gradient that no update uses."""
        numbers = self.scheduler.gradients.numbers(unit)
        if not self._claimed and not self._borrowed:
            return numbers
        return [number for number in numbers if number not in self._claimed and number not in self._borrowed]

    def is_readable(self, unit: int, slot: Slot, *, spent: bool) -> bool:
        """Whether this parameter of the unit has a gradient that no update has used up, or will without being asked.

        `spent`: whether updates of this step were for good before `step()`. TiermemError if one used this gradient.
        """
        if spent and slot.parameter in self._claimed:  # "no gradient" would be wrong: plain PyTorch has it until then
            raise TiermemError(
                f"the gradient of {slot.names[0]} is used up: update='backward' has updated its unit in backward. To "
                "have gradients until step() choose update='auto', 'forward' or 'step', or clip (max_grad_norm)"
            )
        return slot.parameter in self._borrowed or slot.parameter in self.present(unit)

    def norms(self, parameters: Sequence[int]) -> list[torch.Tensor]:
        """The 2-norm of each parameter's accumulated gradient."""
        return [self.scheduler.gradients.norm(number) for number in parameters]

    def are_known(self, parameters: Sequence[int]) -> bool:
        """Whether their norms can be read without waiting for a device; else they are on their way from now on."""
        return self.scheduler.gradients.are_known(parameters)

    def read_norms(self, parameters: Sequence[int]) -> list[torch.Tensor]:
        """The norms, in host memory if all of them are known."""
        return self.scheduler.gradients.read_norms(parameters)

    def claimed(self, parameters: Sequence[int]) -> None:
        """An update owns these gradients now."""
        self._claimed.update(parameters)
        self.used.update(parameters)
        self._borrowed.difference_update(parameters)

    def borrowed(self, parameters: Sequence[int]) -> None:
        """An update that may be undone uses these gradients; their pages stay as they are meanwhile."""
        self._borrowed.update(parameters)

    def require_free(self, units: Iterable[int] | None = None) -> None:
        """Raise TiermemError if somebody keeps a view of parameters of these units, which are about to change.

        None: of those with a gradient that no update uses.
        """
        for unit in filter(self.present, self._units) if units is None else units:
            self._gatherer.require_free(unit)

    def catch_up(self) -> None:
        """Wait until whatever is the last of a unit's gradients here, and is on its way, is added up."""
        self.scheduler.gradients.catch_up(None)

    def given_back(self, units: Collection[int], parameters: Sequence[int]) -> None:
        """The updates of these units that borrowed these gradients are undone: they are present, more may come."""
        self._borrowed.difference_update(parameters)
        self.scheduler.take_back(units)

    def end_interrupted(self) -> None:
        """Let go of what a forward or backward holds that was interrupted: the next ones need the room.

        Nothing of what several computations hold together: they are at it.
        """
        if self.scheduler.lockstep is not None:
            return
        if not self.scheduler.stack.calls:
            self.scheduler.saved.leave_rest()
            self._gatherer.forget_calls()
        elif not self.scheduler.stack.goes_on:
            self.scheduler.settle()

    def drop(self, parameters: Sequence[int]) -> None:
        """Forget these gradients as if backward had not brought them. If others are claimed, end the step next.

        Where an optimizer has had its turn the step goes on: what was computed for that, as for a generator whose
        discriminator got gradients, too, is part of every step. Otherwise it begins again.
        """
        if self._claimed:
            self.scheduler.forget(parameters)
            # It may have been cut short, and is no example of how many gradients a step brings.
            self.scheduler.order.forget_contributions()
        elif 0 < self._turns <= _TURNS or self.unclaimed() - set(parameters):
            self.scheduler.forget(parameters)
        else:
            self._turns = 0
            self.scheduler.drop_gradients()

    @property
    def is_mid_step(self) -> bool:
        """Whether some gradients of this step are used by an update and the step is not over."""
        return bool(self._claimed or self._borrowed)

    @property
    def is_ending(self) -> bool:
        """Whether all gradients of this step are used by updates for good: an interrupt came before its end."""
        return bool(self._claimed) and not self.unclaimed()

    def unclaimed(self) -> set[int]:
        """All parameters with a gradient that is not an update's for good."""
        return {number for unit in self._units for number in self.present(unit)} | self._borrowed

    def close_step(self, owned: Container[int], *, updated: bool) -> bool:
        """After an optimizer's step: whether the whole step is over, or another optimizer's share is still to come.

        `owned`: parameters that some optimizer has. Gradients of the others nobody waits for; they end with the step.
        Where nothing was computed since the last step ended, another optimizer's call has ended it: both are one step.
        """
        if not self.scheduler.order.has_begun:
            self._claimed.clear()  # of a step whose end was interrupted just before that
            return False
        if any(number in owned for number in self.unclaimed()):
            self._turns += bool(self._claimed)
            self.scheduler.forget(sorted(self._claimed), updated=True)
            self._claimed.clear()
            return False
        self.scheduler.finish_step(updated=updated)
        self._claimed.clear()
        self._turns = 0
        return True


class Steps:
    """The `UpdateService` that optimizers find: the coordinator, with what surrounds a step."""

    def __init__(
        self,
        coordinator: UpdateCoordinator,
        ledger: GradientLedger,
        queue: UpdateQueue,
        plans: StepPlans,
    ) -> None:
        self._coordinator = coordinator
        self._ledger = ledger
        self._queue = queue
        self.plans = plans
        self._resumed: dict[int, int] = {}  # of parameters that no optimizer has been made for since
        self._records: list[dict[str, Any]] = []
        self._closed = False
        self._home = HomeProcess()
        self._moments: PagedMoments | None = None
        self.open_calls = 0  # of `step()` that have left the step under way open
        self.number = 0  # steps done

    def connect(self, moments: PagedMoments) -> None:
        """Take the way to the moments; called once the house is built."""
        self._moments = moments

    def resume(self, number: int, counts: Mapping[int, int], records: Sequence[dict[str, Any]] = ()) -> None:
        """Go on after `number` steps; optimizers take over these update counts, those of `records`, when they are made.

        However late: the moments that go with a count are in pages, and wait as well.
        """
        self.number = number
        self._resumed = dict(counts)
        self._records = list(records)

    def waiting(self) -> list[dict[str, Any]]:
        """Records of the optimizers resumed from: all of them until there is one, then counts that none has taken."""
        if not self._coordinator.optimizers():
            return self._records
        rest = [[number, count] for number, count in self._resumed.items()]
        return [{"param_groups": [], "state": [], "steps": rest}] if rest else []

    def close(self) -> None:
        """From now on every other verb raises TiermemError."""
        self._closed = True
        self._moments = None  # an optimizer that is kept is not to keep the house

    def attach_optimizer(self, source: SettingsSource, parameters: Sequence[int]) -> Mapping[int, int]:
        """Make `source` the optimizer of `parameters`; returns the updates they have had.

        With the optimizer that had them before, or in the run resumed from.
        """
        self._require_open()
        before = self._coordinator.attach_optimizer(source, parameters)
        resumed = {number: self._resumed.pop(number) for number in parameters if number in self._resumed}
        return resumed | dict(before)

    def has_optimizer(self, parameter: int) -> bool:
        """Whether some optimizer has been made for a parameter."""
        return parameter in self._coordinator.owned

    @hidden
    def step(self, source: SettingsSource, *, unscale: float = 1.0) -> StepResult:
        """Update what has a gradient; end the step if that was all."""
        self._require_open()
        self._ledger.line_up(Act.STEP, lambda: self._in_words(source))
        self._ledger.require_free()
        result = self._coordinator.step(source, unscale=unscale)
        self._close_step(updated=not result.skipped)
        if self.open_calls == _PATIENCE:
            self._warn_of_open_step()
        return result

    def _warn_of_open_step(self) -> None:
        waiting = [number for number in self._ledger.unclaimed() if number in self._coordinator.owned]
        if waiting:
            warnings.warn(
                f"{_PATIENCE} calls of step() in a row have not ended a step, as {len(waiting)} parameters keep "
                "gradients for an optimizer that was not stepped. Until a step ends none is counted or planned, and "
                "the record of this one grows: call that optimizer's step(), or its zero_grad() before the others' "
                "step()",
                RuntimeWarning,
                stacklevel=6,
            )

    def _in_words(self, source: SettingsSource) -> str:
        settings = source.settings(self._coordinator.parameters_of(source))
        return f"max_grad_norm={source.max_grad_norm}, {in_words(settings)}"

    def _close_step(self, *, updated: bool) -> None:
        """End the step, unless another optimizer's share is still to come."""
        if not self._ledger.close_step(self._coordinator.owned, updated=updated):
            self.open_calls += 1
            return
        self.open_calls = 0
        self.number += 1  # first: an interrupt may come while the next one is planned, and this one is done
        order = self._ledger.scheduler.order.expected
        self._hurry_in_forward_order(order)
        self.plans.close_step(order)

    def _hurry_in_forward_order(self, order: StepOrder | None) -> None:
        """What backward queued last to first is needed first to last, with its parameters still in memory then."""
        used = [access.unit for access in order.accesses if access.phase is Phase.FORWARD] if order else []
        for unit in reversed(dict.fromkeys(used)):
            if self._queue.pending(unit):
                self._queue.hurry(unit)

    @hidden
    def clip_gradients(self, source: SettingsSource, max_norm: float) -> torch.Tensor:
        """Scale the gradients of `source` to `max_norm` at most; return the norm before."""
        self._require_open()
        self._ledger.scheduler.gradients.line_up(Act.CLIP)
        return self._coordinator.clip_gradients(source, max_norm)

    def prepare_moments(self, given: Mapping[int, Moments]) -> Callable[[], None]:
        """Check moments that are to replace those of these parameters; the function that does it, between steps."""
        return self._paged_moments().prepare(given)

    def read_moments(self, parameters: Sequence[int]) -> list[Moments]:
        """A copy of the moments of these parameters, float32, between steps. Every rank asks for the same."""
        return self._paged_moments().read(parameters)

    def _paged_moments(self) -> PagedMoments:
        self._require_open()
        self._ledger.line_up()
        if self._moments is None:
            raise InvariantError("moments were asked for before the runtime was built")
        return self._moments

    @hidden
    def drop_gradients(self, source: SettingsSource) -> None:
        """Forget the gradients of `source` that no update has claimed.

        Where units were updated early, for good, that counts, and this is the end of the step. It is said in a
        RuntimeWarning, and does not happen again: from the next step on what `source` updates early can be undone.
        """
        self._require_open()
        self._ledger.end_interrupted()
        self._ledger.scheduler.gradients.line_up(Act.DROP)
        spent = self._coordinator.spent
        self._coordinator.drop_gradients(source, asked=True)
        self._ledger.used.difference_update(self._coordinator.parameters_of(source))
        self._ledger.scheduler.gradients.drop_unfinished()
        if spent or self._ledger.is_ending:
            self._close_step(updated=not spent)  # what was updated early has changed before graphs that there are now
        if spent:
            warnings.warn(
                "zero_grad() between backward and step: update='backward' had used some of these gradients already, and"
                " those updates count. From now on they can be undone; where that comes too late, as for the "
                "discriminator in the generator's backward, choose update='auto', 'forward' or 'step'",
                RuntimeWarning,
                stacklevel=4,
            )

    def _require_open(self) -> None:
        self._home.check()
        if self._closed:
            raise TiermemError("the runtime of these parameters is closed; offload the model again to go on")
