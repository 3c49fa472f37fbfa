"""The plan of the step that comes: made again whenever the recorded order changes, or the look-ahead.

Owns what was planned for last. Does not know how an order is recorded, nor how a look-ahead is chosen. Guarantees that
the counters close each step once, and that the pager is at the beginning of a step after it. Used from the compute
thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiermem.look_ahead import LookAhead
from tiermem.optim.schedules import UpdateSchedule
from tiermem.pager.page import PageKey
from tiermem.pager.pager import Pager
from tiermem.pager.schedule import Schedule, Step
from tiermem.planner.steps import Arrivals
from tiermem.runtime.blueprint import Blueprint
from tiermem.runtime.look_ahead import LookAheadChoice
from tiermem.stats import Counters
from tiermem.zero3.order import Access, StepOrder

Touches = Sequence[tuple[int, PageKey]]


class StepPlans:
    """Between the end of a step and the pager."""

    def __init__(
        self,
        pager: Pager,
        counters: Counters,
        blueprint: Blueprint,
        schedule: UpdateSchedule,
        choice: LookAheadChoice,
    ) -> None:
        self._pager = pager
        self._counters = counters
        self._blueprint = blueprint
        self._schedule = schedule
        self._choice = choice
        self._planned: tuple[Sequence[Access], Touches, bool, Arrivals, str] | None = None
        self._followed: tuple[Schedule | None, int] = (None, choice.look_ahead.nbytes)
        pager.waits.begin_step()  # what was waited while pages were filled belongs to none

    @property
    def look_ahead(self) -> LookAhead:
        """The look-ahead in use."""
        return self._choice.look_ahead

    def close_step(self, order: StepOrder | None) -> None:
        """The step is over; `order`: what is expected of the next, None: nobody knows."""
        self._pager.waits.begin_step()
        acts_as = self._schedule.acts_as
        if order is not None:
            arrivals = self._blueprint.arrivals(order)
            planned = order.accesses, order.touches, order.together, arrivals, acts_as
            if planned != self._planned:
                self._planned = None  # until all of it is done: after an interrupt the next step is planned
                self._choice.begin_anew(order, acts_as)
                self._follow(self._blueprint.plan(order, arrivals, acts_as))
                self._planned = planned
                self._counters.step()
                return
        self._pager.begin_step()
        self._choice.step_closed(self._counters.step().seconds)
        schedule, nbytes = self._followed
        if schedule is not None and nbytes != self._choice.look_ahead.nbytes:
            self._follow(schedule)

    def evaluate(self, accesses: Sequence[Access] | Step) -> None:
        """An evaluation uses units in this order, over and over; or what the step does beside it."""
        if isinstance(accesses, Step):
            self._pager.evaluate(accesses)
        else:
            self._pager.evaluate(self._blueprint.plan(StepOrder(tuple(accesses)), {}, self._schedule.acts_as))

    def _follow(self, schedule: Schedule) -> None:
        nbytes = self._choice.look_ahead.nbytes
        self._pager.set_schedule(schedule, look_ahead=nbytes)
        self._followed = schedule, nbytes
