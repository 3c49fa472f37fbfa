"""The look-ahead of a run: as configured, as planned, or refined by the run's own first steps.

Owns the simulation that goes on between steps, a little at a time. Does not measure (the timeline has it) and does not
decide (`planner.refining`). Guarantees that a look-ahead which was given stays, that refining holds no step up by more
than a fiftieth and one portion of simulation, and that what cannot be simulated leaves the planned one.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import replace

from tiermem.config import Config
from tiermem.errors import TiermemError
from tiermem.look_ahead import LookAhead
from tiermem.planner.footprint import kept_nbytes
from tiermem.planner.observed import observe, observed_design
from tiermem.planner.refining import COUNTED, LookAheadControl, Stage, foreseeing
from tiermem.planner.settings import PlanSettings
from tiermem.runtime.blueprint import Blueprint
from tiermem.timeline import Timeline
from tiermem.zero3.order import StepOrder

# Of a step's seconds, what simulating after it may take: a second or two in all, of the thread that computes. On a
# thread of its own it would take as much from it, by the interpreter lock, and at moments of its own choice.
SHARE = 0.02


class FixedLookAhead:
    """The look-ahead that was given or planned; it stays, whatever it is told (see `RefinedLookAhead`)."""

    def __init__(self, nbytes: int, reason: str) -> None:
        self.look_ahead = LookAhead(nbytes, nbytes, reason)

    def begin_anew(self, order: StepOrder, update: str) -> None:
        """Nothing changes."""

    def step_closed(self, seconds: float) -> None:
        """Nothing is measured."""


class RefinedLookAhead:
    """The planned look-ahead at first, then what simulations of the run's own steps find better."""

    def __init__(self, control: LookAheadControl, timeline: Timeline, blueprint: Blueprint, config: Config) -> None:
        self._control = control
        self._timeline = timeline
        self._blueprint = blueprint
        self._config = config
        self._order = StepOrder()
        self._update = ""
        self._course: Generator[None, None, Mapping[int, float]] | None = None
        self._spent = 0.0  # seconds of the present step that went into simulating

    @property
    def look_ahead(self) -> LookAhead:
        """What is in use from the next step on."""
        return LookAhead(self._control.in_use, self._control.planned, self._control.reason)

    def begin_anew(self, order: StepOrder, update: str) -> None:
        """Steps will be like `order` from now on, updated as `update` says; what was found for others is void."""
        self._order, self._update, self._course = order, update, None
        self._control.begin_anew()
        if order.touches:
            self._control.settle("planned; not refined where activations are paged, which are not simulated")

    def step_closed(self, seconds: float) -> None:
        """A step like the recorded one has ended; it took `seconds`."""
        seconds, self._spent = seconds - self._spent, 0.0
        self._control.measured(seconds)
        if self._control.stage is Stage.FORESEEING:
            self._foresee(SHARE * seconds)

    def _foresee(self, allowance: float) -> None:
        """Simulate for `allowance` seconds, and for one portion longer at most."""
        began = time.perf_counter()
        try:
            self._course = self._course or self._begin()
            while time.perf_counter() - began < allowance:
                next(self._course)
        except StopIteration as end:
            self._course = None
            self._control.foreseen(end.value)
        except TiermemError as error:
            self._course = None
            self._control.settle(f"planned; not refined: {error}")
        except BaseException:
            self._course = None  # an interrupt has ended it: it begins anew
            raise
        self._spent = time.perf_counter() - began

    def _begin(self) -> Generator[None, None, Mapping[int, float]]:
        """Raises ConfigError where there is nothing to simulate, or the step is of a kind that is not simulated."""
        config, blueprint = self._config, self._blueprint
        settings = PlanSettings(
            host_memory=blueprint.host_nbytes,
            update=self._update,
            block_size=config.block_nbytes,
            queue_depth=config.queue_depth,
        )
        design = observed_design(
            observe(self._timeline.events(), COUNTED),
            self._order.accesses,
            blueprint.sizes,
            settings,
            blueprint.footprint,
            types=(str(config.param_dtype), config.moments),
            runs=blueprint.runs(self._order.contributions),
        )
        undone = config.update == "auto" and self._update == "backward"
        design = replace(design, undone=undone, resting=blueprint.resting)
        return foreseeing(design, self._control.candidates())


LookAheadChoice = FixedLookAhead | RefinedLookAhead
"""Who says how far ahead is fetched."""


def choose_look_ahead(config: Config, blueprint: Blueprint, timeline: Timeline, *, ranks: int) -> LookAheadChoice:
    """Refined where that can be done; otherwise the record says why not."""
    planned = blueprint.footprint.look_ahead
    if config.look_ahead_nbytes is not None:
        return FixedLookAhead(planned, "as configured")
    if ranks > 1:
        return FixedLookAhead(planned, "planned; not refined over ranks, whose seconds depend on each other's choices")
    if blueprint.device is not None:
        return FixedLookAhead(planned, "planned; not refined beside a device, whose seconds by unit are not measured")
    highest = (blueprint.host_nbytes - kept_nbytes(blueprint.sizes)) // 2
    control = LookAheadControl(planned, highest=highest)
    return RefinedLookAhead(control, timeline, blueprint, config)
