"""Old bytes of pages, kept and given back: a real pager over real files and generations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from doubles import FaultySystemCalls
from doubles_pager import save_all

from swap.buffers import AlignedBuffer
from swap.errors import SwapIOError
from swap.settings import EngineSettings
from swap.space import SwapSpace
from tiermem.errors import InvariantError
from tiermem.memory.arena import HostArena
from tiermem.memory.tiers import Tier
from tiermem.pager.ahead import Appetite
from tiermem.pager.edges import host_chain
from tiermem.pager.extents import Extents
from tiermem.pager.page import Intent, Kind, PageKey
from tiermem.pager.pager import Pager
from tiermem.pager.protection import Protection
from tiermem.stats import Counters
from tiermem.timeline import Timeline

PAGE = 4096
KEYS = [PageKey(number, Kind.STATE) for number in range(6)]


class House:
    """Six pages, room for three of them in memory, and on disk for three copies of each."""

    def __init__(self, path: Path) -> None:
        self.system = FaultySystemCalls()
        settings = EngineSettings(backend="threads", block_size=PAGE)
        self.space = SwapSpace.open([path], name="r0", nbytes=18 * PAGE, settings=settings, system=self.system)
        self.extents = Extents(self.space)
        arena = HostArena(3 * PAGE, poison=True)
        appetite = {Tier.HOST: Appetite(look_ahead=PAGE, reserve=PAGE)}
        self.counters = Counters()
        self.pager = Pager(host_chain(arena, self.extents), appetite, counters=self.counters, timeline=Timeline())
        for key in KEYS:
            self.pager.add_page(key, PAGE)

    def protection(self) -> Protection:
        return self.pager.protection(self.extents.keep())

    def protect(self, protection: Protection, keys: Sequence[PageKey]) -> None:
        self.pager.wait_for(self.pager.start_task(protection.protect(keys)))

    def revert(self, protection: Protection) -> None:
        self.pager.wait_for(self.pager.start_task(protection.revert()))

    def write(self, keys: Sequence[PageKey], value: int, intent: Intent = Intent.WRITE) -> None:
        for key in keys:
            with self.pager.lease([key], intent) as lease:
                lease.tensor(key).fill_(value)

    def values(self, keys: Sequence[PageKey] = KEYS) -> list[int]:
        found = []
        for key in keys:
            with self.pager.lease([key], Intent.READ) as lease:
                tensor = lease.tensor(key)
                assert bool((tensor == tensor[0]).all())
                found.append(int(tensor[0]))
        self.pager.check_invariants()
        return found

    def written_bytes(self) -> int:
        return self.counters.snapshot().total.bytes_written


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.pager.close()
    made.space.close()


@pytest.mark.parametrize("written_down", [False, True])
def test_reverted_pages_have_their_old_bytes(house: House, written_down: bool) -> None:
    """Clean, dirty and never written before; the new bytes on disk already or not."""
    house.write(KEYS[:4], 1, Intent.FRESH)
    save_all(house.pager)
    house.write(KEYS[3:4], 2)  # only memory has it
    for _ in range(3):  # a step that is tried again and again
        protection = house.protection()
        house.protect(protection, KEYS[:5])
        house.protect(protection, KEYS[:5])  # twice is once
        house.write(KEYS[:4], 9)
        house.write(KEYS[4:5], 9, Intent.FRESH)
        if written_down:
            save_all(house.pager)
        assert house.values(KEYS[:5]) == [9] * 5
        house.revert(protection)
        assert house.values(KEYS[:4]) == [1, 1, 1, 2]
        assert not house.pager.is_written(KEYS[4])
        assert house.extents.generations.statistics().marks == 0
    assert house.extents.generations.statistics().keys == 4


def test_confirmed_pages_have_their_new_bytes_and_nothing_is_written_for_it(house: House) -> None:
    house.write(KEYS, 1, Intent.FRESH)
    save_all(house.pager)
    for value in range(2, 6):
        protection = house.protection()
        house.protect(protection, KEYS[:2])
        house.write(KEYS[:2], value)
        save_all(house.pager)
        before = house.written_bytes()
        protection.confirm()
        assert house.values() == [value] * 2 + [1] * 4
        assert house.written_bytes() == before
    house.protect(protection, KEYS)  # closed: nothing is kept any more, and nobody waits
    assert house.extents.generations.statistics().marks == 0
    assert house.space.statistics().high_water == 8 * PAGE  # two copies of what changes, one of the rest


def test_only_what_memory_alone_has_is_written_to_protect_it(house: House) -> None:
    house.write(KEYS[:3], 1, Intent.FRESH)
    save_all(house.pager)
    before = house.written_bytes()
    protection = house.protection()
    house.protect(protection, KEYS[:2])
    assert house.written_bytes() == before
    house.write(KEYS[2:3], 2)
    house.protect(protection, KEYS[2:])
    assert house.written_bytes() == before + PAGE


def test_what_is_discarded_stays_until_it_is_confirmed(house: House) -> None:
    house.write(KEYS, 1, Intent.FRESH)
    for confirmed in (True, False):
        house.write(KEYS[5:], 1, Intent.FRESH)
        protection = house.protection()
        house.pager.start_task(_call(protection, KEYS[5:])).result()
        assert house.pager.is_written(KEYS[5])
        if confirmed:
            protection.confirm()
        else:
            house.revert(protection)
        assert house.pager.is_written(KEYS[5]) != confirmed


async def _call(protection: Protection, keys: Sequence[PageKey]) -> None:
    protection.discard(keys)


def test_a_leased_page_is_not_reverted(house: House) -> None:
    house.write(KEYS[:1], 1, Intent.FRESH)
    protection = house.protection()
    house.protect(protection, KEYS[:1])
    with house.pager.lease(KEYS[:1], Intent.READ), pytest.raises(InvariantError, match="leased"):
        house.revert(protection)


def test_a_page_that_somebody_is_writing_is_not_protected(house: House) -> None:
    house.write(KEYS[:1], 1, Intent.FRESH)
    protection = house.protection()
    with house.pager.lease(KEYS[:1], Intent.WRITE), pytest.raises(InvariantError, match="while it is being written"):
        house.protect(protection, KEYS[:1])


def test_a_drive_that_fails_while_a_page_is_protected(house: House) -> None:
    house.write(KEYS[:1], 1, Intent.FRESH)
    house.system.inject("pwritev", 5)
    protection = house.protection()
    with pytest.raises(SwapIOError):
        house.protect(protection, KEYS[:1])
    house.write(KEYS[1:2], 1, Intent.FRESH)
    house.protect(protection, KEYS[1:2])
    house.write(KEYS[1:2], 2)
    house.revert(protection)
    assert house.values(KEYS[1:2]) == [1]
    with pytest.raises(SwapIOError):
        house.values(KEYS[:1])


def test_no_extent_of_a_commit_is_both_spare_and_plain(tmp_path, monkeypatch):
    """A gradient is written for the first time while they are listed; a full space gives up a spare one for it."""
    with SwapSpace.open([tmp_path], name="r0", nbytes=2 * PAGE) as space, AlignedBuffer(PAGE) as buffer:
        extents = Extents(space)
        generations, param = extents.generations, PageKey(0, Kind.PARAM)

        def write() -> None:
            extent = extents.for_write(param, PAGE)
            space.start_write(extent, buffer.view).wait(30)
            extents.written(param, extent, None)

        write()
        first = generations.mark()
        write()
        generations.release(first)
        mark, spares = generations.mark(), generations.spares

        def late(mark):
            found = spares(mark)
            extents.for_write(PageKey(0, Kind.GRAD), PAGE)
            return found

        assert len(spares(mark)) == 1
        monkeypatch.setattr(generations, "spares", late)
        spare, plain = extents.beside(mark)
        assert not {extent for _, extent in spare} & {extent for _, extent in plain}
        assert len(extents.beside(mark)[1]) == 1
