"""Frames in one piece of memory: apart from each other, and never reused before what was asked of them is done."""

import pytest
import torch
from doubles_combinations import number_of
from doubles_garbage import collect
from doubles_pager import is_viewed
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import ConfigError, InvariantError
from tiermem.memory.arena import FRAME_ALIGNMENT, Frame
from tiermem.memory.ranges import Range, cheapest_window
from tiermem.memory.slab import SlabArena, TensorSlab
from tiermem.memory.tiers import Tier

UNIT = FRAME_ALIGNMENT


class ManualFence:
    """Passes when the test says so."""

    def __init__(self) -> None:
        self.over = False
        self.holds = 0

    def passed(self) -> bool:
        return self.over

    def hold(self) -> None:
        self.holds += 1


def _arena(units: int, *, poison: bool = False) -> SlabArena:
    return SlabArena(TensorSlab(torch.empty(units * UNIT, dtype=torch.uint8)), Tier.DEVICE, poison=poison)


def _frame(arena: SlabArena, nbytes: int) -> Frame:
    frame = arena.allocate(nbytes)
    assert frame is not None
    return frame


def test_frames_share_one_allocation_and_have_storages_of_their_own() -> None:
    whole = torch.zeros(8 * UNIT, dtype=torch.uint8)
    arena = SlabArena(TensorSlab(whole), Tier.DEVICE)
    first, second = _frame(arena, 5), _frame(arena, UNIT + 1)
    assert (arena.reserved, second.nbytes) == (3 * UNIT, 2 * UNIT)
    second.tensor.fill_(7)
    assert int(whole.count_nonzero()) == 2 * UNIT
    assert int(first.tensor.count_nonzero()) == 0
    storage = second.tensor.untyped_storage()
    assert (storage.nbytes(), second.tensor.storage_offset()) == (2 * UNIT, 0)
    assert storage.data_ptr() == whole.data_ptr() + second.offset
    assert not is_viewed(second)
    view = second.tensor[:64]
    assert is_viewed(second)
    assert not is_viewed(first)
    del view
    assert not is_viewed(second)
    with pytest.raises(InvariantError, match="on a device"):
        assert first.buffer


def test_a_view_keeps_the_memory_after_closing() -> None:
    arena = _arena(4)
    view = _frame(arena, UNIT).tensor.fill_(5)[:100]
    arena.close()
    arena.close()
    collect()
    others = [torch.zeros(4 * UNIT, dtype=torch.uint8) for _ in range(8)]
    assert view.tolist() == [5] * 100
    assert len(others) == 8
    with pytest.raises(InvariantError, match="closed"):
        arena.allocate(1)


def test_misuse_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise device_memory"):
        SlabArena(TensorSlab(torch.empty(UNIT - 1, dtype=torch.uint8)), Tier.DEVICE)
    arena, other = _arena(4), _arena(4)
    frame = _frame(arena, 1)
    with pytest.raises(InvariantError, match="not live"):
        other.free(frame)
    arena.free(frame)
    with pytest.raises(InvariantError, match="freed twice"):
        arena.free(frame)


def test_poison_is_there_when_a_frame_is_handed_out_and_when_it_is_freed() -> None:
    arena = _arena(4, poison=True)
    frame = _frame(arena, UNIT)
    bytes_of = frame.tensor
    assert bytes_of.unique().tolist() == [0xFF]
    bytes_of.zero_()
    arena.free(frame)
    assert bytes_of.unique().tolist() == [0xFF]


def test_whoever_gets_the_bytes_gets_the_fences() -> None:
    arena = _arena(4)
    left, right = _frame(arena, UNIT), _frame(arena, UNIT)
    fences = [ManualFence(), ManualFence()]
    left.fence(fences[0])
    right.fence(fences[1])
    arena.free(left)
    arena.free(right)
    both = _frame(arena, 2 * UNIT)
    assert set(both.fences) == set(fences)
    arena.free(both)
    fences[1].over = True
    again, beside = _frame(arena, UNIT), _frame(arena, 3 * UNIT)
    assert again.offset == left.offset
    assert (again.fences, beside.fences) == ((fences[0],), (fences[0],)), "freed with all of them: kept until they pass"
    fences[0].over = True
    arena.free(again)
    assert _frame(arena, UNIT).fences == ()


def test_what_only_lies_beside_has_other_fences() -> None:
    arena = _arena(3)
    frames, fences = [_frame(arena, UNIT) for _ in range(3)], [ManualFence() for _ in range(3)]
    for frame, fence in zip(frames, fences, strict=True):
        frame.fence(fence)
        arena.free(frame)
    found = [_frame(arena, UNIT) for _ in range(3)]
    assert [(frame.offset, frame.fences) for frame in found] == [
        (frame.offset, (fence,)) for frame, fence in zip(frames, fences, strict=True)
    ]


def test_a_frame_forgets_fences_that_have_passed() -> None:
    frame = _frame(_arena(4), UNIT)
    old, new = ManualFence(), ManualFence()
    frame.fence(old)
    frame.fence(None)
    assert frame.fences == (old,)
    old.over = True
    frame.fence(new)
    assert frame.fences == (new,)


def test_room_in_bytes_is_not_room_in_one_piece() -> None:
    arena = _arena(5)
    frames = [_frame(arena, UNIT) for _ in range(5)]
    for frame in frames[::2]:
        arena.free(frame)
    assert arena.capacity - arena.reserved == 3 * UNIT
    assert arena.allocate(2 * UNIT) is None
    assert arena.reserved == 2 * UNIT
    assert arena.clearing(2 * UNIT, []) is None
    assert arena.clearing(UNIT, []) == []
    assert arena.clearing(2 * UNIT, [frames[3]]) == [frames[3]]
    chosen = arena.clearing(5 * UNIT, [frames[3], frames[1]])
    assert chosen is not None
    for frame in chosen:
        arena.free(frame)
    assert arena.allocate(5 * UNIT) is not None


_CUTS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["hole", "taken", "stays"])), max_size=9)


def test_the_low_end_is_set_aside_for_what_passes_through() -> None:
    arena = SlabArena(TensorSlab(torch.empty(20 * UNIT, dtype=torch.uint8)), Tier.HOST, passing=4 * UNIT)
    tiles = [_frame(arena, UNIT) for _ in range(12)]
    assert min(tile.offset for tile in tiles) == 8 * UNIT
    assert arena.allocate(UNIT) is None, "8 units are free, and not for tiles"
    assert arena.clearing(UNIT, [tiles[3], tiles[5]]) == [tiles[3]], "the low end is no place for it"
    large = [_frame(arena, 4 * UNIT), _frame(arena, 3 * UNIT)]
    assert [frame.offset for frame in large] == [0, 4 * UNIT]
    assert arena.allocate(2 * UNIT) is None
    lowest = min(tiles, key=lambda tile: tile.offset)
    assert arena.clearing(2 * UNIT, [*large, *tiles]) == [lowest], "what is large goes anywhere, also beside it"
    assert arena.clearing(UNIT, large) is None
    arena.free(tiles[3])
    arena.free(tiles[5])
    assert _frame(arena, UNIT).offset == min(tiles[3].offset, tiles[5].offset), "where one of its size has been"
    arena.free(tiles[0])
    arena.free(tiles[1])
    assert _frame(arena, UNIT).offset == max(tiles[3].offset, tiles[5].offset), "not in a larger gap below"


def test_what_is_much_smaller_than_tiles_goes_to_the_high_end() -> None:
    arena = SlabArena(TensorSlab(torch.empty(40 * UNIT, dtype=torch.uint8)), Tier.HOST, passing=10 * UNIT)
    assert _frame(arena, 4 * UNIT).offset == 20 * UNIT
    assert _frame(arena, UNIT).offset == 39 * UNIT
    assert _frame(arena, 4 * UNIT).offset == 24 * UNIT


@given(_CUTS, st.integers(1, 10))
@settings(max_examples=number_of(120, 300))
def test_the_cheapest_window(cuts: list[tuple[int, str]], length: int) -> None:
    holes, taken, start = [], [], 0
    cost_of: list[int | None] = []
    for size, what in cuts:
        part = Range(start, start + size)
        (holes if what == "hole" else taken if what == "taken" else []).append(part)
        cost_of += [None if what == "stays" else len(taken) - 1 if what == "taken" else -1] * size
        start += size
    windows = [cost_of[at : at + length] for at in range(start - length + 1)]
    possible = [{index for index in window if index != -1} for window in windows if None not in window]
    chosen = cheapest_window(holes, taken, length)
    if chosen is None:
        assert not possible
    else:
        assert set(chosen) in possible
        costs = [sum(taken[index].length for index in window if index is not None) for window in possible]
        assert sum(taken[index].length for index in chosen) == min(costs)
