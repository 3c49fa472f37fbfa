"""The check that other tests call after every event finds what it is for, and no transition breaks a rule.

The bench: page 0 is on SWAP and HOST, 1 dirty on HOST, 2 leased there, 3 on its way up, 4 and 5 on SWAP only, 5 failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from doubles_chain import SteppedTransfer, stepped_chain

from swap.requests import Priority
from tiermem.errors import InvariantError
from tiermem.memory.tiers import Tier
from tiermem.pager.forecast import Forecast
from tiermem.pager.page import Intent, Kind, Lane, Move, Page, PageKey
from tiermem.pager.residency import Residency
from tiermem.stats import Counters

READ, WRITE, FRESH = Intent.READ, Intent.WRITE, Intent.FRESH
SWAP, HOST = Tier.SWAP, Tier.HOST


class Bench:
    """A residency in which something of each sort is going on."""

    def __init__(self) -> None:
        self.chain, self.flying, store = stepped_chain(host=60)
        self.residency = Residency(self.chain, Forecast(), Counters(), ended=self._ended)
        self.pages = [self.residency.add(PageKey(number, Kind.PARAM), 10, saved=True) for number in range(6)]
        store.update({page.key: page.key.unit for page in self.pages})
        for number in (0, 1, 2):
            self.fetch(number)
            self.flying.pop().finish()
        self.lease(1, WRITE)
        self.residency.unhold(self.pages[1], HOST)
        self.lease(2, READ)
        self.fetch(3)
        self.residency.fail(self.pages[5], OSError(5, "injected"))
        self.residency.check_invariants()

    def _ended(self, page: Page, move: Move, error: BaseException | None) -> None:
        self.residency.finish_move(page, move, error)

    def fetch(self, number: int) -> None:
        assert self.residency.allocate(self.pages[number], HOST)
        self.residency.start_move(self.pages[number], HOST, Priority.DEMAND)

    def lease(self, number: int, intent: Intent) -> None:
        self.residency.hold(self.pages[number], HOST, intent)
        self.residency.grant(self.pages[number], HOST, intent, Lane.COMPUTE)


BROKEN: dict[str, tuple[str, Callable[[Bench], object]]] = {
    "valid without a frame": ("I1", lambda bench: bench.pages[4].valid.add(HOST)),
    "a move from where nothing is": ("I2", lambda bench: bench.pages[3].valid.clear()),
    "a move to where the bytes are": ("I2", lambda bench: bench.pages[3].valid.add(HOST)),
    "a move nobody counted": ("I2", lambda bench: setattr(bench.residency, "moves", 0)),
    "leased without a frame": ("I3", lambda bench: bench.pages[4].leases.update({HOST: 1})),
    "written without a frame": (
        "I3",
        lambda bench: (bench.pages[4].leases.update({HOST: 1}), setattr(bench.pages[4], "exclusive", True)),
    ),
    "leased where the bytes are not": ("I3", lambda bench: bench.pages[3].leases.update({HOST: 1})),
    "written by two": (
        "I4",
        lambda bench: (bench.pages[2].leases.update({HOST: 2}), setattr(bench.pages[2], "exclusive", True)),
    ),
    "written by nobody": ("I4", lambda bench: setattr(bench.pages[1], "exclusive", True)),
    "written while it moves": (
        "I4",
        lambda bench: (bench.pages[3].leases.update({HOST: 1}), setattr(bench.pages[3], "exclusive", True)),
    ),
    "a frame that nobody needs": ("I5", lambda bench: bench.pages[0].valid.discard(HOST)),
    "a frame that nobody reserved": ("I5", lambda bench: setattr(bench.chain.arenas[HOST], "reserved", 30)),
    "a reservation that no page has": ("I5", lambda bench: bench.chain.arenas[HOST].allocate(10)),
    "more than the budget": ("I5", lambda bench: setattr(bench.chain.arenas[HOST], "capacity", 39)),
    "a lease that is not in the sums": ("I5", lambda bench: bench.pages[0].leases.update({HOST: 1})),
    "contents that are not in the sums": (
        "10 bytes of pages are not there, 0 were counted",
        lambda bench: bench.residency.census._tiers[HOST].away.discard(bench.pages[4]),
    ),
}


@pytest.mark.parametrize(("rule", "break_it"), BROKEN.values(), ids=BROKEN)
def test_what_breaks_a_rule_is_found(rule: str, break_it: Callable[[Bench], object]) -> None:
    bench = Bench()
    break_it(bench)
    with pytest.raises(InvariantError, match=rule):
        bench.residency.check_invariants()


def _later_end(bench: Bench) -> None:
    transfer: SteppedTransfer = bench.flying.pop()
    transfer.finish()
    transfer.finish()


FORBIDDEN: dict[str, Callable[[Bench], object]] = {
    "hold: no frame": lambda bench: bench.residency.hold(bench.pages[4], HOST, FRESH),
    "hold: bytes that have not arrived": lambda bench: bench.residency.hold(bench.pages[3], HOST, READ),
    "hold: to write what is read": lambda bench: bench.residency.hold(bench.pages[2], HOST, WRITE),
    "hold: anew what is on its way": lambda bench: bench.residency.hold(bench.pages[3], HOST, FRESH),
    "hold: to read what is written": lambda bench: (
        bench.lease(0, WRITE),
        bench.residency.hold(bench.pages[0], HOST, READ),
    ),
    "grant: not held": lambda bench: bench.residency.grant(bench.pages[0], HOST, READ, Lane.COMPUTE),
    "unhold: not leased": lambda bench: bench.residency.unhold(bench.pages[0], HOST),
    "start_move: on its way": lambda bench: bench.residency.start_move(bench.pages[3], HOST, Priority.DEMAND),
    "start_move: there already": lambda bench: bench.residency.start_move(bench.pages[0], HOST, Priority.DEMAND),
    "start_move: being written": lambda bench: (
        bench.lease(1, WRITE),
        bench.residency.start_move(bench.pages[1], SWAP, Priority.WRITE_BACK),
    ),
    "start_move: no contents": lambda bench: bench.residency.start_move(
        bench.residency.add(PageKey(9, Kind.GRAD), 10), SWAP, Priority.WRITE_BACK
    ),
    "finish_move: twice": _later_end,
    "drop: not there": lambda bench: bench.residency.drop(bench.pages[4], HOST),
    "drop: the only copy": lambda bench: bench.residency.drop(bench.pages[1], HOST),
    "drop: leased": lambda bench: bench.residency.drop(bench.pages[2], HOST),
    "drop: being moved": lambda bench: bench.residency.drop(bench.pages[3], SWAP),
    "revert: leased": lambda bench: bench.residency.revert(bench.pages[2], existed=True),
    "revert: on its way": lambda bench: bench.residency.revert(bench.pages[3], existed=True),
}


@pytest.mark.parametrize("transition", FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_transition_that_would_break_a_rule_is_refused_before_anything_is_changed(
    transition: Callable[[Bench], object],
) -> None:
    bench = Bench()
    with pytest.raises(InvariantError, match="a bug in tiermem"):
        transition(bench)
    bench.residency.check_invariants()


@pytest.mark.parametrize("number", [2, 3])
def test_a_page_that_is_held_or_moves_is_not_removed(number: int) -> None:
    bench = Bench()
    page = bench.pages[number]
    before, total = (set(page.valid), set(page.frames)), bench.residency.total
    assert not bench.residency.remove(page)
    assert bench.residency.page(page.key) is page
    assert (page.valid, set(page.frames)) == before
    assert bench.residency.total == total
    bench.residency.check_invariants()


@pytest.mark.parametrize("failed", [False, True])
def test_of_a_page_that_is_removed_nothing_is_left(failed: bool) -> None:
    bench = Bench()
    page, reserved, total = bench.pages[1], bench.chain.arenas[HOST].reserved, bench.residency.total
    forgotten: list[PageKey] = []
    bench.residency.chain = replace(bench.chain, forget=forgotten.append)
    if failed:
        bench.residency.fail(page, OSError(5, "injected"))
    assert bench.residency.remove(page)
    assert bench.chain.arenas[HOST].reserved == reserved - 10
    assert bench.residency.total == total - 10
    assert forgotten == [page.key], "its extent may be had by others"
    with pytest.raises(InvariantError, match="no such page"):
        bench.residency.page(page.key)
    assert page not in bench.residency._spoiled, "who keeps it keeps its error, and all that this has come through"
    again = bench.residency.add(page.key, 20)
    assert again.error is None
    assert not again.is_written
    bench.residency.check_invariants()


def test_what_a_drive_has_lost_is_not_made_good_by_discarding_it() -> None:
    bench = Bench()
    page, lost = bench.pages[3], OSError(5, "injected")
    bench.flying.pop().finish(lost)
    bench.residency.fail(page, ValueError("whoever wrote it has failed, too"))
    bench.residency.discard(page)
    assert page.error is lost
    bench.residency.check_invariants()


def test_the_first_error_of_a_page_stays() -> None:
    """Its reader has failed it while it was being written down, which then fails, too."""
    bench = Bench()
    page, first = bench.pages[1], ValueError("whoever looked at it has failed")
    bench.residency.start_move(page, SWAP, Priority.WRITE_BACK)
    bench.residency.fail(page, first)
    bench.flying.pop().finish(OSError(5, "injected"))
    assert page.error is first
    bench.residency.check_invariants()
