"""The allocator of extents: no overlap, no leak, one hole in the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swap import ALIGNMENT, Extent, ExtentAllocator, Piece, SwapError


def test_best_fit_keeps_large_holes_whole() -> None:
    allocator = ExtentAllocator(10 * ALIGNMENT, start=ALIGNMENT)
    offsets = [allocator.allocate(size * ALIGNMENT) for size in (3, 1, 1, 1)]
    assert offsets == [1 * ALIGNMENT, 4 * ALIGNMENT, 5 * ALIGNMENT, 6 * ALIGNMENT]
    allocator.free(1 * ALIGNMENT, 3 * ALIGNMENT)
    allocator.free(5 * ALIGNMENT, ALIGNMENT)
    assert allocator.allocate(ALIGNMENT) == 5 * ALIGNMENT
    assert allocator.largest_hole == 4 * ALIGNMENT


def test_no_room_is_none_and_changes_nothing() -> None:
    allocator = ExtentAllocator(2 * ALIGNMENT)
    assert allocator.allocate(3 * ALIGNMENT) is None
    assert allocator.allocated == 0
    assert ExtentAllocator(0).allocate(ALIGNMENT) is None


@pytest.mark.parametrize("nbytes", [0, -4096, 1, 4097])
def test_odd_sizes_are_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 4096"):
        ExtentAllocator(1 << 20).allocate(nbytes)


def test_freeing_twice_is_refused() -> None:
    allocator = ExtentAllocator(1 << 20)
    offset = allocator.allocate(8192)
    assert offset is not None
    with pytest.raises(SwapError, match="8192 allocated there"):
        allocator.free(offset, 4096)
    allocator.free(offset, 8192)
    with pytest.raises(SwapError, match="freed twice"):
        allocator.free(offset, 8192)


def test_extent_adds_its_pieces() -> None:
    assert Extent((Piece(0, 0, 4096), Piece(1, 8192, 8192))).nbytes == 12288
    assert Extent((Piece(0, 0, 4096),)) != Extent((Piece(0, 0, 4096),), slot=1)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), max_size=30))
def test_claimed_ranges_never_overlap(ranges: list[tuple[int, int]]) -> None:
    allocator = ExtentAllocator(18 * ALIGNMENT, start=2 * ALIGNMENT)
    taken: set[int] = set()
    claimed = []
    for begin, length in ranges:
        wanted = set(range(begin, begin + length))
        fits = wanted <= set(range(2, 20)) and not wanted & taken
        assert allocator.claim(begin * ALIGNMENT, length * ALIGNMENT) == fits
        if fits:
            taken |= wanted
            claimed.append((begin * ALIGNMENT, length * ALIGNMENT))
    assert allocator.allocated == len(taken) * ALIGNMENT
    for extent in claimed:
        allocator.free(*extent)
    assert allocator.largest_hole == 18 * ALIGNMENT, "and is whole again"


@given(st.integers(0, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=120))
def test_what_is_not_allocated_is_room_in_one_piece(capacity: int, actions: list[tuple[bool, int]]) -> None:
    start = 3 * ALIGNMENT
    allocator = ExtentAllocator(capacity * ALIGNMENT, start=start)
    used: list[tuple[int, int]] = []
    for free, size in actions:
        if free and used:
            allocator.free(*used.pop(size % len(used)))
        else:
            room = allocator.largest_hole
            offset = allocator.allocate(size * ALIGNMENT)
            assert (offset is None) == (room < size * ALIGNMENT)
            if offset is not None:
                used.append((offset, size * ALIGNMENT))
        cursor, gaps = start, []
        for offset, length in sorted(used):
            assert offset >= cursor
            assert offset % ALIGNMENT == 0
            gaps.append(offset - cursor)
            cursor = offset + length
        gaps.append(start + capacity * ALIGNMENT - cursor)
        assert min(gaps) >= 0
        assert allocator.largest_hole == max(gaps)
        assert allocator.allocated == sum(length for _, length in used) <= allocator.high_water
    for extent in used:
        allocator.free(*extent)
    assert allocator.largest_hole == capacity * ALIGNMENT
