"""Which settings make a step shortest, by simulation.

Owns the search: from the default, one knob after the other, three times over. Does not measure and writes no file.
Guarantees that the default is among what was tried, that nothing is preferred to it for less than a hundredth, and that
nothing which was tried is faster than the choice, by the model, by more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tiermem.errors import CapacityError
from tiermem.memory.rounding import round_down
from tiermem.planner.machine import Machine
from tiermem.planner.predict import seconds_of_step
from tiermem.planner.settings import PlanSettings
from tiermem.planner.workload import Workload

WORTH_WHILE = 0.01
_ROUNDS = 3
_MIB = 1 << 20
KNOBS = ("update", "look_ahead", "tile_nbytes", "queue_depth", "block_size")


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings that were tried: which knob was changed (empty: the default), and the simulated seconds of a step."""

    knob: str
    settings: PlanSettings
    seconds: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was tried, in order, and what to use."""

    trials: tuple[Trial, ...]
    chosen: Trial

    @property
    def default(self) -> Trial:
        """The settings that were there to begin with."""
        return self.trials[0]

    def best(self, count: int) -> list[Trial]:
        """The fastest trials with different settings, the chosen one first."""
        found: dict[PlanSettings, Trial] = {self.chosen.settings: self.chosen}
        for trial in sorted(self.trials, key=lambda trial: trial.seconds):
            found.setdefault(trial.settings, trial)
        return list(found.values())[:count]


Seconds = Callable[[PlanSettings], float]


def tune(workload: Workload, machine: Machine, settings: PlanSettings, *, updates: Sequence[str] = ()) -> Tuning:
    """Search around `settings` by simulation. `updates`: update schedules to choose from besides the present one.

    Raises CapacityError if the settings to begin with do not fit.
    """
    return search(settings, lambda tried: seconds_of_step(workload, machine, tried), updates=updates)


def search(settings: PlanSettings, seconds: Seconds, *, updates: Sequence[str] = ()) -> Tuning:
    """The search itself; `seconds` is asked once for each settings, and raises CapacityError for what does not fit."""
    default = Trial("", settings, seconds(settings))
    trials = [default]
    known = {settings}
    best = default
    for knob in KNOBS * _ROUNDS:
        for tried in _neighbours(best.settings, knob, updates):
            if tried not in known:
                known.add(tried)
                with suppress(CapacityError):
                    trials.append(Trial(knob, tried, seconds(tried)))
        best = min(trials, key=lambda trial: trial.seconds)
    worth_while = best.seconds < default.seconds * (1 - WORTH_WHILE)
    return Tuning(tuple(trials), best if worth_while else default)


def _neighbours(settings: PlanSettings, knob: str, updates: Sequence[str]) -> list[PlanSettings]:
    """What a knob can be set to. Look-ahead is also the split of the budget: what is not read ahead is kept."""
    host = settings.host_memory
    if knob == "update":
        return [replace(settings, update=update) for update in updates]
    if knob == "look_ahead":
        shares = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
        return [replace(settings, look_ahead=max(4096, round_down(int(host * share), 4096))) for share in shares]
    if knob == "tile_nbytes":
        sizes = [size * _MIB for size in (1, 2, 4, 8, 16, 32, 64) if size * _MIB * 4 <= host]
        return [replace(settings, tile_nbytes=size) for size in sizes]
    if knob == "queue_depth":
        return [replace(settings, queue_depth=depth) for depth in (1, 2, 4, 8, 16, 32)]
    return [replace(settings, block_size=size * _MIB) for size in (1, 2, 4, 8, 16)]
