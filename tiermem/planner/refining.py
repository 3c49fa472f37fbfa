"""Another look-ahead than the planned one, where measured steps and their simulation both speak for it.

Owns the course of a refinement: measure, foresee, try, keep or take back. Does not measure, simulates only what it is
given, and knows no threads. Guarantees that what is in use is the planned look-ahead or a candidate, that for one order
of a step it changes at most twice, and that the same numbers lead to the same choice.
"""

from __future__ import annotations

import enum
import statistics
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace

from tiermem.figures import format_seconds
from tiermem.memory.sizes import format_bytes
from tiermem.planner.design import Design
from tiermem.planner.predict import coarsened
from tiermem.planner.simulate import simulating

# Steps after a change that do not count: what is in memory comes from the look-ahead before.
SETTLING = 1
# Steps whose median counts: of three, one may have been disturbed (a commit, an evaluation).
COUNTED = 3
# What another look-ahead has to gain by simulation. What a simulation is off by, as far as the run's own numbers differ
# from the machine's, was seen to be less than that (README.md beside this file).
WORTH_WHILE = 0.03
# By what share the simulated step may differ from the measured one for the simulation to be listened to.
TRUST = 0.25
# Candidates, as multiples of the planned one.
FACTORS = (0.25, 0.5, 2.0)
_LEAST = 4096
_BEGUN = "planned; the first steps are measured"


class Stage(enum.Enum):
    """Where a refinement is."""

    MEASURING = "measuring"
    FORESEEING = "foreseeing"
    TRYING = "trying"
    SETTLED = "settled"


class LookAheadControl:
    """The look-ahead of steps that are alike.

    Attributes:
        planned: bytes, by rule.
        in_use: bytes, from the next step on.
        stage: where the refinement is; after SETTLED nothing changes until `begin_anew`.
        reason: why this one is in use, for people.
    """

    def __init__(self, planned: int, highest: int) -> None:
        """`highest`: the most bytes that a candidate may have; `planned` may be above it."""
        self.planned = planned
        self._highest = highest
        self._before = 0.0
        self._seconds: deque[float] = deque(maxlen=COUNTED)
        self._steps = 0
        self.in_use = planned
        self.stage = Stage.MEASURING
        self.reason = _BEGUN

    def begin_anew(self) -> None:
        """Steps have changed: back to what was planned."""
        self.in_use = self.planned
        self._go(Stage.MEASURING, _BEGUN)

    def candidates(self) -> list[int]:
        """What is to be foreseen: what is in use first, then what might be better."""
        multiples = (int(self.planned * factor) for factor in FACTORS)
        return [self.planned, *(nbytes for nbytes in multiples if _LEAST <= nbytes <= self._highest)]

    def measured(self, seconds: float) -> None:
        """A step with `in_use` has taken so long."""
        self._steps += 1
        if self._steps > SETTLING:
            self._seconds.append(seconds)
        if len(self._seconds) < COUNTED:
            return
        if self.stage is Stage.MEASURING:
            self.stage, self.reason = Stage.FORESEEING, "planned; others are simulated"
        elif self.stage is Stage.TRYING:
            self._judge()

    def foreseen(self, seconds: Mapping[int, float]) -> None:
        """Simulated seconds of a step with each of `candidates()`. Only while FORESEEING."""
        if self.stage is not Stage.FORESEEING or set(seconds) != set(self.candidates()):
            raise ValueError(f"{self.stage}: expected seconds of {self.candidates()}, found {list(seconds)}")
        measured, present = statistics.median(self._seconds), seconds[self.planned]
        if abs(present - measured) > TRUST * measured:
            self.settle(
                f"planned; a step is simulated to take {format_seconds(present)} and takes {format_seconds(measured)}"
            )
            return
        best = min(seconds, key=lambda nbytes: (seconds[nbytes], nbytes))
        gain = 1 - seconds[best] / present
        if gain < WORTH_WHILE:
            self.settle(f"planned; by simulation no other gains {WORTH_WHILE:.0%}")
            return
        self._before, self.in_use = measured, best
        self._go(Stage.TRYING, f"tried, since by simulation a step is {gain:.0%} shorter")

    def settle(self, reason: str) -> None:
        """What is in use stays."""
        self.stage, self.reason = Stage.SETTLED, reason

    def _judge(self) -> None:
        after, tried = statistics.median(self._seconds), format_bytes(self.in_use)
        if after > self._before:
            self.in_use = self.planned
            self.settle(
                f"planned; with {tried} a step took {format_seconds(after)} instead of {format_seconds(self._before)}"
            )
        else:
            self.settle(f"refined: a step takes {format_seconds(after)} instead of {format_seconds(self._before)}")

    def _go(self, stage: Stage, reason: str) -> None:
        self.stage, self.reason = stage, reason
        self._steps = 0
        self._seconds.clear()


def foreseeing(design: Design, look_aheads: Sequence[int]) -> Generator[None, None, Mapping[int, float]]:
    """Simulated seconds of a step with each look-ahead, coarsely, in portions; see `simulate.simulating`.

    Raises CapacityError where a step does not get on.
    """
    found = {}
    for nbytes in look_aheads:
        coarse, share = coarsened(replace(design, footprint=replace(design.footprint, look_ahead=nbytes)))
        simulation = yield from simulating(coarse)
        found[nbytes] = simulation.seconds / share
    return found
