"""Where saved storages go: numbers, pieces, what is kept once, failed pages. Against a shelf in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Self

import pytest
import torch
from doubles_signals import interrupted_everywhere
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import CapacityError
from tiermem.pager.page import Intent, PageKey
from tiermem.zero3.activations import ActivationStore, PagedTensor

PIECE = 4096


class ShelfLease:
    def __init__(self, shelf: Shelf, key: PageKey) -> None:
        self.shelf, self.key = shelf, key

    def wait(self) -> ShelfLease:
        self.shelf.pending -= 1
        if self.shelf.amid is not None:
            self.shelf.amid()
        if self.key in self.shelf.failing:
            raise CapacityError("no room, on purpose")
        self.shelf.leased += 1
        return self

    def has_raised(self, error: BaseException) -> bool:
        return isinstance(error, CapacityError)

    def give_up(self) -> None:
        self.shelf.pending -= 1

    def tensor(self, key: PageKey) -> torch.Tensor:
        assert key == self.key
        return self.shelf.pages[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shelf.leased -= 1


class Shelf:
    """A pager that is always there; `stuck` pages cannot be replaced, `failing` ones not be leased."""

    def __init__(self) -> None:
        self.pages: dict[PageKey, torch.Tensor] = {}
        self.full: set[PageKey] = set()
        self.stuck: set[PageKey] = set()
        self.failing: set[PageKey] = set()
        self.leased = 0
        self.pending = 0
        self.asked = 0  # at one time, at most
        self.amid: Callable[[], None] | None = None  # a signal handler, in the middle of each wait

    def add_page(self, key: PageKey, nbytes: int, *, replace: bool) -> bool:
        assert replace
        if key in self.stuck:
            return False
        self.failing.discard(key)
        self.pages[key] = torch.full((nbytes,), 255, dtype=torch.uint8)
        return True

    def start_lease(self, keys: Sequence[PageKey], intent: Intent) -> ShelfLease:
        (key,) = keys
        assert (key in self.full) or intent is Intent.FRESH
        self.full.add(key)
        self.pending += 1
        self.asked = max(self.asked, self.pending)
        return ShelfLease(self, key)

    def start_discard(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            assert key in self.pages
        self.full.difference_update(keys)


def store(shelf: Shelf, at_once: int = 2) -> tuple[ActivationStore, list[PageKey]]:
    touched: list[PageKey] = []
    return ActivationStore(shelf, touched.append, piece_nbytes=PIECE, at_once=at_once), touched


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 3 * PIECE), st.booleans(), st.integers(0, 7)), max_size=25))
def test_what_is_kept_comes_back_and_pages_are_as_many_as_most_were_alive(
    steps: list[tuple[int, bool, int]],
) -> None:
    shelf = Shelf()
    kept, _ = store(shelf)
    alive: list[tuple[PagedTensor, torch.Tensor]] = []
    most = 0
    for nbytes, drop, which in steps:
        if drop and alive:
            alive.pop(which % len(alive))
        tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        alive.append((kept.keep(tensor), tensor.clone()))
        most = max(most, len(alive))
        assert kept.alive == len(alive)
        assert all(torch.equal(paged.restore(), expected) for paged, expected in alive)
        assert len(shelf.full) == sum(-(-len(expected) // PIECE) for _, expected in alive)
    assert len({key.unit for key in shelf.pages}) <= most
    alive.clear()
    assert kept.alive == 0
    assert shelf.full == set()
    assert shelf.leased == 0


@pytest.mark.parametrize("at_once", [1, 2])
def test_no_more_pieces_are_held_than_there_may_be(at_once: int) -> None:
    shelf = Shelf()
    kept, _ = store(shelf, at_once)
    tensor = torch.randn(5 * PIECE // 4)
    assert torch.equal(kept.keep(tensor).restore(), tensor)
    assert shelf.asked == at_once
    assert shelf.pending == 0


def test_views_of_a_storage_share_pages_and_keep_their_form() -> None:
    shelf = Shelf()
    kept, touched = store(shelf)
    base = torch.randn(40, 50)
    views = [base, base.t(), base[3:30:2, 4:], base[:, 7].expand(3, 40), base.view(torch.int32)]
    paged = [kept.keep(view) for view in views]
    assert kept.alive == 1
    assert [key.tile for key in touched] == [0, 1]
    for view, handle in zip(views, paged, strict=True):
        restored = handle.restore()
        assert (restored.shape, restored.stride(), restored.dtype) == (view.shape, view.stride(), view.dtype)
        assert torch.equal(restored, view)


def test_what_dies_on_another_thread_is_not_given_out_again() -> None:
    shelf = Shelf()
    kept, _ = store(shelf)
    tensor = torch.randn(10)
    alive = [kept.keep(tensor)]
    dying, forgotten = threading.Event(), threading.Event()
    discard = shelf.start_discard

    def discard_late(keys: Sequence[PageKey]) -> None:
        dying.set()
        assert forgotten.wait(60)
        discard(keys)

    shelf.start_discard = discard_late  # type: ignore[method-assign]
    thread = threading.Thread(target=alive.clear)
    thread.start()
    assert dying.wait(60)
    again = kept.keep(tensor)
    forgotten.set()
    thread.join()
    assert torch.equal(again.restore(), tensor)


def test_a_storage_changed_in_place_is_kept_again_and_the_old_one_refused() -> None:
    kept, _ = store(Shelf())
    tensor = torch.zeros(10)
    before = kept.keep(tensor)
    tensor[2] = 1
    after = kept.keep(tensor)
    assert kept.alive == 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.restore()
    assert torch.equal(after.restore(), tensor)


def test_a_new_storage_at_an_old_address_is_another_one() -> None:
    kept, _ = store(Shelf())
    held = []
    for value in range(50):  # the allocator hands the same block out again and again
        tensor = torch.full((1000,), float(value))
        held.append(kept.keep(tensor))
        del tensor
    assert [paged.restore()[0].item() for paged in held] == list(range(50))


def test_a_page_on_its_way_to_be_forgotten_is_passed_by() -> None:
    shelf = Shelf()
    kept, _ = store(shelf)
    first = kept.keep(torch.zeros(100, dtype=torch.uint8))
    (key,) = shelf.pages
    del first
    shelf.stuck.add(key)
    other = kept.keep(torch.zeros(200, dtype=torch.uint8))
    assert {page.unit for page in shelf.full} == {1}
    shelf.stuck.clear()
    again = kept.keep(torch.zeros(300, dtype=torch.uint8))
    assert {page.unit for page in shelf.full} == {0, 1}
    assert (len(other.restore()), len(again.restore())) == (200, 300)


def test_a_failed_page_is_made_anew() -> None:
    shelf = Shelf()
    kept, _ = store(shelf)
    tensor = torch.arange(100, dtype=torch.uint8)
    del_me = kept.keep(tensor)
    (key,) = shelf.pages
    del del_me
    shelf.failing.add(key)  # it failed to be written down after it was given up
    assert torch.equal(kept.keep(tensor).restore(), tensor)

    paged = kept.keep(tensor.clone())
    shelf.failing.update(shelf.full)
    for _ in range(2):
        with pytest.raises(CapacityError):
            paged.restore()
    del paged
    assert torch.equal(kept.keep(tensor.clone()).restore(), tensor)
    assert kept.alive == 0


def test_what_a_signal_handler_raises_while_room_is_waited_for_is_raised() -> None:
    shelf = Shelf()
    kept, _ = store(shelf)
    tensor = torch.arange(100, dtype=torch.uint8)

    def ring() -> None:
        shelf.amid = None
        raise TimeoutError("an alarm, on purpose")

    shelf.amid = ring
    with pytest.raises(TimeoutError):
        kept.keep(tensor)
    assert kept.alive == 0
    assert torch.equal(kept.keep(tensor).restore(), tensor)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it came while something was finalized
def test_interrupts_anywhere_leave_a_store_that_keeps() -> None:
    """A number was free that had no sizes yet: nothing was kept any more."""
    tensor = torch.randint(0, 256, (PIECE + 7,), dtype=torch.uint8)
    stores: list[ActivationStore] = []

    def make():
        stores.append(store(Shelf())[0])
        return lambda: stores[-1].keep(tensor)

    for _ in interrupted_everywhere(make):
        again = [stores[-1].keep(each) for each in (tensor, tensor.clone())]
        assert all(torch.equal(paged.restore(), tensor) for paged in again)
    assert len(stores) > 30


def test_a_saved_tensor_may_die_on_another_thread() -> None:
    shelf = Shelf()
    kept, _ = store(shelf)
    held = [kept.keep(torch.randn(2000)) for _ in range(10)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert kept.alive == 0
    assert shelf.full == set()
