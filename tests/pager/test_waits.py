"""What is done while the computation waits, and where: the heap goes back where the drive is the limit."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from tiermem.pager import waits as module
from tiermem.pager.lease import Lease, PendingLease
from tiermem.pager.waits import Waits
from tiermem.stats import Counters
from tiermem.timeline import Timeline

MOST = 96  # MiB by which the process may have grown


class Heap:
    """A heap of which the test decides; `trims` counts how often it was given back."""

    def __init__(self) -> None:
        self.now, self.megabytes, self.trims = 100.0, 1000, 0
        self.waits = Waits(Counters(), Timeline())

    def trim(self) -> bool:
        self.trims += 1
        self.megabytes -= 200
        return True

    def memory_info(self) -> SimpleNamespace:
        return SimpleNamespace(rss=self.megabytes << 20)

    def wait(self, seconds: float, *, after: float = 0.0) -> None:
        started = self.now + after
        self.now = started + seconds
        self.waits.note(started, self.now)

    def trims_now(self, *, grown: int = 500) -> bool:
        before = self.trims
        self.megabytes += grown
        self.waits.meanwhile()
        return self.trims > before


@pytest.fixture
def heap(monkeypatch: pytest.MonkeyPatch) -> Heap:
    heap = Heap()
    monkeypatch.setattr(module, "psutil", SimpleNamespace(Process=lambda: heap))
    monkeypatch.setattr(module, "keeps_freed_blocks", lambda: False)
    monkeypatch.setattr(module, "trim_heap", heap.trim)
    heap.waits = Waits(Counters(), Timeline())
    return heap


@pytest.mark.parametrize(("waited", "trims"), [(2.8, False), (3.2, True)])
def test_the_heap_is_given_back_where_a_good_part_of_the_step_is_waiting(
    heap: Heap, waited: float, trims: bool
) -> None:
    heap.waits.begin_step()
    heap.wait(0.0)
    heap.wait(waited, after=10 - waited)
    assert heap.trims_now() == trims


def test_it_is_given_back_again_when_the_process_has_grown_again(heap: Heap) -> None:
    heap.waits.begin_step()
    heap.wait(1.0)
    assert heap.trims_now()
    assert not heap.trims_now(grown=MOST)
    assert heap.trims_now(grown=1)
    assert not heap.trims_now(grown=-300)  # others gave back: what grows from here on counts
    assert not heap.trims_now(grown=MOST)
    assert heap.trims_now(grown=1)


def test_blocks_that_are_kept_on_purpose_are_left_alone(heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    heap.waits.begin_step()
    heap.wait(1.0)
    monkeypatch.setattr(module, "keeps_freed_blocks", lambda: True)
    assert not heap.trims_now()


def test_the_step_before_counts_and_the_one_before_that_does_not(heap: Heap) -> None:
    for _ in range(2):
        heap.waits.begin_step()
        heap.wait(10.0)
    for trims in (True, False):
        heap.waits.begin_step()
        heap.wait(0.0)
        heap.wait(0.0, after=10.0)
        assert heap.trims_now() == trims


def test_what_passes_between_steps_is_of_none(heap: Heap) -> None:
    heap.waits.begin_step()
    heap.wait(1.0, after=100.0)
    heap.waits.begin_step()
    heap.wait(1.0, after=100.0)
    heap.wait(1.0, after=1.0)
    assert heap.trims_now()


def test_what_was_waited_before_the_first_step_is_of_none(heap: Heap) -> None:
    heap.wait(10.0)
    assert not heap.trims_now()
    heap.waits.begin_step()
    heap.wait(0.0)
    heap.wait(0.0, after=1.0)
    assert not heap.trims_now()


def test_a_thread_that_waits_aside_neither_counts_nor_gives_back(heap: Heap) -> None:
    heap.waits.begin_step()
    heap.waits.aside.add(threading.get_ident())
    heap.wait(10.0)
    heap.waits.aside.clear()
    assert not heap.trims_now()
    heap.wait(10.0)
    assert heap.trims_now()
    heap.waits.aside.add(threading.get_ident())
    assert not heap.trims_now()


def test_only_a_long_wait_is_used_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, asked = Waits(Counters(), Timeline()), threading.Event()
    monkeypatch.setattr(waits, "meanwhile", asked.set)
    short = PendingLease([], waits)
    short.settle(Lease([], {}, lambda *_: None), None)
    short.wait()
    assert not asked.is_set()
    long = PendingLease([], waits)
    waiter = threading.Thread(target=long.wait, daemon=True)
    waiter.start()
    assert asked.wait(60)
    assert waiter.is_alive()  # it is not what ends the wait
    long.settle(Lease([], {}, lambda *_: None), None)
    waiter.join(60)
    assert not waiter.is_alive()
