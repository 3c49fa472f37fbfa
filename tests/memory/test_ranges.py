"""The address allocator against the plainest model: sets of integers."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import InvariantError
from tiermem.memory.ranges import Placement, Range, RangeAllocator, RangeSet

_spans = st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(st.tuples(st.booleans(), _spans)), _spans)
def test_range_set_is_a_set_of_addresses(steps: list[tuple[bool, tuple[int, int]]], probe: tuple[int, int]) -> None:
    ranges, model = RangeSet(), set[int]()
    for add, (start, end) in steps:
        span = set(range(start, end))
        if not add:
            assert ranges.remove(start, end) == len(model & span)
            model -= span
        elif model & span:
            with pytest.raises(InvariantError):
                ranges.add(start, end)
        else:
            ranges.add(start, end)
            model |= span
        assert {address for part in ranges for address in range(*part)} == model
        assert ranges.total == len(model)
        parts = list(ranges)
        assert all(left.end < right.start for left, right in itertools.pairwise(parts))
        assert ranges.count(*probe) == len(model & set(range(*probe)))
        assert ranges.at_least(3) == [part for part in parts if part.length >= 3]


@settings(max_examples=200)
@given(
    st.integers(1, 30),
    st.integers(1, 4),
    st.integers(1, 8),
    st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60),
)
def test_physical_addresses_stay_within_the_limit(
    limit: int, factor: int, block: int, steps: list[tuple[bool, int]]
) -> None:
    allocator = RangeAllocator(limit, block=block)
    allocator.extend(0, limit * factor)
    live: dict[int, int] = {}
    touched: set[int] = set()  # what the system would count as used memory
    for allocate, number in steps:
        if allocate:
            if number < 1 or sum(live.values()) + number > limit:
                continue
            holes, warm = allocator.holes(), allocator.warm_ranges()
            placement = allocator.allocate(number)
            if placement is None:
                continue
            allocator.take_back(placement)
            assert (allocator.holes(), allocator.warm_ranges()) == (holes, warm)
            assert allocator.allocate(number) == placement
            if number >= block and placement.start % block:
                assert all(-(-hole.start // block) * block + number > hole.end for hole in holes), "room for no other"
            taken = {address for start, length in live.items() for address in range(start, start + length)}
            new = set(range(placement.start, placement.start + number))
            assert not taken & new
            assert new <= set(range(limit * factor))
            cooled = {address for part in placement.cooled for address in range(*part)}
            assert cooled <= touched - taken - new
            assert {address for part in placement.cold for address in range(*part)} == new - touched
            check_exchanges(placement, block)
            touched = touched - cooled | new
            live[placement.start] = number
        elif live:
            start = sorted(live)[number % len(live)]
            assert allocator.release(start) == live.pop(start)
        assert len(touched) <= limit
        assert sum(live.values()) + allocator.warm == len(touched)
        assert sum(live.values()) + sum(hole.length for hole in allocator.holes()) == limit * factor


def check_exchanges(placement: Placement, block: int) -> None:
    """Whole blocks go from what is cooled to what is cold, each to one place; the rest of what is cooled is left."""
    moves, left = placement.exchanges(block)
    sources = [address for part, _ in moves for address in range(*part)]
    targets = [address for part, to in moves for address in range(to, to + part.length)]
    rest = [address for part in left for address in range(*part)]
    assert all(number % block == 0 for part, to in moves for number in (part.start, part.length, to))
    assert sorted(sources + rest) == sorted(address for part in placement.cooled for address in range(*part))
    assert len(set(targets)) == len(targets)
    assert set(targets) <= {address for part in placement.cold for address in range(*part)}
    whole = [sum(_blocks(part, block) for part in parts) for parts in (placement.cooled, placement.cold)]
    assert len(sources) == block * min(whole), "as many as there are on both sides"


def _blocks(part: Range, block: int) -> int:
    return max(0, part.end // block - -(-part.start // block))


def test_blocks_move_into_the_gaps_and_scraps_are_left() -> None:
    placement = Placement(16, cooled=(Range(1, 7), Range(8, 12)), cold=(Range(15, 17), Range(20, 27)))
    assert placement.exchanges(2) == (
        [(Range(2, 6), 20), (Range(8, 10), 24)],
        [Range(1, 2), Range(6, 7), Range(10, 12)],
    )
    whole = Placement(20, cooled=(Range(2, 4),), cold=(Range(20, 22),))
    assert whole.exchanges(2) == ([(Range(2, 4), 20)], []), "nothing is left of what moves as a whole"
    single = Placement(9, cooled=(Range(3, 4),), cold=(Range(9, 10),))
    assert single.exchanges(1) == ([(Range(3, 4), 9)], [])
    assert single.exchanges(2) == ([], [Range(3, 4)])


def test_an_empty_range_is_added_to_no_set() -> None:
    with pytest.raises(InvariantError, match="is empty"):
        RangeSet().add(5, 5)


def test_a_warm_range_of_the_same_length_is_preferred() -> None:
    allocator = RangeAllocator(100)
    allocator.extend(0, 800)
    first, kept, second = (allocator.allocate(length) for length in (30, 5, 10))
    assert first is not None
    assert second is not None
    assert kept is not None
    allocator.release(first.start)
    allocator.release(second.start)
    again = allocator.allocate(10)
    assert again is not None
    assert (again.start, again.cold, again.cooled) == (second.start, (), ())


def test_a_longer_warm_range_is_split_before_cold_memory_is_touched() -> None:
    allocator = RangeAllocator(40)
    allocator.extend(0, 320)
    whole = allocator.allocate(40)
    assert whole is not None
    allocator.release(whole.start)
    parts = [allocator.allocate(10) for _ in range(4)]
    assert all(part is not None and not part.cold and not part.cooled for part in parts)


def test_scraps_are_cooled_when_no_hole_is_warm_enough() -> None:
    allocator = RangeAllocator(40)
    allocator.extend(0, 320)
    parts = [allocator.allocate(10) for _ in range(4)]
    for part in parts[::2]:
        assert part is not None
        allocator.release(part.start)
    large = allocator.allocate(20)
    assert large is not None
    assert sum(cooled.length for cooled in large.cooled) == sum(cold.length for cold in large.cold)
    assert allocator.warm == 0


def test_where_nothing_is_warm_throughout_what_is_warmest_is_taken() -> None:
    allocator = RangeAllocator(30)
    allocator.extend(0, 100)
    for _ in range(3):
        assert allocator.allocate(10) is not None
    allocator.release(0)
    allocator.release(20)
    larger = allocator.allocate(15)
    assert larger is not None
    assert (larger.start, larger.cooled) == (20, (Range(5, 10),))
    allocator.release(20)
    allocator.release(10)
    assert allocator.warm_ranges() == (Range(0, 5), Range(10, 35))
    found = allocator.allocate(28)
    assert found is not None
    assert found.start == 10


def test_a_block_is_not_cut_when_it_is_cooled() -> None:
    allocator = RangeAllocator(40, block=10)
    allocator.extend(0, 320)
    first, second = allocator.allocate(30), allocator.allocate(5)
    assert first is not None
    assert second is not None
    allocator.release(first.start)
    large = allocator.allocate(32)
    assert large is not None
    assert (large.start % 10, large.cooled) == (0, (Range(0, 30),))
    assert large.cold == (Range(large.start, large.start + 32),)
    allocator.release(large.start)
    assert allocator.warm_ranges() == (Range(large.start, large.start + 32),)
    again = allocator.allocate(30)
    assert again is not None
    assert (again.start, again.cold) == (large.start, ())
    more = allocator.allocate(4)  # 4 of 40: the two that follow `again`, and nothing has to go
    assert more is not None
    assert more.cooled == ()


def test_areas_never_merge() -> None:
    allocator = RangeAllocator(20)
    allocator.extend(0, 10)
    allocator.extend(11, 10)
    assert allocator.allocate(11) is None
    assert {allocator.allocate(10), allocator.allocate(10)} != {None}
    allocator.release(0)
    allocator.release(11)
    assert allocator.allocate(20) is None
    assert allocator.warm_ranges() == (Range(0, 10), Range(11, 21))


def test_misuse_is_an_invariant_error() -> None:
    allocator = RangeAllocator(10)
    allocator.extend(0, 20)
    placement = allocator.allocate(10)
    assert placement is not None
    for length in (0, 1):
        with pytest.raises(InvariantError):
            allocator.allocate(length)
    allocator.release(placement.start)
    with pytest.raises(InvariantError):
        allocator.release(placement.start)
