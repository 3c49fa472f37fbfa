"""Time that only passes when something is waited for.

Owns the simulated clock: processes (generators that yield the signals they wait for), and the resources whose work
takes time. Does not know what the work is. Guarantees that the same processes and resources give the same course
of events, that time never goes back, and that a process which waits for what cannot come is reported.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

# Work that is less than this many seconds from its end is done: below the resolution of sums of floats.
EPSILON = 1e-12

T = TypeVar("T")


class Signal:
    """Something that happens once; processes wait for it."""

    __slots__ = ("fired", "waiting")

    def __init__(self) -> None:
        self.fired = False
        self.waiting: list[Process] = []


Process = Generator[Signal, None, None]


class Resource(Protocol):
    """Works while time passes."""

    def next_end(self) -> float:
        """Seconds until some of its work ends as things are now; infinity when it is idle."""

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass, never more than `next_end`; report what has ended."""


class Clock:
    """Runs processes and resources.

    Attributes:
        now: seconds since the beginning.
        settle: called after all processes have gone as far as they can, before time passes.
        passing: called with the seconds that are about to pass.
        stuck: called when nothing is left to wait for; returns whether it could do anything about it.
    """

    def __init__(
        self,
        resources: Sequence[Resource],
        *,
        settle: Callable[[], None],
        passing: Callable[[float], None],
        stuck: Callable[[], bool],
    ) -> None:
        self.now = 0.0
        self._resources = resources
        self._settle = settle
        self._passing = passing
        self._stuck = stuck
        self._ready: deque[Process] = deque()

    def start(self, process: Process) -> None:
        """Have a process run."""
        self._ready.append(process)

    def fire(self, signal: Signal) -> None:
        """It has happened: whoever waits for it goes on."""
        if not signal.fired:
            signal.fired = True
            self._ready.extend(signal.waiting)
            signal.waiting.clear()

    def running_until(self, signal: Signal) -> Generator[None, None, bool]:
        """Let time pass until the signal has fired, pausing before each stretch that passes; False: it cannot come."""
        while not signal.fired:
            self._run_ready()
            self._settle()
            if self._ready or signal.fired:
                continue
            seconds = min([resource.next_end() for resource in self._resources])
            if math.isinf(seconds):
                if not self._stuck():
                    return False
                continue
            yield
            self._passing(seconds)
            self.now += seconds
            for resource in self._resources:
                resource.advance(seconds)
        return True

    def _run_ready(self) -> None:
        while self._ready:
            process = self._ready.popleft()
            for signal in process:
                if not signal.fired:
                    signal.waiting.append(process)
                    break


def carried_out(course: Generator[None, None, T]) -> T:
    """What a course with pauses comes to, without pausing."""
    while True:
        try:
            next(course)
        except StopIteration as end:
            result: T = end.value
            return result


class Pulse:
    """Something that happens over and over, when it is due. `next`: what to wait for until it has happened again."""

    def __init__(self) -> None:
        self.due = False
        self.next = Signal()

    def beat(self, clock: Clock) -> None:
        """It has happened."""
        happened, self.next = self.next, Signal()
        clock.fire(happened)


class Gate:
    """Lets at most so many in at once."""

    def __init__(self, clock: Clock, width: int) -> None:
        self._clock = clock
        self._free = width
        self._waiting: deque[Signal] = deque()

    def enter(self) -> Signal:
        """What to wait for before going in."""
        signal = Signal()
        if self._free:
            self._free -= 1
            signal.fired = True
        else:
            self._waiting.append(signal)
        return signal

    def leave(self) -> None:
        """One has come out."""
        if self._waiting:
            self._clock.fire(self._waiting.popleft())
        else:
            self._free += 1
