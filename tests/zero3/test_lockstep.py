"""Computations in lockstep: one at a time, each its own way, units brought once where they agree, no thread left."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from doubles_combinations import number_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import TiermemError
from tiermem.zero3.fibers import OwnStack, OwnThread
from tiermem.zero3.lockstep import Lockstep

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.parametrize("stacks", [False, True], ids=["threads", "stacks"]),
]


class FakeGatherer:
    """Counts holds; a unit may be used while it is held by the lockstep."""

    def __init__(self) -> None:
        self.holds: dict[int, int] = {}
        self.brought: list[int] = []
        self.resharded: list[int] = []

    def hold(self, unit: int) -> None:
        self.holds[unit] = self.holds.get(unit, 0) + 1
        self.brought.append(unit)

    def unhold(self, unit: int) -> int:
        self.holds[unit] -= 1
        return self.holds[unit]

    def reshard(self, unit: int) -> bool:
        assert not self.holds[unit]
        self.resharded.append(unit)
        return True


class Script:
    """Needs the units of `way`, one after the other, and leaves those of `back`; fails before number `failing`."""

    def __init__(self, world: World, number: int, way: list[int], back: Sequence[int] = ()) -> None:
        self.world, self.number, self.way = world, number, way
        self.failing: int | None = None
        self.units = list(reversed(back))
        self.cuts = self
        self.failing_back: int | None = None
        self.away = True
        self.unwound = False
        world.scripts.append(self)

    def run(self) -> None:
        try:
            for place, unit in enumerate(self.way):
                if place == self.failing:
                    self.world.failed_at = len(self.world.used)
                    raise ValueError("mine")
                self.world.lockstep.turn(unit)
                self.world.lockstep.arrived(unit)
                self.world.use(self, unit)
        finally:
            self.unwound = True
            self.world.unwound.append(self.number)

    def go_back(self) -> None:
        assert threading.current_thread() is threading.main_thread()
        unit = self.units.pop()
        if len(self.units) == self.failing_back:
            raise ValueError("mine")
        for needed in (unit, OTHER, unit):
            self.world.lockstep.turn(needed)
            self.world.lockstep.arrived(needed)
        self.world.use(self, unit)

    def leave(self, _: object) -> None:
        pass

    def enter(self, *_: object) -> None:
        return None

    def looked_back(self) -> None:
        raise AssertionError("there is no backward")

    def strayed(self) -> None:
        raise AssertionError("nothing is computed again")

    def keeps_back(self, parameter: object) -> bool:
        return parameter == self.number

    def resume(self) -> None:
        assert self.away
        self.away = False

    def pause(self) -> None:
        assert not self.away
        self.away = True


class World:
    def __init__(self, stacks: bool, resident: Container[int] = ()) -> None:
        self.stacks = stacks
        self.gatherer = FakeGatherer()
        self.complete: list[int] = []
        self.kept = threading.local()  # what is kept for each thread: how often a unit was used in it
        self.kept.count = 0
        run_in = partial(OwnStack, aside=[self.put_aside]) if stacks else OwnThread
        self.lockstep = Lockstep(self.gatherer, self.complete.append, run_in, resident)
        self.used: list[tuple[int, int]] = []
        self.scripts: list[Script] = []
        self.unwound: list[int] = []
        self.failed_at: int | None = None
        self.busy = threading.Lock()

    def use(self, script: Script, unit: int) -> None:
        assert self.busy.acquire(blocking=False), "two run at once"
        assert self.gatherer.holds[unit] == 1
        assert [each for each in self.scripts if not each.away] == [script]
        assert self.lockstep.keeps_back(script.number), "it is asked, and no other"
        assert not self.lockstep.keeps_back(-1)
        self.used.append((script.number, unit))
        if not script.unwound:
            self.kept.count = getattr(self.kept, "count", 0) + 1
            assert self.kept.count == sum(number == script.number for number, _ in self.used)
        self.busy.release()

    def put_aside(self) -> Callable[[], None]:
        before, self.kept.count = self.kept.count, 0

        def put_back() -> None:
            self.kept.count = before

        return put_back

    def check_rest(self) -> None:
        assert not any(self.gatherer.holds.values())
        assert self.kept.count == 0
        assert not [thread for thread in threading.enumerate() if thread.name == "tiermem-micro-batch"]


RESIDENT = 98
OTHER = 99  # a unit that is not the one all go back through: nobody holds it
WAYS = st.lists(st.integers(0, 3), max_size=8)


@given(ways=st.lists(WAYS, max_size=5))
@settings(max_examples=number_of(50, 100))
def test_everybody_goes_their_own_way_whatever_it_is(stacks: bool, ways: list[list[int]]) -> None:
    world = World(stacks)
    scripts = [Script(world, number, way) for number, way in enumerate(ways)]
    world.lockstep.run(scripts)
    for number, way in enumerate(ways):
        assert [unit for who, unit in world.used if who == number] == way
    assert all(script.away for script in scripts)
    brought = world.gatherer.brought
    assert world.complete == [*brought, *dict.fromkeys(brought)], "as they are let go, and all of them at the end"
    world.check_rest()


def test_a_thread_that_is_slow_to_end_is_waited_for(stacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    live = OwnThread._live

    def lingering(thread: OwnThread) -> None:
        live(thread)
        time.sleep(0.1)

    monkeypatch.setattr(OwnThread, "_live", lingering)
    world = World(stacks)
    world.lockstep.run([Script(world, number, [1, 2]) for number in range(2)])
    world.check_rest()


@given(way=WAYS, count=st.integers(1, 6))
@settings(max_examples=number_of(30, 50))
def test_units_are_brought_once_where_all_agree_and_passed_in_order(stacks: bool, way: list[int], count: int) -> None:
    world = World(stacks)
    world.lockstep.run([Script(world, number, way) for number in range(count)])
    passes = [unit for unit, _ in itertools.groupby(way)]
    assert world.gatherer.brought == world.gatherer.resharded == passes
    order = [who for who, _ in itertools.groupby(who for who, _ in world.used)]
    if count > 1:
        assert order == list(range(count)) * len(passes)


@given(backs=st.lists(WAYS, max_size=5))
@settings(max_examples=number_of(50, 100))
def test_everybody_goes_back_through_what_was_left(stacks: bool, backs: list[list[int]]) -> None:
    world = World(stacks)
    world.lockstep.run([Script(world, number, [7], back) for number, back in enumerate(backs)])
    for number, back in enumerate(backs):
        assert [unit for who, unit in world.used if who == number] == [7, *back]
    assert OTHER not in world.gatherer.brought
    brought = world.gatherer.brought
    assert world.complete == [*brought, *dict.fromkeys(brought)]
    world.check_rest()


@given(back=WAYS, count=st.integers(1, 6))
@settings(max_examples=number_of(30, 50))
def test_where_all_agree_units_are_brought_once_on_the_way_back(stacks: bool, back: list[int], count: int) -> None:
    world = World(stacks)
    world.lockstep.run([Script(world, number, [7], back) for number in range(count)])
    assert world.gatherer.brought == [7, *back]
    assert [who for who, _ in world.used] == list(range(count)) * (1 + len(back))


@given(backs=st.lists(WAYS, min_size=1, max_size=4), who=st.integers(0, 3), place=st.integers(0, 7))
@settings(max_examples=number_of(40, 60))
def test_an_error_on_the_way_back_leaves_nothing_held(
    stacks: bool, backs: list[list[int]], who: int, place: int
) -> None:
    world = World(stacks)
    scripts = [Script(world, number, [7], back) for number, back in enumerate(backs)]
    victim = scripts[who % len(scripts)]
    if place >= len(victim.units):
        world.lockstep.run(scripts)
    else:
        victim.failing_back = place
        with pytest.raises(ValueError, match="mine"):
            world.lockstep.run(scripts)
    world.check_rest()


def test_those_who_took_different_ways_meet_again(stacks: bool) -> None:
    world = World(stacks)
    ways = [[0, 1, 9, 5], [0, 2, 9, 5], [0, 1, 9, 5], [0, 9, 5]]
    world.lockstep.run([Script(world, number, way) for number, way in enumerate(ways)])
    assert sorted(world.gatherer.brought) == [0, 1, 2, 5, 9], "who has passed fewest goes first, so each comes once"


@given(ways=st.lists(WAYS, min_size=1, max_size=4), who=st.integers(0, 3), place=st.integers(0, 7))
@settings(max_examples=number_of(40, 60))
def test_an_error_ends_everybody_where_they_are(stacks: bool, ways: list[list[int]], who: int, place: int) -> None:
    world = World(stacks)
    scripts = [Script(world, number, way) for number, way in enumerate(ways)]
    victim = scripts[who % len(scripts)]
    victim.failing = place
    if place >= len(victim.way):
        world.lockstep.run(scripts)
    else:
        with pytest.raises(ValueError, match="mine"):
            world.lockstep.run(scripts)
        assert len(world.used) == world.failed_at, "nobody goes on"
    world.check_rest()
    assert world.gatherer.resharded == world.gatherer.brought
    started = {number for number, _ in world.used}
    assert all(script.unwound for script in scripts if script.number in started)
    assert all(script.away for script in scripts if script is not victim), "what all share is nobody's"


class Stubborn(Script):
    """Goes on when a call has failed."""

    def run(self) -> None:
        self.refused: list[int] = []
        with contextlib.suppress(TiermemError):
            super().run()
        for unit in self.way:
            try:
                self.world.lockstep.turn(unit)
            except TiermemError:
                self.refused.append(unit)
            else:
                break


def test_who_goes_on_behind_an_error_of_another_gets_nothing(stacks: bool) -> None:
    world = World(stacks)
    stubborn, failing = Stubborn(world, 0, [1, 2]), Script(world, 1, [1, 2])
    failing.failing = 1
    with pytest.raises(ValueError, match="mine"):
        world.lockstep.run([stubborn, failing])
    assert world.used == [(0, 1), (1, 1)]
    assert stubborn.refused == [1, 2], "not even the one that it had"
    world.check_rest()


def test_where_a_thread_cannot_be_started_those_that_run_are_ended(
    stacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, start, begun = World(stacks), threading.Thread.start, list[threading.Thread]()

    def refuse(thread: threading.Thread) -> None:
        if len(begun) == 2:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    scripts = [Script(world, number, [0, 1]) for number in range(3)]
    if stacks:  # needs none
        world.lockstep.run(scripts)
    else:
        with pytest.raises(TiermemError, match="no thread can be started for tiermem-micro-batch"):
            world.lockstep.run(scripts)
        assert world.used == []
        assert [script.unwound for script in scripts] == [True, True, False]
    world.check_rest()


def test_those_who_go_back_on_different_ways_meet_again(stacks: bool) -> None:
    world = World(stacks)
    backs = [[1, 9, 5], [9, 5], [2, 3, 9, 5]]
    world.lockstep.run([Script(world, number, [7], back) for number, back in enumerate(backs)])
    assert sorted(world.gatherer.brought) == [1, 2, 3, 5, 7, 9]


class Straying(Script):
    """Computes other units again, beside the one it needs, and uses a unit by several calls."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.strays = 0
        self.entered: list[object] = []
        self.ended: list[object] = []

    def strayed(self) -> None:
        self.strays += 1

    def enter(self, call: object, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.entered.append((call, unit, args, kwargs))
        return (unit,), {}

    def leave(self, call: object) -> None:
        self.ended.append(call)

    def run(self) -> None:
        lockstep = self.world.lockstep
        for unit in self.way:
            lockstep.turn(unit)
            lockstep.arrived(unit)
            assert lockstep.enter("outer", (1,), {"a": 2}) == ((unit,), {})
            assert lockstep.enter("inner", (), {}) is None, "only the first call is another one"
            lockstep.leave("inner")
            self.stray(unit, may_wait=not self.world.stacks)
            assert lockstep.keeps_one, "the others need it"

    def go_back(self) -> None:
        lockstep, unit = self.world.lockstep, self.units.pop()
        lockstep.turn(unit)
        lockstep.arrived(unit)
        assert lockstep.enter("outer", (), {}) is None
        self.stray(unit, may_wait=False)
        assert not lockstep.keeps_one, "there may be no room for both"

    def stray(self, unit: int, *, may_wait: bool) -> None:
        before = self.strays
        for needed in (unit, RESIDENT):
            self.world.lockstep.make_way(needed)
        assert self.strays == before
        assert self.world.lockstep.keeps_one
        self.world.lockstep.make_way(OTHER)
        assert self.strays == before + (not may_wait)


def test_units_computed_again_beside_the_one_that_is_due(stacks: bool) -> None:
    world = World(stacks, resident={RESIDENT})
    scripts = [Straying(world, number, [3, 4], [4, 3]) for number in range(2)]
    world.lockstep.make_way(OTHER)  # nobody is at it
    assert world.lockstep.enter("before", (), {}) is None
    world.lockstep.run(scripts)
    assert [script.entered for script in scripts] == [[("outer", unit, (1,), {"a": 2}) for unit in (3, 4)]] * 2
    assert [script.ended for script in scripts] == [["inner", "inner"]] * 2
    world.check_rest()


def test_nobody_waits_for_a_unit_that_is_always_there(stacks: bool) -> None:
    world = World(stacks, resident={5})
    world.gatherer.holds[5] = 1
    world.lockstep.run([Script(world, number, [5, 0, 5, 1]) for number in range(2)])
    assert world.used == [(0, 5), (1, 5), (0, 0), (0, 5), (1, 0), (1, 5), (0, 1), (1, 1)]
    assert world.gatherer.brought == [0, 1]
    assert world.complete == [0, 1, 5, 0, 1], "at the end it is told of that one, too"


class GoingBack(Straying):
    """Comes to another unit inside a backward."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.looks = 0

    def looked_back(self) -> None:
        self.looks += 1

    def run(self) -> None:
        lockstep = self.world.lockstep
        values = torch.zeros(2, requires_grad=True) + 1

        def look(_: torch.Tensor) -> None:
            lockstep.turn(3)
            assert self.looks == 0, "it is there"
            assert lockstep.keeps_one
            lockstep.turn(4)
            assert self.looks == 1
            assert not (self.world.stacks and lockstep.keeps_one), "who cannot wait has the room"
            lockstep.arrived(4)
            assert lockstep.keeps_one != self.world.stacks
            assert lockstep.enter("computed again", (), {}) is None

        lockstep.turn(3)
        lockstep.arrived(3)
        values.register_hook(look)
        values.sum().backward()


def test_inside_a_backward_only_a_thread_waits(stacks: bool) -> None:
    torch.ones(1, requires_grad=True).backward()  # the numbers of backwards begin with 0, which is one
    world = World(stacks)
    scripts = [GoingBack(world, number, []) for number in range(2)]
    world.lockstep.run(scripts)
    assert [script.looks for script in scripts] == [1, 1]
    assert world.gatherer.brought == ([3, 3] if stacks else [3, 4])
    assert world.complete == ([3, 3, 3, 4] if stacks else [3, 4, 3, 4])
    world.check_rest()


class Asking(Straying):
    """Has another thread come to other units, as one does that computes a part of a backward."""

    def run(self) -> None:
        lockstep = self.world.lockstep
        for unit in self.way:
            lockstep.turn(unit)
            lockstep.arrived(unit)
            other = threading.Thread(target=self.ask, daemon=True)
            other.start()
            other.join(60)
            assert self.found == [None, None]
            assert lockstep.enter("own", (), {}) == ((unit,), {}), "its own first call is still to come"

    def ask(self) -> None:
        self.found: list[object] = []
        self.found += [self.world.lockstep.turn(OTHER), self.world.lockstep.enter("other", (), {})]


def test_another_thread_gets_units_for_itself(stacks: bool) -> None:
    world = World(stacks)
    world.lockstep.run([Asking(world, number, [3, 4]) for number in range(2)])
    assert world.gatherer.brought == [3, 4]
    assert world.complete == [3, 4, 3, 4]
    world.check_rest()


def test_an_interrupt_of_the_waiting_thread_ends_everybody(stacks: bool) -> None:
    world = World(stacks)

    class Interrupting(Script):
        def run(self) -> None:
            self.world.lockstep.turn(1)
            signal.raise_signal(signal.SIGINT)  # delivered to the main thread, which waits for this one
            super().run()

    scripts = [Script(world, 0, [1, 2]), Interrupting(world, 1, [1, 2]), Script(world, 2, [1, 2])]
    with pytest.raises(KeyboardInterrupt):
        world.lockstep.run(scripts)
    world.check_rest()
    assert world.unwound == ([0, 2] if stacks else [1, 0, 2]), "the one that was running ends first"
