"""Several computations through one model, unit by unit: all of them pass a unit before any goes on to the next.

Owns whose turn it is, and the hold on the unit that is being passed. Does not know what is computed, nor hooks: the
gather scheduler says when a computation needs a unit. Guarantees that computations pass a unit in their order, that
each is served whatever units it needs, that after an error the others end where they are, and that no thread is left.

A computation waits when it needs another unit than it needed last. Then the next one runs, up to the same
place. Once all have passed, the unit is let go of and the next one is brought. Where they need different units (experts
that are units of their own) those that are furthest behind go first and the others wait, so that all meet again; a
unit may then be brought more than once.

Stacks of their own (`fibers.py`) rather than a rewritten model: forward and backward of an unmodified model can only be
interrupted inside hooks, and a hook can only wait if its whole stack, autograd's part in it too, waits with it. A
computation whose graph could be cut (`cuts.py`) ends with the unit that forward came to last; what it leaves is gone
back through on the caller's stack.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

import torch

from tiermem.errors import TiermemError
from tiermem.zero3.cuts import Arguments, Cuts
from tiermem.zero3.engine import backward_number
from tiermem.zero3.fibers import Fiber, OwnThread
from tiermem.zero3.gather import Gatherer

RunIn = Callable[[Callable[[], None]], Fiber]


class Computation(Protocol):
    """What runs in lockstep with others, on a thread of its own. `resume` and `pause` surround each piece of it."""

    cuts: Cuts
    """Its graph: where it can be cut, and what is left of it to go back through."""

    def run(self) -> None:
        """Do it, all but what is left of its graph then; interrupted wherever it needs another unit."""

    def resume(self) -> None:
        """It goes on: what it left behind in `pause` is to be put back."""

    def pause(self) -> None:
        """Another one goes on: what the whole process shares (random generators) is to be put away."""


class _AbandonedError(TiermemError):
    """Ends a computation because another one has failed. An Exception, because torch's hooks see no others."""


class _Walker:
    """One computation, and what it runs in.

    `unit`: the one it is in; `wanted`: the one it waits for; `passed`: how many it has entered; `entering`: whether no
    module of `unit` has been called yet.
    """

    def __init__(self, computation: Computation, run_in: RunIn) -> None:
        self.computation = computation
        self.fiber = run_in(self._live)
        self.unit: int | None = None
        self.wanted: int | None = None
        self.passed = 0
        self.entering = False
        self.ended = False
        self.error: BaseException | None = None

    def _live(self) -> None:
        try:
            self.computation.resume()
            self.computation.run()
            self.computation.pause()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self.error = error
        finally:
            self.ended = True


class Lockstep:
    """One pass of several computations. Made for one `run`.

    `run_in`: what each runs in. `complete(unit)` is told when all have passed a unit and nothing holds it, and again of
    every unit when all have ended: meanwhile a graph that still asked for it may have died. `resident`: units that are
    always there, for which nobody waits. `follow()`: see `Device`; computations may each be on a stream of their own.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        complete: Callable[[int], None],
        run_in: RunIn = OwnThread,
        resident: Container[int] = (),
        follow: Callable[[], None] = lambda: None,
    ) -> None:
        self._gatherer = gatherer
        self._follow = follow
        self._resident = resident
        self._complete = complete
        self._run_in = run_in
        self._walkers: list[_Walker] = []
        self._running: _Walker | None = None
        self._held: int | None = None
        # On the caller's thread: the unit that all go back through, and who is just doing so.
        self._due: int | None = None
        self._returning: Computation | None = None
        self._passed: dict[int, None] = {}
        self._abandoned = False

    def run(self, computations: Sequence[Computation]) -> None:
        """Run all to their ends; waits. Raises the first error, after the others have been abandoned."""
        self._walkers = [_Walker(computation, self._run_in) for computation in computations]
        try:
            while walking := [walker for walker in self._walkers if not walker.ended]:
                # The first of those that have passed fewest units.
                wanted = min(walking, key=lambda walker: walker.passed).wanted
                for walker in walking:
                    if walker.wanted == wanted:
                        self._advance(walker)
                self._let_go()
            self._running = None
            self._go_back([walker.computation for walker in self._walkers])
            for unit in self._passed:
                self._complete(unit)
        except BaseException:
            self._abandon()
            raise

    def turn(self, unit: int) -> None:
        """A computation needs `unit`: wait until it is its turn. Does nothing for anybody else.

        Nor where the computation cannot wait, inside a backward on its own stack: then it gets the unit for itself.
        """
        walker = self._running
        if walker is None or not walker.fiber.inside:
            return
        if self._abandoned:
            raise _AbandonedError("another micro-batch has failed")
        if unit in self._resident:
            self._passed[unit] = None
            return
        if unit == walker.unit:
            return
        if backward_number() >= 0:
            walker.computation.cuts.looked_back()
            if not walker.fiber.anywhere:
                self._let_go()
                self._passed[unit] = None
                return
        walker.wanted = unit
        walker.computation.pause()
        walker.fiber.stop()
        if self._abandoned:
            raise _AbandonedError("another micro-batch has failed")
        walker.computation.resume()
        self._follow()
        walker.unit = unit
        walker.passed += 1
        walker.entering = True

    def enter(self, call: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """A module is about to be called, in `call`; returns what to call it with, or None for this."""
        walker = self._running
        if walker is None or walker.unit is None or not walker.entering or backward_number() >= 0:
            return None
        if not walker.fiber.inside:
            return None
        walker.entering = False
        return walker.computation.cuts.enter(call, walker.unit, args, kwargs)

    def leave(self, call: object) -> None:
        """A call has ended."""
        if self._running is not None:
            self._running.computation.cuts.leave(call)

    def keeps_back(self, parameter: torch.Tensor) -> bool:
        """A gradient of `parameter` has arrived on this thread; whether nobody else is to see it yet."""
        computation = self._returning if self._running is None else self._running.computation
        return computation is not None and computation.cuts.keeps_back(parameter)

    def arrived(self, unit: int) -> None:
        """`unit` has been gathered: keep it until all have passed."""
        walker = self._running
        wanted = self._due if walker is None else walker.unit
        if unit == wanted and self._held is None:
            self._gatherer.hold(unit)
            self._held = unit
            self._passed[unit] = None

    @property
    def keeps_one(self) -> bool:
        """Whether a unit is held until all have passed it."""
        return self._held is not None

    def make_way(self, unit: int) -> None:
        """`unit` is computed again on the way back: there may be no room for it beside another that others wait for.

        A checkpoint around several units computes all of them where backward comes to the last, and a reentrant one
        where backward comes to what is in front of it, since that is when its node of the graph was made. A walker that
        can wait there does, and needs no room. Anything else has each of them brought for itself.
        """
        walker = self._running
        computation, due = (self._returning, self._due) if walker is None else (walker.computation, walker.unit)
        if computation is None or unit == due or unit in self._resident:
            return
        if walker is not None and walker.fiber.anywhere:
            return
        computation.cuts.strayed()
        if walker is None:
            self._let_go()

    def _advance(self, walker: _Walker) -> None:
        """Let one computation run until it needs another unit or ends. Raises its error."""
        self._running = walker
        walker.fiber.go()
        if walker.ended:
            walker.fiber.end()  # what it ran in is gone before the pass is over
        error, walker.error = walker.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it keeps this frame: a reference cycle, and with it all that the computation's frames hold

    def _go_back(self, computations: Sequence[Computation]) -> None:
        """Take all back through what they have left, unit by unit."""
        while left := [computation for computation in computations if computation.cuts.units]:
            self._due = max((computation.cuts.units for computation in left), key=len)[-1]
            for computation in left:
                if computation.cuts.units[-1] == self._due:
                    self._returning = computation
                    computation.resume()
                    computation.cuts.go_back()
                    computation.pause()
            self._let_go()
        self._returning = None

    def _let_go(self) -> None:
        unit, self._held = self._held, None
        self._follow()
        if unit is None or self._gatherer.unhold(unit):
            return
        self._gatherer.reshard(unit)
        self._complete(unit)

    def _abandon(self) -> None:
        """End every computation where it waits, one after the other: each leaves its module calls by itself."""
        self._abandoned = True
        running = self._running
        for walker in sorted(self._walkers, key=lambda walker: walker is not running):
            self._running = walker
            walker.fiber.end()
        self._running = None
        unit, self._held = self._held, None
        if unit is not None and not self._gatherer.unhold(unit):
            self._gatherer.reshard(unit)
