"""Frames of host memory: theirs alone, aligned, within the budget in address book and in physical memory."""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from doubles_combinations import number_of
from doubles_garbage import collect
from doubles_pager import is_viewed
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tiermem.errors import CapacityError, ConfigError, InvariantError
from tiermem.memory import arena as arena_module
from tiermem.memory.arena import FRAME_ALIGNMENT, Arena, Frame, HostArena, rounded
from tiermem.memory.mapping import HUGE_PAGE, Mapping

UNIT = FRAME_ALIGNMENT


def _frame(arena: Arena, nbytes: int) -> Frame:
    frame = arena.allocate(nbytes)
    assert frame is not None
    return frame


def test_a_frame_has_its_own_aligned_storage_and_writable_buffer() -> None:
    arena = HostArena(64 * UNIT)
    _frame(arena, 5)
    frame = _frame(arena, UNIT + 1)
    assert (frame.nbytes, frame.asked) == (2 * UNIT, UNIT + 1)
    storage = frame.tensor.untyped_storage()
    assert frame.tensor.dtype == torch.uint8
    assert frame.tensor.shape == (2 * UNIT,)
    assert (storage.nbytes(), frame.tensor.storage_offset()) == (2 * UNIT, 0)
    assert storage.data_ptr() == frame.tensor.data_ptr()
    assert storage.data_ptr() % 4096 == 0
    assert (len(frame.buffer), frame.buffer.readonly) == (2 * UNIT, False)
    frame.buffer[7] = 42
    assert frame.tensor[7] == 42
    frame.tensor[8] = 43
    assert frame.buffer[8] == 43


def test_huge_pages_are_asked_for_inside_each_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(Mapping, "use_whole", lambda mapping, *part: asked.append((mapping.address + part[0], part[1])))
    arena = HostArena(64 * UNIT)
    frames = [_frame(arena, nbytes) for nbytes in (3 * UNIT, UNIT, 5 * UNIT - 1)]
    assert asked == [(frame.tensor.data_ptr(), frame.nbytes) for frame in frames]


def test_memory_that_the_system_does_not_take_back_costs_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Mapping, offset: int, nbytes: int) -> None:
        raise CapacityError("all memory is locked")

    arena = HostArena(4 * UNIT)
    small = [_frame(arena, UNIT) for _ in range(4)]
    for frame in small[::2]:
        arena.free(frame)
    with monkeypatch.context() as patched:
        patched.setattr(Mapping, "give_back", refuse)
        for _ in range(3):  # it has to lie on fresh addresses, for which warm ones would have to go
            with pytest.raises(CapacityError, match="locked"):
                arena.allocate(2 * UNIT)
            assert arena.reserved == 2 * UNIT
        arena.free(_frame(arena, UNIT))
    large = _frame(arena, 2 * UNIT)
    assert arena.reserved == 4 * UNIT
    for frame in (large, *small[1::2]):
        arena.free(frame)
    monkeypatch.setattr(Mapping, "give_back", refuse)
    arena.close()


def test_a_frame_takes_file_input_with_direct_io(tmp_path: Path) -> None:
    path = tmp_path / "block"
    path.write_bytes(bytes(range(256)) * (UNIT // 256))
    frame = _frame(HostArena(4 * UNIT), UNIT)
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        pytest.skip("this file system refuses O_DIRECT")
    try:
        assert os.preadv(file, [frame.buffer], 0) == UNIT
    finally:
        os.close(file)
    assert frame.tensor[:256].tolist() == list(range(256))


def test_views_of_a_frame_are_noticed() -> None:
    frame = _frame(HostArena(4 * UNIT), UNIT)
    assert not is_viewed(frame)
    view = frame.tensor[:64].view(torch.float32)
    assert is_viewed(frame)
    weight = torch.ones(16, requires_grad=True)
    product = view * weight
    del view
    assert is_viewed(frame), "autograd saved the view"
    product.sum().backward()
    del product
    assert not is_viewed(frame)


def test_no_room_is_none_and_freeing_makes_room() -> None:
    arena = HostArena(4 * UNIT)
    frames = [_frame(arena, UNIT) for _ in range(4)]
    assert arena.allocate(1) is None
    assert arena.reserved == arena.high_water == arena.capacity
    arena.free(frames[2])
    assert arena.reserved == 3 * UNIT
    assert arena.allocate(UNIT + 1) is None
    assert arena.allocate(UNIT) is not None


def test_misuse_is_an_invariant_error() -> None:
    arena, other = HostArena(4 * UNIT), HostArena(4 * UNIT)
    frame = _frame(arena, 10)
    with pytest.raises(InvariantError, match="not live"):
        other.free(frame)
    arena.free(frame)
    with pytest.raises(InvariantError, match="freed twice"):
        arena.free(frame)
    again = _frame(arena, 10)
    assert again.offset == frame.offset
    with pytest.raises(InvariantError):
        arena.free(frame)
    with pytest.raises(InvariantError):
        arena.allocate(0)
    arena.close()
    arena.close()
    with pytest.raises(InvariantError, match="closed"):
        arena.allocate(1)


def test_a_capacity_below_one_frame_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise host_memory"):
        HostArena(UNIT - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_poison_is_nan_before_and_after(dtype: torch.dtype) -> None:
    arena = HostArena(2 * UNIT, poison=True)
    frame = _frame(arena, UNIT)
    values = frame.tensor.view(dtype)
    assert values.isnan().all()
    values.fill_(1.0)
    arena.free(frame)
    assert values.isnan().all()


def test_closing_under_a_view_leaves_the_view_usable() -> None:
    arena = HostArena(8 * UNIT)
    frame = _frame(arena, UNIT)
    frame.tensor.fill_(9)
    view = frame.tensor[:10]
    arena.close()
    del frame, arena
    collect()
    assert view.tolist() == [9] * 10


def _warm(arena: HostArena) -> int:
    return arena._ranges.warm


def test_what_is_reserved_and_what_stays_warm() -> None:
    arena = HostArena(8 * UNIT, address_factor=2)
    kept, freed = _frame(arena, 10), _frame(arena, 2 * UNIT)
    arena.free(freed)
    assert (arena.capacity, arena.reserved, arena.high_water) == (8 * UNIT, UNIT, 3 * UNIT)
    assert _warm(arena) == 2 * UNIT
    assert [area.nbytes for area in arena._areas] == [16 * UNIT]
    assert kept.asked == 10


@settings(max_examples=number_of(25, 60))
@given(
    st.integers(1, 40),
    st.integers(1, 3),
    st.lists(st.tuples(st.booleans(), st.integers(1, 40 * UNIT)), max_size=60),
)
@example(4, 1, [(True, 1), (True, 1), (False, 2), (True, 2 * UNIT + 1)])  # gives back a part of a warm range
def test_allocation_succeeds_whenever_the_budget_has_room(
    units: int, factor: int, steps: list[tuple[bool, int]]
) -> None:
    arena = HostArena(units * UNIT + 17, address_factor=factor)
    live: list[Frame] = []
    for mark, (allocate, number) in enumerate(steps):
        if allocate:
            room = arena.reserved + rounded(number) <= arena.capacity
            frame = arena.allocate(number)
            assert (frame is not None) == room
            if frame is not None:
                frame.tensor.fill_(mark)
                frame.buffer[0] = mark
                live.append(frame)
        elif live:
            arena.free(live.pop(number % len(live)))
        assert arena.reserved == sum(frame.nbytes for frame in live)
        assert arena.reserved + _warm(arena) <= arena.capacity
        # Nobody's bytes were overwritten or lost by the allocations that followed.
        assert all(frame.tensor.min() == frame.tensor.max() == frame.buffer[0] for frame in live)
    arena.close()


def test_fragmentation_never_denies_room() -> None:
    """Every other small frame is freed, then frames are asked for that fit in none of the gaps, over and over."""
    arena = HostArena(256 * UNIT, address_factor=1)
    generator = random.Random(7)
    live = [_frame(arena, UNIT) for _ in range(256)]
    for size in (2, 3, 5, 8, 13, 21, 34, 55, 89, 3, 1, 2, 120, 7, 1):
        generator.shuffle(live)
        while arena.reserved > arena.capacity // 2:
            arena.free(live.pop())
        while arena.capacity - arena.reserved >= size * UNIT:
            live.append(_frame(arena, size * UNIT))
    assert len(arena._areas) > 1, "the test did not reach a second area"
    assert arena.reserved + _warm(arena) <= arena.capacity
    arena.close()


def test_when_addresses_are_scarce_less_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(nbytes: int) -> Mapping:
        if nbytes > 40 * UNIT:
            raise OSError(12, "Cannot allocate memory")
        return Mapping(nbytes)

    monkeypatch.setattr(arena_module, "Mapping", scarce)
    arena = HostArena(16 * UNIT)
    assert 16 * UNIT <= arena._areas[0].nbytes <= 40 * UNIT
    assert _frame(arena, 16 * UNIT).nbytes == 16 * UNIT
    with pytest.raises(CapacityError, match="overcommit"):
        HostArena(41 * UNIT)


_RSS_SCRIPT = """
import random, resource, sys
import torch
from tiermem.memory.arena import HostArena

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

capacity, rounds = 16 << 20, 3000
torch.set_num_threads(1)
torch.ones(1 << 20).fill_(2.0)
arena = HostArena(capacity)
generator = random.Random(3)
before, peak, live = resident(), 0, []
for number in range(rounds):
    nbytes = int(4096 * 2 ** generator.uniform(0, 9))
    while (frame := arena.allocate(nbytes)) is None:
        arena.free(live.pop(generator.randrange(len(live))))
    frame.tensor.fill_(number % 251)
    live.append(frame)
    peak = max(peak, resident() - before)
assert arena.high_water > capacity // 2
live.clear()
del frame
arena.close()
print(peak - capacity, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_stays_within_the_capacity() -> None:
    output = subprocess.run([sys.executable, "-c", _RSS_SCRIPT], check=True, capture_output=True, text=True).stdout
    beyond, left = map(int, output.split())
    assert beyond < 6 << 20, "resident memory grew beyond the budget"
    assert left < 6 << 20, "closing did not give the memory back"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_mapping_is_neither_huge_nor_inherited() -> None:
    mapping = Mapping(64 << 20)
    address = torch.frombuffer(mapping.buffer(0, 1), dtype=torch.uint8).data_ptr()
    sections = Path("/proc/self/smaps").read_text().split("VmFlags:")
    owner = next(
        flags.split("\n")[0].split() for header, flags in itertools.pairwise(sections) if _contains(header, address)
    )
    assert "dc" in owner, "a forked child would share the frames copy-on-write"
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "nh" in owner


def _contains(section: str, address: int) -> bool:
    ranges = [line.split()[0] for line in section.splitlines() if line[:1] in "0123456789abcdef" and "-" in line[:20]]
    if not ranges:
        return False
    begin, end = (int(part, 16) for part in ranges[-1].split("-"))
    return begin <= address < end


def test_what_the_system_does_not_move_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(Mapping, "move", lambda *_: False)
    monkeypatch.setattr(Mapping, "give_back", lambda _, offset, nbytes: given.append((offset, nbytes)))
    arena = HostArena(4 * HUGE_PAGE)
    frames = [_frame(arena, HUGE_PAGE) for _ in range(4)]
    arena.free(frames[0])
    arena.free(frames[2])
    assert not given
    _frame(arena, 2 * HUGE_PAGE)
    start = given[0][0]
    assert given == [(start, HUGE_PAGE), (start + frames[2].offset - frames[0].offset, HUGE_PAGE)]
