"""Old bytes of pages in memory: kept before they change, given back, or forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from doubles_optim import FakePager
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiermem.errors import InvariantError, TiermemError
from tiermem.optim.shares import Shares
from tiermem.optim.undolog import LoggedUpdates, UndoLog
from tiermem.optim.updates import OldBytes
from tiermem.pager.page import Kind, PageKey

SIZES = [10_000, 64, 4096, 1]
KEYS = [PageKey(number, Kind.STATE) for number in range(len(SIZES))]
STRANGER = PageKey(9, Kind.STATE)


class House:
    def __init__(self, threads: int = 2) -> None:
        self.pager, self.shares = FakePager(), Shares(threads, least_numel=64)
        for key, nbytes in zip([*KEYS, STRANGER], [*SIZES, 8], strict=True):
            self.pager.add_page(key, nbytes)
            self.pager.written.add(key)
        self.log = UndoLog(self.pager, dict(zip(KEYS, SIZES, strict=True)), self.shares)

    def change(self, protection: LoggedUpdates, key: PageKey, begin: int, end: int, value: int) -> None:
        """As an update does: on the worker, logged before."""
        part = self.pager.bytes[key][begin:end]

        def kernel() -> None:
            protection.log([OldBytes(key, begin, part)])
            part.fill_(value)

        self.pager.worker.submit(kernel).result(10)

    def revert(self, protection: LoggedUpdates) -> None:
        self.pager.start_task(protection.revert()).result(10)

    def snapshot(self) -> list[torch.Tensor]:
        return [self.pager.bytes[key].clone() for key in KEYS]

    def close(self) -> None:
        self.pager.close()
        self.shares.close()


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[PageKey, int, int]]:
    """Pieces of pages, each byte changed once at most, as an update does."""
    found = []
    for key, nbytes in zip(KEYS, SIZES, strict=True):
        cuts = sorted(draw(st.sets(st.integers(0, nbytes), max_size=6)))
        found += [(key, begin, end) for begin, end in zip(cuts[::2], cuts[1::2], strict=False)]
    return draw(st.permutations(found))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(changes(), st.integers(1, 4))
def test_reverting_gives_every_byte_back(changed, threads):
    house = House(threads)
    try:
        for _ in range(2):  # the log is used again
            before, protection = house.snapshot(), house.log.protection()
            for number, piece in enumerate(changed):
                house.change(protection, *piece, number + 1)
            house.revert(protection)
            assert same(house.snapshot(), before)
            assert house.pager.agenda == []
    finally:
        house.close()


def test_confirming_keeps_what_is_new_and_the_next_step_can_be_undone(house: House) -> None:
    first = house.log.protection()
    house.change(first, KEYS[0], 0, 100, 1)
    first.confirm()
    before, second = house.snapshot(), house.log.protection()
    assert before[0][:100].eq(1).all()
    house.change(second, KEYS[0], 50, 150, 2)
    house.revert(second)
    assert same(house.snapshot(), before)


def test_what_had_no_contents_has_none_again(house: House) -> None:
    house.pager.written.discard(KEYS[1])
    protection = house.log.protection()

    def kernel() -> None:
        protection.log([OldBytes(KEYS[1], 0, None)])
        house.pager.written.add(KEYS[1])

    house.pager.worker.submit(kernel).result(10)
    house.revert(protection)
    assert not house.pager.is_written(KEYS[1])


def test_a_second_optimizer_of_the_same_bytes_does_not_hide_what_was_there(house: House) -> None:
    before, protection = house.snapshot(), house.log.protection()
    house.change(protection, KEYS[0], 0, 100, 1)
    house.change(protection, KEYS[0], 0, 100, 2)
    house.pager.written.discard(KEYS[1])

    def kernels() -> None:
        protection.log([OldBytes(KEYS[1], 0, None)])
        house.pager.written.add(KEYS[1])
        protection.log([OldBytes(KEYS[1], 0, house.pager.bytes[KEYS[1]])])

    house.pager.worker.submit(kernels).result(10)
    house.revert(protection)
    assert same(house.snapshot(), before)
    assert not house.pager.is_written(KEYS[1])


def test_gradients_are_forgotten_when_nothing_is_undone_any_more(house: House) -> None:
    protection = house.log.protection()
    protection.discard([KEYS[0]])
    assert house.pager.is_written(KEYS[0])
    protection.confirm()
    assert not house.pager.is_written(KEYS[0])
    protection.discard([KEYS[1]])  # an update that ended behind the step
    assert not house.pager.is_written(KEYS[1])
    reverted = house.log.protection()
    reverted.discard([KEYS[2]])
    house.revert(reverted)
    reverted.confirm()
    assert house.pager.is_written(KEYS[2]), "it is needed for the redo"


def test_an_update_that_begins_behind_the_step_is_not_copied(house: House) -> None:
    protection = house.log.protection()
    house.change(protection, KEYS[0], 0, 100, 1)
    protection.confirm()
    kept = house.log._memory.clone()
    house.change(protection, KEYS[0], 200, 300, 2)
    assert torch.equal(house.log._memory, kept)


def test_a_page_that_has_failed_stays_so_and_the_others_are_restored(house: House) -> None:
    before, protection = house.snapshot(), house.log.protection()
    for key in KEYS:
        house.change(protection, key, 0, 1, 7)
    house.pager.failed[KEYS[1]] = ValueError("a kernel failed")
    house.revert(protection)
    after = house.snapshot()
    assert same([after[0], *after[2:]], [before[0], *before[2:]])
    assert after[1][0] == 7


def test_a_page_that_cannot_be_leased_is_an_error(house: House) -> None:
    """Otherwise half-undone parameters would be taken for good ones."""
    protection = house.log.protection()
    house.change(protection, KEYS[0], 0, 1, 7)
    house.pager.faults[KEYS[0]] = TiermemError("no more room")
    with pytest.raises(TiermemError, match="no more room"):
        house.revert(protection)


def test_a_page_without_a_place_is_a_bug(house: House) -> None:
    with pytest.raises(InvariantError, match="no place in the undo log"):
        house.change(house.log.protection(), STRANGER, 0, 8, 1)
