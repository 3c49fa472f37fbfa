"""The step as the runtime sees it: between the optimizer's face, the gather scheduler and the update.

Owns which gradients an update has claimed, and the ends of steps: when everything that backward brought has been
claimed or dropped, the scheduler begins anew, the counters close the step and the pager learns the order. Does not
know pages' places or how an update is carried out. Guarantees that a step is ended once, and that an optimizer which
steps some of the parameters leaves the gradients of the others as they are. Used from the compute thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

import torch

from tiermem.errors import TiermemError
from tiermem.optim.coordinator import UpdateCoordinator
from tiermem.optim.service import SettingsSource, StepResult, UpdateQueue
from tiermem.pager.pager import Pager
from tiermem.pager.schedule import Schedule
from tiermem.stats import Counters
from tiermem.zero3.gather import Gatherer
from tiermem.zero3.order import Access, Phase, StepOrder
from tiermem.zero3.scheduler import GatherScheduler


class GradientLedger:
    """Which parameters have a gradient nobody has claimed (`optim.service.GradientBook`)."""

    def __init__(self, units: Sequence[int], gatherer: Gatherer) -> None:
        """`units`: those that have trainable parameters."""
        self._units = units
        self._gatherer = gatherer
        self._claimed: set[int] = set()
        self._scheduler: GatherScheduler | None = None

    def connect(self, scheduler: GatherScheduler) -> None:
        """Take `scheduler` as the source of gradients."""
        self._scheduler = scheduler

    @property
    def scheduler(self) -> GatherScheduler:
        """The source of gradients."""
        if self._scheduler is None:
            raise RuntimeError("the ledger was used before its scheduler was connected")
        return self._scheduler

    def line_up(self) -> None:
        """Let go of what backward holds, and wait until all ranks have come here with all their gradients."""
        self.scheduler.settle()
        self.scheduler.gradients.line_up()

    def present(self, unit: int) -> Sequence[int]:
        """The parameters of a unit with an unclaimed gradient."""
        return [number for number in self.scheduler.gradients.numbers(unit) if number not in self._claimed]

    def is_unclaimed(self, unit: int, parameter: int) -> bool:
        """Whether this parameter of the unit has a gradient that no update has claimed."""
        return parameter in self.present(unit)

    def norms(self, parameters: Sequence[int]) -> list[torch.Tensor]:
        """The 2-norm of each parameter's accumulated gradient."""
        return [self.scheduler.gradients.norm(number) for number in parameters]

    def claimed(self, unit: int, parameters: Sequence[int]) -> None:  # noqa: ARG002 - part of the protocol
        """An update owns these gradients now."""
        self._claimed.update(parameters)

    def begun(self, parameters: Sequence[int]) -> bool:
        """Whether an update has claimed a gradient of one of these parameters since the last step ended."""
        return not self._claimed.isdisjoint(parameters)

    def abandon(self) -> None:
        """Forget all unclaimed gradients and end the step; what updates have claimed is theirs."""
        self.scheduler.forget(sorted(self.unclaimed()))
        self.scheduler.finish_step(updated=True)
        self._claimed.clear()

    def drop(self, parameters: Sequence[int]) -> None:
        """Forget these gradients as if backward had not brought them."""
        if self.unclaimed() - set(parameters):
            self.scheduler.forget(parameters)
        else:
            self.scheduler.drop_gradients()
            self._claimed.clear()

    def require_free(self) -> None:
        """Raise TiermemError if somebody keeps a view of parameters that are about to be updated."""
        for unit in self._units:
            if self.present(unit):
                self._gatherer.require_free(unit)

    @property
    def is_mid_step(self) -> bool:
        """Whether some gradients of this step have been claimed by an update and the step is not over."""
        return bool(self._claimed)

    def unclaimed(self) -> set[int]:
        """All parameters with an unclaimed gradient."""
        return {number for unit in self._units for number in self.present(unit)}

    def close_step(self, owned: Container[int], *, updated: bool) -> bool:
        """After an optimizer's step: whether the whole step is over, or another optimizer's share is still to come.

        `owned`: parameters that some optimizer has. Gradients of the others nobody waits for; they end with the step.
        Where nothing was computed since the last step ended, another optimizer's call has ended it: both are one step.
        """
        if self.scheduler.order.position == 0:
            return False
        if any(number in owned for number in self.unclaimed()):
            self.scheduler.forget(sorted(self._claimed), updated=True)
            self._claimed.clear()
            return False
        self.scheduler.finish_step(updated=updated)
        self._claimed.clear()
        return True


class Steps:
    """The `UpdateService` that optimizers find: the coordinator, with what surrounds a step."""

    def __init__(
        self,
        coordinator: UpdateCoordinator,
        ledger: GradientLedger,
        queue: UpdateQueue,
        pager: Pager,
        counters: Counters,
        *,
        plan: Callable[[Sequence[Access], str], Schedule],
        update: str,
    ) -> None:
        self._coordinator = coordinator
        self._ledger = ledger
        self._queue = queue
        self._pager = pager
        self._counters = counters
        self._plan = plan
        self._update = update
        self._planned: tuple[Access, ...] = ()
        self._resumed: dict[int, int] = {}
        self._closed = False
        self.number = 0  # steps done

    def resume(self, number: int, counts: Mapping[int, int]) -> None:
        """Go on after `number` steps; optimizers made before the next one take over these update counts."""
        self.number = number
        self._resumed = dict(counts)

    def close(self) -> None:
        """From now on every other verb raises TiermemError."""
        self._closed = True

    def attach_optimizer(self, source: SettingsSource, parameters: Sequence[int]) -> Mapping[int, int]:
        """Make `source` the optimizer of `parameters`; returns the updates they have had in the run resumed from."""
        self._check_open()
        self._coordinator.attach_optimizer(source, parameters)
        return {number: self._resumed[number] for number in parameters if number in self._resumed}

    def step(self, source: SettingsSource) -> StepResult:
        """Update what has a gradient; end the step if that was all."""
        self._check_open()
        scheduler = self._ledger.scheduler
        self._ledger.line_up()
        self._ledger.require_free()
        result = self._coordinator.step(source)
        if self._ledger.close_step(self._coordinator.owned, updated=not result.skipped):
            order = scheduler.order.expected
            self._hurry_in_forward_order(order)
            if order is not None and order.accesses != self._planned:
                self._planned = order.accesses
                self._pager.set_schedule(self._plan(order.accesses, self._update))
            else:
                self._pager.begin_step()
            self._counters.step()
            self._resumed.clear()
            self.number += 1
        return result

    def _hurry_in_forward_order(self, order: StepOrder | None) -> None:
        """What backward queued last to first is needed first to last, with its parameters still in memory then."""
        used = [access.unit for access in order.accesses if access.phase is Phase.FORWARD] if order else []
        for unit in reversed(dict.fromkeys(used)):
            if self._queue.pending(unit):
                self._queue.hurry(unit)

    def clip_gradients(self, source: SettingsSource, max_norm: float) -> torch.Tensor:
        """Scale the gradients of `source` to `max_norm` at most; return the norm before."""
        self._check_open()
        self._ledger.scheduler.gradients.line_up()
        return self._coordinator.clip_gradients(source, max_norm)

    def drop_gradients(self, source: SettingsSource) -> None:
        """Forget the gradients of `source` that no update has claimed."""
        self._check_open()
        self._ledger.scheduler.gradients.line_up()
        self._coordinator.drop_gradients(source)

    def wait_updates(self) -> None:
        """Wait until all queued updates are done."""
        self._check_open()
        self._coordinator.wait_updates()

    def _check_open(self) -> None:
        if self._closed:
            raise TiermemError("the runtime of these parameters is closed; offload the model again to go on")
