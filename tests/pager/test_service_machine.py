"""The whole residency core, driven by random operations, completion orders, failures and tight budgets.

The model is one number per page: the version last written. Whoever is granted a page to read must see it, whatever
happened in between, and the invariants hold after every single event.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from doubles_chain import NextEvent, SteppedArena, SteppedCopies, SteppedSlab, stepped_chain
from doubles_combinations import number_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiermem.errors import CapacityError
from tiermem.memory.tiers import Tier
from tiermem.pager.ahead import Appetite
from tiermem.pager.forecast import Forecast
from tiermem.pager.page import Intent, Kind, Lane, Page, PageKey
from tiermem.pager.protection import Protection
from tiermem.pager.residency import Residency
from tiermem.pager.schedule import schedule_of
from tiermem.pager.service import LeaseRequest, Service
from tiermem.stats import Counters

KEYS = [PageKey(unit, Kind.PARAM) for unit in range(6)]
SIZES = [4, 4, 8, 8, 12, 2]
INDICES = st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)
LOST = OSError(5, "injected")


class Watched(Residency):
    """A residency that notes what it is told to evict although it is kept in HOST by choice."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.wrong: list[PageKey] = []

    def drop(self, page: Page, tier: Tier) -> None:
        if page.kept and tier is Tier.HOST:
            self.wrong.append(page.key)  # an error here would only be given to whoever asked for the room
        super().drop(page, tier)


class ServiceMachine(RuleBasedStateMachine):
    """Random life of six pages."""

    @initialize(
        host=st.integers(12, 40),
        device=st.one_of(st.none(), st.integers(12, 30)),
        reserve=st.sampled_from([0, 12]),
        arena=st.sampled_from([SteppedArena, SteppedSlab]),
        kept=st.sampled_from([frozenset(), frozenset({0}), frozenset({1, 5})]),
    )
    def build(
        self, host: int, device: int | None, reserve: int, arena: type[SteppedArena], kept: frozenset[int]
    ) -> None:
        self.chain, self.flying, self.store = stepped_chain(host, device, arena, kept=kept)
        self.forecast = Forecast()
        self.ended: list[Any] = []
        self.residency = Watched(self.chain, self.forecast, Counters(), ended=lambda *what: self.ended.append(what))
        appetite = {tier: Appetite(look_ahead=16, reserve=reserve) for tier in self.chain.memory_tiers}
        self.service = Service(self.residency, appetite)
        self.pages = [self.residency.add(key, size) for key, size in zip(KEYS, SIZES, strict=True)]
        self.version: dict[PageKey, int | None] = dict.fromkeys(KEYS)
        self.held: list[LeaseRequest] = []
        self.waiting: list[LeaseRequest] = []
        self.counter = 0
        self.protection: Protection | None = None
        self.before: dict[PageKey, int | None] = {}  # what protected pages were
        self.protecting: dict[PageKey, Coroutine[Any, Any, None]] = {}

    async def next_event(self) -> None:
        await NextEvent()

    def protect_on(self) -> None:
        """Let those who protect pages go on; whoever is through has kept what the page was."""
        for key, coroutine in list(self.protecting.items()):
            try:
                coroutine.send(None)
            except StopIteration:
                self.before[key] = self.version[key]
            except OSError:
                assert self.residency.page(key).error is LOST
            else:
                continue
            del self.protecting[key]

    def settle_events(self) -> None:
        self.service.pump()
        self.protect_on()
        while self.ended:
            self.residency.finish_move(*self.ended.pop(0))
            self.service.pump()
        self.residency.check_invariants()

    def ask(self, indices: list[int], intent: Intent, lane: Lane) -> None:
        pages = [self.pages[index] for index in indices]
        tier = self.chain.top if lane is Lane.COMPUTE else Tier.HOST

        def finished(error: BaseException | None) -> None:
            self.waiting.remove(request)
            if error is None:
                self.granted(request)
            elif not isinstance(error, CapacityError):
                assert error is LOST, error

        request = LeaseRequest(pages, intent, lane, tier, finished)
        self.waiting.append(request)
        self.service.submit(request)
        self.settle_events()

    def granted(self, request: LeaseRequest) -> None:
        for page in request.pages:
            frame: Any = page.frames[request.tier]
            if request.intent is not Intent.FRESH and self.version[page.key] is not None:
                assert frame.contents == self.version[page.key], page
            if request.intent is not Intent.READ:
                # Written while it is held, as a kernel would.
                self.counter += 1
                frame.contents = self.version[page.key] = self.counter
        self.held.append(request)

    @rule(indices=INDICES, lane=st.sampled_from(Lane))
    def write_fresh(self, indices: list[int], lane: Lane) -> None:
        if not self.doomed(indices) and not any(KEYS[index] in self.protecting for index in indices):
            self.ask(indices, Intent.FRESH, lane)

    @rule(indices=INDICES, lane=st.sampled_from(Lane), intent=st.sampled_from([Intent.READ, Intent.WRITE]))
    def use(self, indices: list[int], lane: Lane, intent: Intent) -> None:
        written = all(self.version[KEYS[index]] is not None for index in indices) and not self.doomed(indices)
        if written and (intent is Intent.READ or not any(KEYS[index] in self.protecting for index in indices)):
            self.ask(indices, intent, lane)

    @precondition(lambda self: self.waiting and not self.flying)
    @rule()
    def stand_still(self) -> None:
        self.service.resolve_standstill()
        self.settle_events()

    @rule(indices=st.sets(st.integers(0, 5)))
    def save(self, indices: set[int]) -> None:
        for index in sorted(indices):
            self.service.save(self.pages[index])
        self.settle_events()

    @rule(indices=st.sets(st.integers(0, 5)))
    def have_a_home_on_the_device(self, indices: set[int]) -> None:
        """Another plan, by which the copies of other pages on the DEVICE are to stay there."""
        for index, page in enumerate(self.pages):
            if not page.kept:
                page.home = Tier.DEVICE if index in indices and self.chain.top is Tier.DEVICE else None
        self.residency.reclassify()
        self.settle_events()

    def asked_for(self, indices: list[int]) -> bool:
        wanted = {KEYS[index] for index in indices}
        return any(page.key in wanted for request in self.waiting for page in request.pages)

    def doomed(self, indices: list[int]) -> bool:
        return any(self.pages[index].doomed for index in indices)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        request = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.service.release(request.pages, request.tier)
        self.settle_events()

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def transfer_ends(self, data: st.DataObject) -> None:
        self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1))).finish()
        self.settle_events()

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def transfer_fails(self, data: st.DataObject) -> None:
        transfer = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        transfer.finish(LOST)
        self.settle_events()
        assert transfer.page.error is LOST or transfer.page.doomed or not transfer.page.is_written

    @rule(index=st.integers(0, 5))
    def protect(self, index: int) -> None:
        """The update is about to write the page: nobody else writes it, and it is not about to be forgotten."""
        key, page = KEYS[index], self.pages[index]
        if page.exclusive or page.doomed or self.asked_for([index]) or key in self.protecting or key in self.before:
            return
        if self.protection is None:
            self.protection = Protection(
                self.residency,
                self.service,
                SteppedCopies(self.chain.edges[Tier.SWAP, Tier.HOST].store),  # type: ignore[attr-defined]
                lambda _: True,
                self.next_event,
            )
        self.protection.prepare([key])
        self.protecting[key] = self.protection.protect([key])
        self.settle_events()

    def is_protected(self, indices: list[int]) -> bool:
        return any(KEYS[index] in self.before or KEYS[index] in self.protecting for index in indices)

    @precondition(lambda self: self.protection is not None and not self.protecting)
    @rule()
    def confirm(self) -> None:
        self.protection._confirm()
        self.protection = None
        self.before.clear()

    @precondition(
        lambda self: (
            self.protection is not None
            and not self.protecting
            and not any(page.is_leased for page in self.pages if page.key in self.before)
            and not self.asked_for([KEYS.index(key) for key in self.before])
        )
    )
    @rule(fails=st.booleans())
    def revert(self, fails: bool) -> None:
        coroutine = self.protection.revert()
        while True:
            try:
                coroutine.send(None)
            except StopIteration:
                break
            own = next(flying for flying in self.flying if flying.page.key in self.before)
            self.flying.remove(own)
            own.finish(LOST if fails else None)
            self.residency.finish_move(*self.ended.pop(0))
            self.residency.check_invariants()
        for key, version in self.before.items():
            page = self.residency.page(key)
            self.version[key] = version
            if page.error is None:
                assert page.valid == (set() if version is None else {Tier.SWAP})
                assert not page.frames
                assert version is None or self.chain.edges[Tier.SWAP, Tier.HOST].store[key] == version
        self.protection = None
        self.before.clear()
        self.settle_events()

    @rule(index=st.integers(0, 5))
    def discard(self, index: int) -> None:
        if not self.asked_for([index]) and not self.pages[index].is_leased and not self.is_protected([index]):
            self.residency.discard(self.pages[index])
            self.version[KEYS[index]] = None
            self.settle_events()

    @rule(order=st.lists(st.tuples(st.sampled_from(Lane), st.sampled_from(KEYS)), max_size=12))
    def learn(self, order: list[tuple[Lane, PageKey]]) -> None:
        self.forecast.set_schedule(schedule_of(order) if order else None)
        self.residency.reclassify()
        self.settle_events()

    @rule()
    def begin_step(self) -> None:
        self.service.homes.begin_step()
        self.forecast.begin_step()
        self.settle_events()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "residency"):
            self.residency.check_invariants()
            assert self.residency.wrong == []
            for tier, arena in self.chain.arenas.items():
                assert 0 <= arena.reserved <= arena.capacity, tier
            assert self.residency.moves == len(self.flying)

    def teardown(self) -> None:
        """Nothing hangs: once moves end and leases are given back, every request is granted or refused."""
        if not hasattr(self, "residency"):
            return
        for coroutine in self.protecting.values():
            coroutine.close()
        self.protecting.clear()
        self.come_to_rest()  # with what is held still held
        while self.held or self.waiting:
            while self.held:
                request = self.held.pop()
                self.service.release(request.pages, request.tier)
            self.come_to_rest()
            assert self.held or not self.waiting, self.waiting
        assert self.residency.wrong == []

    def come_to_rest(self) -> None:
        for _ in range(300):
            self.settle_events()
            if self.flying:
                self.flying.pop(0).finish()
            elif not self.waiting or not self.service.resolve_standstill():
                return
        raise AssertionError(f"never comes to rest: {self.waiting}")


TestServiceMachine = ServiceMachine.TestCase
TestServiceMachine.settings = settings(max_examples=number_of(80, 200), stateful_step_count=40)
