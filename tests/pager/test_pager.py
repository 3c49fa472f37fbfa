"""The whole pager on real files: threads, coroutines, faults, interruption and closing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import FaultySystemCalls, Stall
from doubles_combinations import number_of
from doubles_garbage import collect
from doubles_pager import save_all

from swap.settings import EngineSettings
from swap.space import SwapSpace
from tiermem.errors import CapacityError, InvariantError, TiermemError
from tiermem.memory.arena import HostArena
from tiermem.memory.tiers import Tier
from tiermem.pager import core
from tiermem.pager.ahead import Appetite
from tiermem.pager.edges import host_chain
from tiermem.pager.extents import Extents
from tiermem.pager.lease import Lease, PendingLease
from tiermem.pager.page import Intent, Kind, Lane, PageKey
from tiermem.pager.pager import Pager
from tiermem.pager.schedule import schedule_of
from tiermem.pager.waits import Waits
from tiermem.stats import Counters
from tiermem.timeline import Timeline

PAGE = 4096
READ, WRITE, FRESH = Intent.READ, Intent.WRITE, Intent.FRESH


def key(number: int) -> PageKey:
    return PageKey(number, Kind.STATE)


class House:
    """A pager on real files with `frames` pages of host memory."""

    def __init__(self, path: Path, frames: int, *, backend: str = "threads", spare: int = 0) -> None:
        self.system = FaultySystemCalls()
        settings = EngineSettings(backend=backend, block_size=PAGE)
        self.space = SwapSpace.open([path], name="r0", nbytes=64 * PAGE, settings=settings, system=self.system)
        self.arena = HostArena(frames * PAGE + spare, poison=True)
        appetite = {Tier.HOST: Appetite(look_ahead=frames * PAGE // 2, reserve=PAGE)}
        self.counters = Counters()
        self.pager = Pager(
            host_chain(self.arena, Extents(self.space)), appetite, counters=self.counters, timeline=Timeline()
        )

    def add(self, count: int, nbytes: int = PAGE) -> None:
        for number in range(count):
            self.pager.add_page(key(number), nbytes)

    def fill(self, number: int, value: int) -> None:
        with self.pager.lease([key(number)], FRESH) as lease:
            lease.tensor(key(number)).fill_(value)

    def value(self, number: int) -> int:
        with self.pager.lease([key(number)], READ) as lease:
            tensor = lease.tensor(key(number))
            assert bool((tensor == tensor[0]).all()), tensor
            return int(tensor[0])


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    before = set(threading.enumerate())
    houses: list[House] = []

    def build(frames: int, **options: Any) -> House:
        houses.append(House(tmp_path, frames, **options))
        return houses[-1]

    yield build
    for house in houses:
        house.pager.close()
        house.arena.close()
        house.space.close(remove=True)
    assert set(threading.enumerate()) <= before, "a thread is left"
    collect()  # a task destroyed while pending would warn, and warnings are errors


@pytest.mark.parametrize("backend", ["threads", "inline"])
def test_contents_survive_random_leases_from_threads_and_coroutines(make: Any, backend: str) -> None:
    """Pages 0-5 belong to one thread, 6-11 to another, 12-17 to coroutines; 18 and 19 are read by all."""
    house = make(7, backend=backend, spare=1000)
    pager, model = house.pager, dict.fromkeys(range(20), 0)
    sizes = [PAGE if number % 3 else PAGE - 100 for number in range(20)]
    for number in range(20):
        pager.add_page(key(number), sizes[number])
        house.fill(number, 0)
    order = [(Lane.UPDATE if number >= 12 else Lane.COMPUTE, key(number)) for number in range(20)]
    pager.set_schedule(schedule_of(order))
    failures: list[BaseException] = []

    def touch(lease: Lease, numbers: list[int], intent: Intent, chance: random.Random) -> None:
        for number in numbers:
            tensor = lease.tensor(key(number))
            assert tensor.shape == (sizes[number],)
            if intent is not FRESH:
                assert bool((tensor == model[number]).all()), (number, model[number], tensor)
            if intent is not READ:
                model[number] = chance.randrange(255)
                tensor.fill_(model[number])

    def draw(own: range, chance: random.Random) -> tuple[list[int], Intent]:
        if chance.random() < 0.2:
            return [chance.choice([18, 19])], READ
        return chance.sample(own, chance.randint(1, 2)), chance.choice([READ, WRITE, WRITE, FRESH])

    def work(own: range, seed: int) -> None:
        chance = random.Random(seed)
        try:
            for turn in range(number_of(250, 500)):
                numbers, intent = draw(own, chance)
                with pager.lease([key(number) for number in numbers], intent) as lease:
                    touch(lease, numbers, intent, chance)
                if turn % 50 == 0:
                    pager.check_invariants()
                    pager.begin_step()
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    async def stream() -> None:
        chance = random.Random(3)
        for _ in range(number_of(200, 400)):
            numbers, intent = draw(range(12, 18), chance)
            lease = await pager.acquire([key(number) for number in numbers], intent)
            await pager.run_worker(touch, lease, numbers, intent, chance)
            lease.release()

    threads = [threading.Thread(target=work, args=(range(6 * index, 6 * index + 6), index)) for index in range(2)]
    for thread in threads:
        thread.start()
    pager.wait_for(pager.start_task(stream()))
    for thread in threads:
        thread.join()
    assert not failures, failures
    save_all(pager)
    pager.check_invariants()
    assert all(Tier.SWAP in valid and not leased for valid, leased in pager.residency().values())
    assert {number: house.value(number) for number in range(20)} == model
    assert house.arena.high_water <= 7 * PAGE


@pytest.mark.parametrize("broken", ["preadv", "pwritev"])
def test_an_error_from_the_drive_surfaces_in_wait_and_closing_works(make: Any, broken: str) -> None:
    house = make(2)
    house.add(4)
    for number in range(2):
        house.fill(number, number)
    save_all(house.pager)
    house.fill(0, 7)
    house.system.always(broken, errno.EIO)
    pending = [house.pager.start_lease([key(number)], FRESH) for number in (2, 3)]
    if broken == "preadv":
        for lease in pending:
            lease.wait().release()
        pending = [house.pager.start_lease([key(1)], READ)]
        with pytest.raises(OSError, match="Input/output error"):
            pending[0].wait()
        with pytest.raises(OSError, match="Input/output error"):
            house.value(1)
        house.pager.lease([key(3)], WRITE).release()
    else:
        # Page 1 was clean and made room; the bytes of the others cannot be saved and stay where they are.
        pending[0].wait().release()
        with pytest.raises(OSError, match="Input/output error"):
            pending[1].wait()
        with pytest.raises(OSError, match="Input/output error"):
            save_all(house.pager)
    house.pager.check_invariants()


def test_saving_everything_raises_the_error_of_the_page(make: Any) -> None:
    house = make(4)
    house.add(2)
    house.fill(0, 1)
    house.fill(1, 2)
    house.system.always("pwritev", errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        save_all(house.pager)
    with pytest.raises(OSError, match="No space left"):
        house.value(0)


def test_saving_waits_for_what_is_still_written_to(make: Any) -> None:
    house = make(4)
    house.add(2)
    held = house.pager.lease([key(0)], FRESH)
    held.tensor(key(0)).fill_(5)
    done: Future[None] = Future()
    thread = threading.Thread(target=lambda: done.set_result(save_all(house.pager)))
    thread.start()
    house.pager.check_invariants()
    assert not done.done()
    held.release()
    thread.join()
    assert house.pager.residency()[key(0)][0] == {Tier.SWAP, Tier.HOST}


def test_what_changes_behind_a_save_stays_in_memory(make: Any) -> None:
    house = make(4, backend="inline")
    house.add(2)
    house.fill(0, 1)
    save_all(house.pager)
    house.fill(0, 2)
    house.fill(1, 3)  # what was given back before is looked at first
    house.pager.check_invariants()
    places = house.pager.residency()
    assert [places[key(number)][0] for number in range(2)] == [{Tier.HOST}] * 2


def test_what_is_to_be_saved_is_with_the_drive_all_at_once(make: Any) -> None:
    house, stalls = make(4), [Stall() for _ in range(3)]
    house.add(3)
    for number in range(3):
        house.fill(number, number)
    house.system.inject("pwritev", *stalls)
    saved = house.pager.start_save([key(0).kind], lambda: "done")
    for stall in stalls:
        assert stall.entered.wait(60)
    for stall in stalls:
        stall.release()
    assert saved.result() == "done"


def test_a_failed_lease_fails_the_page_and_no_other(make: Any) -> None:
    house = make(4)
    house.add(2)
    house.fill(1, 9)
    error = ValueError("the kernel went wrong")
    lease = house.pager.lease([key(0)], FRESH)
    lease.fail(error)
    lease.release()
    with pytest.raises(ValueError, match="went wrong"):
        house.pager.lease([key(0)], READ)
    assert house.value(1) == 9


def test_a_thread_waiting_while_the_pager_closes_gets_an_error(make: Any) -> None:
    house = make(2)
    house.add(1)
    held = house.pager.lease([key(0)], FRESH)
    pending = house.pager.start_lease([key(0)], READ)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            pending.wait()
        except TiermemError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    house.pager.close()
    thread.join(60)
    assert "closed while" in str(caught[0])
    held.release()
    house.pager.close()


def test_after_closing_everything_says_so_and_nothing_hangs(make: Any) -> None:
    house = make(2)
    house.add(1)
    lease = house.pager.lease([key(0)], FRESH)
    house.pager.close()
    lease.release()
    house.pager.start_discard([key(0)])
    house.pager.begin_step()
    for call in (
        lambda: house.pager.lease([key(0)], READ),
        lambda: house.pager.start_lease([key(0)], READ).wait(),
        lambda: house.pager.add_page(key(1), PAGE),
        lambda: house.pager.is_written(key(0)),
        lambda: save_all(house.pager),
        house.pager.check_invariants,
    ):
        with pytest.raises(TiermemError, match="closed"):
            call()

    async def never() -> None: ...

    with pytest.raises(TiermemError, match="closed"):
        house.pager.start_task(never())


def test_closing_ends_tasks_that_wait_for_leases_kernels_or_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_GRACE_SECONDS", 0.1)
    house = make(2)
    house.add(1)
    held = house.pager.lease([key(0)], FRESH)
    entered, go = threading.Event(), threading.Event()

    def kernel() -> str:
        entered.set()
        assert go.wait(60)
        return "done"

    async def leases() -> None:
        await house.pager.acquire([key(0)], READ)

    async def idle() -> None:
        await asyncio.Event().wait()

    tasks = [house.pager.start_task(task) for task in (leases(), house.pager.run_worker(kernel), idle())]
    assert entered.wait(60)
    collect()  # an event loop by itself keeps no task that waits for what nobody else has
    closer = threading.Thread(target=house.pager.close)
    closer.start()
    with pytest.raises(TiermemError, match="closed while"):
        tasks[0].result()
    with pytest.raises(CancelledError):
        tasks[2].result()
    closer.join(0.3)  # longer than tasks have: a kernel has all the time it takes
    go.set()
    with contextlib.suppress(CancelledError):  # ended or cancelled, but not before the kernel
        tasks[1].result()
    closer.join(60)
    assert not closer.is_alive()
    held.release()


def test_an_interrupted_wait_gives_the_lease_back(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    house = make(2)
    house.add(1)
    held = house.pager.lease([key(0)], FRESH)
    pending = house.pager.start_lease([key(0)], READ)

    class Interrupted:
        def acquire(self, timeout: float) -> None:
            raise KeyboardInterrupt

        def release(self) -> None: ...

    pending._gate = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    held.release()
    house.pager.lease([key(0)], WRITE).release()
    house.pager.check_invariants()


@pytest.mark.parametrize("granted_first", [True, False])
def test_a_lease_that_is_given_up_is_given_back(make: Any, granted_first: bool) -> None:
    house = make(2)
    house.add(1)
    held = house.pager.lease([key(0)], FRESH)
    pending = house.pager.start_lease([key(0)], READ)
    if granted_first:
        held.release()
        house.pager.check_invariants()
    pending.give_up()
    held.release()
    house.pager.lease([key(0)], WRITE).release()


def test_settling_and_giving_up_in_either_order_release_once() -> None:
    for first in ("settle", "give_up"):
        released: list[Lease] = []
        lease = Lease([], {}, lambda lease, *_, into=released: into.append(lease))
        pending = PendingLease([], Waits(Counters(), Timeline()))
        if first == "settle":
            pending.settle(lease, None)
            pending.give_up()
        else:
            pending.give_up()
            pending.settle(lease, None)
        lease.release()
        assert released == [lease]


def test_an_answer_is_told_from_what_came_amid_the_wait_for_it() -> None:
    pending = PendingLease([], Waits(Counters(), Timeline()))
    alarm = TimeoutError("of a signal handler")
    assert not pending.has_raised(alarm)
    pending.settle(None, OSError("bad block"))
    assert not pending.has_raised(alarm)
    with pytest.raises(OSError, match="bad block") as caught:
        pending.wait()
    assert pending.has_raised(caught.value)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("granted_first", [False, True])
def test_room_that_was_asked_for_and_given_up_is_left_without_contents(
    make: Any, granted_first: bool, written: bool
) -> None:
    house = make(2)
    house.add(1)
    if written:
        house.pager.lease([key(0)], FRESH).release()
    other = None if granted_first else house.pager.lease([key(0)], FRESH)
    pending = house.pager.start_lease([key(0)], FRESH)
    house.pager.check_invariants()
    pending.give_up()
    if other is not None:
        other.release()
    for _ in range(3):  # turns of the loop: the lease is granted, given back, looked at
        house.pager.check_invariants()
    assert not house.pager.is_written(key(0))
    again = house.pager.lease([key(0)], FRESH)  # what was given up does not reach the next one
    again.tensor(key(0)).fill_(7)
    again.release()
    with house.pager.lease([key(0)], READ) as lease:
        assert bool((lease.tensor(key(0)) == 7).all())


def test_a_lease_is_released_once_by_many_threads(make: Any) -> None:
    house = make(2)
    house.add(1)
    for _ in range(50):
        lease = house.pager.lease([key(0)], FRESH)
        threads = [threading.Thread(target=lease.release) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(InvariantError, match="after its lease was released"):
            lease.tensor(key(0))
    house.pager.check_invariants()


@pytest.mark.parametrize("lane", list(Lane))
def test_a_standstill_is_a_capacity_error_and_not_a_hang(make: Any, lane: Lane) -> None:
    house = make(3)
    house.add(4)
    held = house.pager.lease([key(0), key(1)], FRESH)
    with pytest.raises(CapacityError, match=r"HOST has no room for 8192 bytes.*unit 0 state tile 0: 4096"):
        house.pager.lease([key(2), key(3)], FRESH, lane=lane)
    assert not house.pager.is_written(key(2))
    held.release()
    house.pager.lease([key(2), key(3)], FRESH).release()


def test_a_task_without_room_fails_when_the_computation_waits_for_it(make: Any) -> None:
    house = make(3)
    house.add(4)
    held = house.pager.lease([key(0), key(1)], FRESH)

    async def update() -> None:
        await house.pager.acquire([key(2), key(3)], FRESH)

    with pytest.raises(CapacityError):
        house.pager.wait_for(house.pager.start_task(update()))
    held.release()


def test_asking_early_is_no_standstill(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease asked for ahead of time waits for as long as the computation computes, holding what it likes."""
    monkeypatch.setattr(core, "_LOOK_SECONDS", 0.001)
    house = make(3)
    house.add(4)
    held = house.pager.lease([key(0), key(1)], FRESH)
    early = house.pager.start_lease([key(2), key(3)], FRESH)
    for _ in range(200):
        house.pager.check_invariants()
    held.release()
    early.wait().release()


def test_a_kernel_that_runs_is_no_standstill(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_LOOK_SECONDS", 0.001)
    house = make(3)
    house.add(4)
    entered, go = threading.Event(), threading.Event()

    def kernel() -> None:
        entered.set()
        assert go.wait(60)

    async def update() -> None:
        with await house.pager.acquire([key(0), key(1)], FRESH):
            await house.pager.run_worker(kernel)

    task = house.pager.start_task(update())
    assert entered.wait(60)
    pending = house.pager.start_lease([key(2), key(3)], FRESH)
    pending.awaited = True  # as `wait` says
    for _ in range(200):
        house.pager.check_invariants()
    go.set()
    pending.wait().release()
    task.result()


def test_what_has_gone_on_since_the_last_look_is_no_standstill(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody was granted something, and may give it back in a moment."""
    monkeypatch.setattr(core, "_LOOK_SECONDS", 1000.0)
    house = make(3)
    house.add(4)
    held = house.pager.lease([key(0), key(1)], FRESH)
    pending = house.pager.start_lease([key(2), key(3)], FRESH)
    pending.awaited = True
    its = house.pager._core

    def look(events: int) -> bool:
        its._watch(its._events - events)
        return bool(its.service.waiting)

    assert its.loop.call(lambda: look(1))
    assert not its.loop.call(lambda: look(0))
    with pytest.raises(CapacityError):
        pending.wait()
    held.release()


@pytest.mark.parametrize("intent", list(Intent))
def test_a_lease_that_nobody_has_any_more_is_given_back(make: Any, intent: Intent) -> None:
    """As an interrupt loses it, behind the grant, before it is stored; what was to be written anew has no contents."""
    house = make(3)
    house.add(4)
    for number in range(4):
        house.fill(number, number + 1)
    lost = [house.pager.lease([key(0), key(1)], intent)]
    lost.clear()
    house.pager.lease([key(2), key(3)], FRESH).release()
    house.pager.check_invariants()
    assert [house.pager.is_written(key(number)) for number in range(2)] == [intent is not FRESH] * 2


def test_a_budget_that_is_no_multiple_of_a_frame(make: Any) -> None:
    house = make(2, spare=4000)
    house.add(6, nbytes=100)
    for number in range(6):
        house.fill(number, number)
    assert [house.value(number) for number in range(6)] == list(range(6))


def test_a_page_named_twice_is_leased_once(make: Any) -> None:
    house = make(2)
    house.add(1)
    with house.pager.lease([key(0), key(0)], FRESH) as lease:
        assert lease.tensor(key(0)).numel() == PAGE
    house.pager.check_invariants()


def test_an_unknown_page_and_a_page_never_written_are_bugs(make: Any) -> None:
    house = make(2)
    house.add(1)
    with pytest.raises(InvariantError, match="no such page"):
        house.pager.lease([key(5)], READ)
    with pytest.raises(InvariantError, match="never written"):
        house.pager.lease([key(0)], READ)
    with pytest.raises(InvariantError):
        house.pager.add_page(key(0), PAGE)


def test_discarded_contents_are_gone_and_the_page_can_be_written_again(make: Any) -> None:
    house = make(2)
    house.add(1)
    house.fill(0, 3)
    assert house.pager.is_written(key(0))
    house.pager.start_discard([key(0)])
    assert not house.pager.is_written(key(0))
    house.fill(0, 4)
    assert house.value(0) == 4


def cancel(house: Any, tasks: list[asyncio.Task[Any] | None]) -> None:
    while tasks and (task := tasks.pop()) is not None:
        house.pager._loop.asyncio.call_soon_threadsafe(task.cancel)


def test_a_cancelled_acquire_leaves_nothing_held(make: Any) -> None:
    house = make(2)
    house.add(1)
    held = house.pager.lease([key(0)], FRESH)
    tasks: list[asyncio.Task[Any] | None] = []
    for release_first in (False, True):

        async def wait() -> None:
            tasks.append(asyncio.current_task())
            await house.pager.acquire([key(0)], WRITE)

        future = house.pager.start_task(wait())
        while not tasks:  # it begins in a turn of the loop that may come behind whatever is asked now
            time.sleep(0.001)
        house.pager.check_invariants()
        if release_first:
            held.release()
        cancel(house, tasks)
        if not release_first:
            with pytest.raises(CancelledError):
                future.result()
            assert future.cancelled()
    house.pager.lease([key(0)], WRITE).release()
    house.pager.check_invariants()


def test_a_cancelled_kernel_is_waited_for(make: Any) -> None:
    house = make(2)
    entered, go, after = threading.Event(), threading.Event(), threading.Event()

    def kernel() -> None:
        entered.set()
        assert go.wait(60)

    tasks: list[asyncio.Task[Any] | None] = []

    async def update() -> None:
        tasks.append(asyncio.current_task())
        try:
            await house.pager.run_worker(kernel)
        finally:
            assert go.is_set()
            after.set()

    house.pager.start_task(update())
    assert entered.wait(60)
    cancel(house, tasks)
    house.pager.check_invariants()
    assert not after.is_set(), "the kernel still writes into leased frames"
    go.set()
    assert after.wait(60)


def test_closing_waits_for_moves_in_flight(make: Any) -> None:
    house = make(2)
    house.add(1)
    stall = Stall()
    house.system.inject("pwritev", stall)
    house.fill(0, 1)
    caught: list[TiermemError] = []

    def save_until_closed() -> None:
        try:
            save_all(house.pager)
        except TiermemError as error:
            caught.append(error)

    saving = threading.Thread(target=save_until_closed)
    saving.start()
    assert stall.entered.wait(60)
    closer = threading.Thread(target=house.pager.close)
    closer.start()
    saving.join(60)
    assert len(caught) == 1
    closer.join(0.3)
    assert closer.is_alive()
    stall.release()
    closer.join(60)
    assert not closer.is_alive()


def test_after_an_error_that_should_not_exist_everybody_gets_it(make: Any) -> None:
    house = make(2)
    house.add(2)
    held = house.pager.lease([key(0)], FRESH)
    waiting = house.pager.start_lease([key(0)], READ)
    house.pager.start_discard([key(9)])
    for lease in (waiting, house.pager.start_lease([key(1)], FRESH)):
        with pytest.raises(InvariantError, match="no such page"):
            lease.wait()
    with pytest.raises(InvariantError, match="no such page"):
        save_all(house.pager)  # at once: nothing more happens that would tell it
    held.release()


def test_who_leases_a_frame_waits_for_what_its_holders_have_asked_for(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them: each who handed the lease over, and who gave it back without having looked."""
    held = []

    class Fence:
        def passed(self) -> bool:
            return False

        def hold(self) -> None:
            held.append(self)

    house = make(2)
    house.add(1)
    monkeypatch.setattr(house.arena, "fence", Fence)
    lease = house.pager.lease([key(0)], FRESH)
    lease.hand_over(), lease.hand_over()
    before = set(lease.handed_over)
    lease.release()
    with house.pager.lease([key(0)], READ) as later:
        later.tensor(key(0))
    assert len(before) == 2
    assert len(held) == 3
    assert before < set(held)


def test_tensors_are_views_of_the_frame(make: Any) -> None:
    house = make(2)
    house.pager.add_page(key(0), 100)
    with house.pager.lease([key(0)], FRESH) as lease:
        tensor = lease.tensor(key(0))
        assert (tensor.shape, tensor.dtype) == ((100,), torch.uint8)
        assert tensor.untyped_storage().nbytes() == PAGE


def test_saving_takes_up_what_was_in_use_when_it_began(make: Any) -> None:
    """Page 1 is given back while page 0 is still waited for: nothing happens any more that would remind of it."""
    house = make(8)
    house.add(2)
    held = [house.pager.lease([key(number)], FRESH) for number in range(2)]
    for number, lease in enumerate(held):
        lease.tensor(key(number)).fill_(number)
    saved = house.pager.start_save([key(0).kind], lambda: "done")
    house.pager.check_invariants()
    for lease in reversed(held):
        lease.release()
        house.pager.check_invariants()
    assert saved.result() == "done"


def test_a_lease_given_back_where_everything_fits_reaches_whoever_waits_for_it(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_LOOK_SECONDS", 1000)  # nor is it found in passing
    house = make(8)
    house.add(2)
    for number in (0, 1):
        house.fill(number, number)
    for turn in range(20):
        held = house.pager.lease([key(0)], WRITE)
        pending = house.pager.start_lease([key(0)], READ)
        if turn % 2:
            house.pager.check_invariants()  # the request has arrived: nothing but the release is to come
        held.release()
        pending.wait().release()
        save_all(house.pager)  # so that no write of another page ends meanwhile
        held = house.pager.lease([key(1)], WRITE)
        saved = house.pager.start_save([key(0).kind], lambda: "done")
        house.pager.check_invariants()
        held.release()
        assert saved.result() == "done"


@pytest.mark.parametrize("intent", [READ, WRITE])
def test_a_coroutine_has_what_is_there_without_waiting(make: Any, intent: Intent) -> None:
    house = make(8)
    house.add(1)
    house.fill(0, 7)

    async def asks() -> int:
        coroutine = house.pager.acquire([key(0)], intent)
        with pytest.raises(StopIteration) as ended:
            coroutine.send(None)  # it never suspends
        lease = ended.value.value
        value = int(lease.tensor(key(0))[0])
        lease.release()
        return value

    assert house.pager.wait_for(house.pager.start_task(asks())) == 7
    house.pager.check_invariants()
    assert house.pager.residency()[key(0)][1] is False


def test_a_kernel_for_which_no_thread_can_be_started_fails_and_the_next_one_runs(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pager, start = make(4).pager, threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(TiermemError, match=r"no thread can be started for .*can't start new thread.*ulimit -u"):
        pager.start_task(pager.run_worker(lambda: 1)).result()
    monkeypatch.setattr(threading.Thread, "start", start)
    assert pager.start_task(pager.run_worker(lambda: 2)).result() == 2


def test_a_kernel_that_ends_the_program_is_an_error_and_the_loop_goes_on(make: Any) -> None:
    house = make(4)

    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(TiermemError, match="a kernel ended with SystemExit: 3"):
        house.pager.start_task(house.pager.run_worker(leave)).result()
    house.add(1)
    house.fill(0, 5)
    assert house.value(0) == 5


def test_a_wait_that_was_interrupted_is_waited_for_no_longer(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a computation that holds leases for a while would be taken for blocked for ever."""
    house = make(4)
    pending: Future[None] = Future()

    def interrupted(timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pending, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        house.pager.wait_for(pending)
    assert house.pager._loop.call(lambda: dict(house.pager._core._awaited)) == {}
    stays = object()
    house.pager._loop.call(lambda: house.pager._core.thread_waits(stays, weakref.ref(pending)))
    pending.set_result(None)  # as if an interrupt had kept the end of the wait from being said
    house.pager._loop.call(lambda: house.pager._core._watch(0))
    assert house.pager._loop.call(lambda: dict(house.pager._core._awaited)) == {}


def test_a_fresh_lease_that_is_given_up_on_the_loop_leaves_nothing_in_its_page(make: Any) -> None:
    house = make(1)
    house.add(2)

    async def given_up() -> bool:
        task = asyncio.ensure_future(house.pager.acquire([key(1)], FRESH))
        await asyncio.sleep(0)
        held.release()
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    held = house.pager.lease([key(0)], FRESH)
    assert house.pager.start_task(given_up()).result()
    assert not house.pager.is_written(key(1))


class NeedsTwoError(OSError):
    def __init__(self, code: int, words: str) -> None:
        super().__init__(f"{words} ({code})")


def test_a_page_keeps_its_error_and_nobody_who_has_met_it(make: Any) -> None:
    """Nor is an error lost that cannot be made again from its arguments."""
    house = make(4)
    house.add(2)
    house.fill(0, 1)
    error = NeedsTwoError(5, "the drive is gone")
    page = house.pager._core.residency.pages[key(0)]
    house.pager._loop.call(lambda: house.pager._core.residency.fail(page, error))
    for ask in (
        lambda: house.pager.lease([key(0)], READ),
        lambda: house.pager.start_task(house.pager.acquire([key(0)], READ)).result(),
        lambda: save_all(house.pager),
    ):
        for _ in range(3):
            with pytest.raises(TiermemError, match=r"NeedsTwoError: the drive is gone \(5\)") as caught:
                ask()
            assert caught.value.__cause__ is not None
    assert error.__traceback__ is None


def test_closing_may_be_interrupted_and_done_again(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    house = make(4)
    end = house.pager._loop._end

    def interrupted(last: Any) -> None:
        monkeypatch.setattr(house.pager._loop, "_end", end)
        raise KeyboardInterrupt

    monkeypatch.setattr(house.pager._loop, "_end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        house.pager.close()
    house.pager.close()
    assert not any("tiermem-pager" in thread.name for thread in threading.enumerate())
