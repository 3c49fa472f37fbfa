"""The tiers of a machine, and edges that hand on what they are given, told of every end once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swap.requests import Priority
from tiermem.memory.tiers import Tier
from tiermem.pager.edges import Chain, CopyEdge, SwapReadEdge, SwapWriteEdge, device_chain, host_chain
from tiermem.pager.page import Kind, Lane, Page, PageKey

SWAP, HOST, DEVICE = Tier.SWAP, Tier.HOST, Tier.DEVICE
PARAM, GRAD, STATE = (PageKey(0, kind) for kind in (Kind.PARAM, Kind.GRAD, Kind.STATE))
LOST = OSError(5, "injected")
EXTENT: Any = SimpleNamespace(nbytes=4096)


def arena(capacity: int) -> Any:
    return SimpleNamespace(capacity=capacity)


class Extents:
    """Notes what becomes of the extents; `fails`: the call that raises."""

    def __init__(self, fails: str = "") -> None:
        self.said: list[tuple[Any, ...]] = []
        self.fails = fails
        self.started: dict[str, Any] = {}
        self.request = SimpleNamespace(
            promote=lambda priority: self.said.append(("promote", priority)), stalled=lambda: LOST
        )

    def _note(self, *what: Any) -> None:
        self.said.append(what)
        if what[0] == self.fails:
            raise ValueError(self.fails)

    def for_write(self, *_: Any) -> Any:
        return EXTENT

    def for_read(self, _: PageKey) -> Any:
        return EXTENT, 17

    def takes_checksum(self, _: PageKey) -> bool:
        return True

    def written(self, key: PageKey, extent: Any, checksum: Any) -> None:
        self._note("written", key, extent, checksum)

    def failed(self, key: PageKey, extent: Any) -> None:
        self._note("failed", key, extent)

    def forget(self, key: PageKey) -> None:
        self._note("forget", key)

    def space_of(self, _: PageKey) -> Any:
        def start(extent: Any, view: memoryview, **named: Any) -> Any:
            if self.fails == "start":
                raise LOST
            self.started = {"extent": extent, "view": view, **named}
            return self.request

        return SimpleNamespace(start_read=start, start_write=start)


def page_in_host() -> Page:
    page = Page(PARAM, 4000, 8192, None)
    page.frames[HOST] = SimpleNamespace(buffer=memoryview(bytearray(8192)))  # type: ignore[assignment]
    return page


def test_where_pages_may_be() -> None:
    extents: Any = Extents()
    chain = device_chain(
        arena(100_000), arena(50_000), SimpleNamespace(), extents, settled=frozenset({1}), kept=frozenset({0, 1})
    )
    assert (chain.memory_tiers, chain.top) == ((HOST, DEVICE), DEVICE)
    assert set(chain.edges) == {(SWAP, HOST), (HOST, SWAP), (HOST, DEVICE), (DEVICE, HOST)}
    assert [chain.worked_on(Lane.COMPUTE, 0), chain.worked_on(Lane.UPDATE, 0)] == [DEVICE, HOST]
    assert chain.worked_on(Lane.UPDATE, 1) is DEVICE
    assert [chain.keeps(key) for key in (PARAM, GRAD, PageKey(2, Kind.PARAM))] == [True, False, False]
    assert [chain.settles(PageKey(unit, Kind.PARAM)) for unit in (0, 1)] == [False, True]
    assert [tuple(chain.tiers_of(key)) for key in (PARAM, STATE)] == [(HOST, DEVICE), (HOST,)]
    assert tuple(chain.tiers_of(PageKey(1, Kind.STATE))) == (HOST, DEVICE)
    assert tuple(chain.tiers_of(PageKey(0, Kind.TRANSIT))) == (DEVICE,)
    steps = [(SWAP, DEVICE), (HOST, DEVICE), (DEVICE, SWAP), (HOST, SWAP)]
    assert [chain.towards(start, target) for start, target in steps] == [HOST, DEVICE, HOST, SWAP]
    chain.forget(PARAM)
    assert extents.said == [("forget", PARAM)]


def test_without_a_device_host_is_the_top() -> None:
    extents: Any = Extents()
    chain = host_chain(arena(8192), extents, kept=frozenset({0}))
    assert (chain.memory_tiers, chain.top, chain.keeps(PARAM)) == ((HOST,), HOST, True)
    assert chain.worked_on(Lane.COMPUTE, 0) is chain.worked_on(Lane.UPDATE, 0) is HOST
    chain.forget(PARAM)
    assert extents.said == [("forget", PARAM)]


def test_frames_take_whole_blocks_and_a_budget_has_only_whole_ones() -> None:
    chain = Chain({HOST: arena(1000)}, {}, alignment=64)
    assert [chain.room(nbytes) for nbytes in (1, 64, 65)] == [64, 64, 128]
    assert chain.capacity(HOST) == 960


def test_a_read_goes_into_the_part_of_the_frame_that_is_on_the_disk_and_tells_its_error() -> None:
    extents: Any = Extents()
    ended: list[Any] = []
    transfer = SwapReadEdge(extents).start(page_in_host(), Priority.READ_AHEAD, ended.append)
    started = extents.started
    assert (started["priority"], started["expected"], started["view"].nbytes) == (Priority.READ_AHEAD, 17, 4096)
    for error in (None, LOST):
        started["on_done"](SimpleNamespace(error=error))
    assert ended == [None, LOST]
    transfer.promote()
    assert extents.said == [("promote", Priority.DEMAND)]
    assert transfer.stalled() is LOST


@pytest.mark.parametrize("error", [None, LOST])
def test_a_write_is_ended_in_the_extents_before_anybody_is_told(error: OSError | None) -> None:
    extents: Any = Extents()
    SwapWriteEdge(extents).start(page_in_host(), Priority.WRITE_BACK, lambda told: extents.said.append(("told", told)))
    started = extents.started
    assert (started["priority"], started["checksum"], started["view"].nbytes) == (Priority.WRITE_BACK, True, 4096)
    started["on_done"](SimpleNamespace(error=error, checksum=5))
    ended = ("written", PARAM, EXTENT, 5) if error is None else ("failed", PARAM, EXTENT)
    assert extents.said == [ended, ("told", error)]


@pytest.mark.parametrize("error", [None, LOST])
def test_a_write_whose_end_cannot_be_noted_ends_all_the_same_with_the_first_error(error: OSError | None) -> None:
    extents: Any = Extents("written" if error is None else "failed")
    told: list[Any] = []
    SwapWriteEdge(extents).start(page_in_host(), Priority.WRITE_BACK, told.append)
    extents.started["on_done"](SimpleNamespace(error=error, checksum=5))
    (found,) = told
    assert isinstance(found, ValueError) if error is None else found is error


def test_a_write_that_cannot_start_gives_its_extent_back_and_is_told_to_nobody() -> None:
    extents: Any = Extents("start")
    told: list[Any] = []
    with pytest.raises(OSError, match="injected"):
        SwapWriteEdge(extents).start(page_in_host(), Priority.DEMAND, told.append)
    assert extents.said == [("failed", PARAM, EXTENT)]
    assert told == []


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("priority", [Priority.DEMAND, Priority.READ_AHEAD])
def test_a_copy_says_which_way_and_whether_somebody_waits(up: bool, priority: Priority) -> None:
    copied: list[Any] = []
    device: Any = SimpleNamespace(start_copy=lambda *frames, **named: copied.append((frames, named)))
    page = Page(PARAM, 4000, 4096, None)
    page.frames.update({HOST: "low", DEVICE: "high"})  # type: ignore[dict-item]
    source, target = (HOST, DEVICE) if up else (DEVICE, HOST)
    CopyEdge(device, source, target).start(page, priority, print)
    ((frames, named),) = copied
    assert frames == (("low", "high", 4000) if up else ("high", "low", 4000))
    assert named == {"up": up, "urgent": priority is Priority.DEMAND, "done": print}
