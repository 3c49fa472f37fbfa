"""The order in which a step uses its units, recorded so that the next step can be planned.

Owns the record of one step and the frozen result of the last one. Does not know modules or what is done with the
order. Guarantees that a frozen order never changes, and that a step which deviates is recorded like any other:
a surprise is counted, never an error. What is evaluated between, if only once, and what brought gradients that were all
dropped, is not recorded: the record does not grow with it. Nor, past `_longest`, with what is computed outside of
`torch.no_grad` and never goes backward.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType

from tiermem.pager.page import PageKey
from tiermem.pager.schedule import Step
from tiermem.zero3.gradless import Gradless
from tiermem.zero3.turns import Turns

# One step that has so many times as many accesses as that before, and so many besides, says nothing of the next: it has
# a validation without torch.no_grad() in it, say. Planning for 10,000 accesses takes more than a second.
_TIMES, _BESIDES = 64, 1 << 14
_MOST = 1 << 20  # of a step that none was before; some 60 bytes each


class Phase(enum.Enum):
    """Why a unit is used: to compute forward, to compute backward, or to write its gradients."""

    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Access:
    """One use of a unit, from when it was needed until it was let go."""

    unit: int
    phase: Phase


Stretch = tuple[Access, ...]


@dataclass(frozen=True, slots=True)
class StepOrder:
    """A finished step: accesses in order, and gradient contributions by global parameter number (absent: none).

    `touches`: pages of activations that were written or read, each with how many accesses came before it. They are no
    part of the comparison: how many there are depends on the input. `together`: whether several micro-batches went
    through a unit before the next one. `gradless`: what was used without gradients and belongs to the step, by how many
    accesses came before it. `stretches`: all that was used so, whether it belongs to the step or not. `longest`: how
    many accesses of the next step are recorded.
    """

    accesses: tuple[Access, ...] = ()
    contributions: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    touches: tuple[tuple[int, PageKey], ...] = field(default=(), compare=False)
    together: bool = field(default=False, compare=False)
    gradless: Mapping[int, Stretch] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    stretches: frozenset[Stretch] = field(default=frozenset(), compare=False)
    longest: int = field(default=_MOST, compare=False)


@dataclass(slots=True)
class _Arrived:
    """How many gradients have come, by parameter, and how many micro-batches have brought some, by unit."""

    contributions: Counter[int] = field(default_factory=Counter)
    batches: Counter[int] = field(default_factory=Counter)


class OrderRecorder:
    """Records the present step and compares it with the one before."""

    def __init__(self, apart: Container[int] = (), *, alone: bool = False, holds: bool = True) -> None:
        """`apart`: units whose gradients are taken beside those of others, so that no room is made for them ahead.

        `alone`: there are no other ranks, so that steps of the same uses with other gradients may be other kinds.
        `holds`: the gradients of other units are held until those of another one come.
        """
        self._apart = apart
        self._holds = holds
        self._turns: Turns[StepOrder] = Turns(attrgetter("accesses") if alone else _uses)
        self._accesses: list[Access] = []
        self._arrived = _Arrived()
        self._touches: list[tuple[int, PageKey]] = []
        # How far it has come of what is expected; None: it has left that.
        self._place: int | None = 0
        self._together = False
        self._gradless = Gradless[Access]()  # what outermost calls without gradients have used after everything else
        self._belonging: dict[int, Stretch] = {}  # what they used before, as in `StepOrder`
        self._stretches: set[Stretch] = set()
        # Told what is used over and over without gradients, from now on, and what the step does.
        self.evaluates: Callable[[Sequence[Access] | Step], object] = lambda _: None

    @property
    def expected(self) -> StepOrder | None:
        """What this step is expected to do: what the last one did, or that in whose turn it is; None in the first."""
        return self._turns.expected

    @property
    def position(self) -> int:
        """How many accesses this step has made."""
        return len(self._accesses)

    @property
    def has_begun(self) -> bool:
        """Whether anything belongs to this step: what was used last, without gradients, may yet prove not to."""
        return self.position > len(self._gradless.used)

    def upcoming(self) -> int | None:
        """The unit that comes next if this step goes on as expected; None if nobody knows, or none comes."""
        return next((access.unit for _, access in self._coming() if access.phase is not Phase.GRADIENT), None)

    def upcoming_gradients(self) -> int | None:
        """The unit whose gradients are the next access if this step goes on as expected; None if they are not.

        Accesses of units whose gradients are taken apart may come between.
        """
        coming = next((access for _, access in self._coming() if access.unit not in self._apart), None)
        return coming.unit if coming is not None and coming.phase is Phase.GRADIENT else None

    def _coming(self) -> Iterator[tuple[int, Access]]:
        """The places and accesses that are left if this step goes on as expected; none if nobody knows."""
        if self.expected is not None and self._place is not None:
            ahead = self.expected.accesses
            for place in range(self._place, len(ahead)):
                yield place, ahead[place]

    def access(self, unit: int, phase: Phase, *, gradless: bool = False) -> None:
        """Note the next access; `gradless`: for a call from outside that computes no gradients.

        Where such calls use a unit again, and nothing with gradients comes in between, they are an evaluation: no part
        of the step, or it would grow with every batch evaluated. Where they use each once they belong to it if they did
        the same in the step before (a frozen encoder, not a batch that is evaluated now and then), or in the first.
        """
        access = Access(unit, phase)
        if self._gradless.rested:  # it is where it was, and rests no longer
            self._gradless.rested = False
            self.evaluates(Step.PAUSES)
        if not gradless:
            self._end_gradless()
        elif self._evaluate(access):
            return
        if not self._accesses:
            self.evaluates(Step.BEGINS)
        elif len(self._gradless.used) == 1:
            self.evaluates(Step.PAUSES)
        if self.expected is not None and self._place is not None:
            self._place = _behind(self.expected.accesses, self._place, access)
        if gradless or self.position < _longest(self.expected):
            self._accesses.append(access)

    def rest(self) -> None:
        """Units are about to be written by hand. Where no step has begun, nobody knows how often in a row."""
        if not self.has_begun:
            self._gradless.rested = bool(self._gradless)
            self.evaluates(Step.RESTS)

    def _evaluate(self, access: Access) -> bool:
        """Note what is used without gradients; whether for an evaluation, in which nothing is expected to come next."""
        used = self._gradless.used
        again = self._gradless.note(access)
        if used and self._gradless.evaluates:
            self._place = None
            del self._accesses[-len(used) :]
        if again:
            self.evaluates(again)
        return self._gradless.evaluates

    def _end_gradless(self) -> None:
        """What is computed now is computed with gradients.

        After what was not expected here those who are told have the step go on where it was. So does the record where
        this is no part of the step, but with what was expected here: it may have been within an evaluation.
        """
        if not self._gradless:
            return
        used, before = self._gradless.used, self.expected
        self._gradless.end()
        place = self.position - len(used)
        if used:
            self._stretches.add(used)
        there = None if self._place is None else self._place - len(used)
        expected = before is not None and there is not None and before.gradless.get(there) == used
        if used and place < _longest(before) and (before is None or used in before.stretches):
            self._belonging[place] = used
        else:
            del self._accesses[place:]
            self._place = _place_of(self._accesses, before)
            there = next((at for at, access in self._coming() if access.phase is not Phase.GRADIENT), None)
            if before is not None and there is not None and there in before.gradless:
                used = self._belonging[place] = before.gradless[there]
                self._place = there + len(used)
                self._accesses += used
        if not expected:
            self.evaluates(Step.GOES_ON if place else Step.BEGINS)

    def touch(self, key: PageKey) -> None:
        """Note that a page of activations is written or read after the accesses so far."""
        self._end_gradless()
        if self.position < _longest(self.expected):
            self._touches.append((self.position, key))

    def gradient(self, unit: int, parameter: int) -> None:
        """Note that a gradient is about to arrive: an access to the unit's, if it is the first of its micro-batch.

        No access where nothing came in between and they are held: micro-batches that go through a unit together find
        them so, unless they are taken apart.
        """
        if self._arrived.contributions[parameter] < self._arrived.batches[unit]:
            return
        self._arrived.batches[unit] += 1
        coming = Access(unit, Phase.GRADIENT)
        held = next((access for access in reversed(self._accesses) if access.unit not in self._apart), None)
        self._together = self._together or held == coming
        if held != coming or not self._holds:
            self.access(unit, Phase.GRADIENT)

    def contribution(self, parameter: int) -> int:
        """Note that a gradient arrived; returns how many have arrived for this parameter in this step."""
        self._arrived.contributions[parameter] += 1
        return self._arrived.contributions[parameter]

    def more_after(self, parameter: int) -> bool:
        """Whether the gradient that is arriving is not the parameter's last, if this step goes on as expected."""
        before = 0 if self.expected is None else self.expected.contributions.get(parameter, 0)
        return self._arrived.contributions[parameter] + 1 < before

    def forget_contributions(self) -> None:
        """Say that the gradients of this step were dropped: it begins again as far as they are concerned."""
        self._arrived = _Arrived()

    def begin_again(self) -> None:
        """Say that all gradients of this step were dropped: it begins after the last use of a unit by a backward.

        What was used forward since is the beginning of it: scripts call `zero_grad` before backward, too.
        """
        self.forget_contributions()
        self._end_gradless()
        uses = self._accesses
        first = next((at for at in range(len(uses), 0, -1) if uses[at - 1].phase is not Phase.FORWARD), 0)
        self._accesses = uses[first:]
        self._touches = [(position - first, key) for position, key in self._touches if position > first]
        self._belonging = {place - first: used for place, used in self._belonging.items() if place >= first}
        self._place = _place_of(self._accesses, self.expected)

    def all_arrived(self, parameters: tuple[int, ...]) -> bool:
        """Whether every one of `parameters` has had exactly the contributions the last step had, and one at least."""
        if self.expected is None:
            return False
        before = self.expected.contributions
        # In this order: what comes last is mostly the first of them, and then one look is enough.
        return all(self._arrived.contributions[number] == before.get(number, 0) for number in parameters) and any(
            self._arrived.contributions[number] for number in parameters
        )

    def batch_arrived(self, unit: int, parameters: tuple[int, ...]) -> bool:
        """Whether every one of the unit's `parameters` has had what this batch brings, if it is as in the last step.

        False for a batch more than that step had: nobody knows what it brings.
        """
        if self.expected is None:
            return False
        batches, before = self._arrived.batches[unit], self.expected.contributions
        return all(
            self._arrived.contributions[number] >= min(batches, before.get(number, 0)) for number in parameters
        ) and any(before.get(number, 0) >= batches for number in parameters)

    def finish(self) -> StepOrder | None:
        """Freeze the present step and begin the next one; what is expected of that, as `turns.py` has it.

        A step whose gradients were all dropped (it was skipped) says nothing of how many the next one brings: what was
        expected of it is expected again. So are all accesses behind a step longer than is recorded; None: there were
        none before.
        """
        self._end_gradless()
        contributions: Mapping[int, int] = MappingProxyType(dict(self._arrived.contributions))
        if not contributions and self.expected is not None:
            contributions = self.expected.contributions
        if self.position < _longest(self.expected):
            order = StepOrder(
                tuple(self._accesses),
                contributions,
                tuple(self._touches),
                self._together,
                MappingProxyType(self._belonging),
                frozenset(self._stretches.union(self._belonging.values())),
                min(_MOST, _BESIDES + _TIMES * self.position),
            )
            self._turns.end(order)
        elif self.expected is not None:  # a second one in a row is what steps are now
            self._turns.expected = replace(self.expected, contributions=contributions, longest=_MOST)
        self._accesses = []
        self._arrived = _Arrived()
        self._touches = []
        self._belonging, self._stretches = {}, set()
        self._place = 0
        self._together = False
        return self.expected


def _longest(before: StepOrder | None) -> int:
    """How many accesses of a step are recorded."""
    return _MOST if before is None else before.longest


def _uses(order: StepOrder) -> Stretch:
    """What is the same on all ranks: which of them have gradients, and so these accesses, may depend on the data."""
    return tuple(access for access in order.accesses if access.phase is not Phase.GRADIENT)


def _behind(expected: Sequence[Access], place: int, access: Access) -> int | None:
    """Where a step is that was at `place` of what is expected, and makes this access; None: it is off that course.

    Only uses lead off it. Gradients that come besides or stay away do not: all ranks expect the same uses.
    """
    at = place
    while at < len(expected) and expected[at] != access and expected[at].phase is Phase.GRADIENT:
        at += 1
    if at < len(expected) and expected[at] == access:
        return at + 1
    return place if access.phase is Phase.GRADIENT else None


def _place_of(accesses: Sequence[Access], expected: StepOrder | None) -> int | None:
    """Where a step is that has made these accesses, as `_behind`; at the beginning, if nobody knows what comes."""
    place: int | None = 0
    for access in accesses if expected is not None else ():
        place = None if expected is None or place is None else _behind(expected.accesses, place, access)
    return place
