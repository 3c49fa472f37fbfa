"""Huge pages lie inside ranges that are used as a whole, and nowhere else: one byte is one small page."""

from __future__ import annotations

import mmap
import platform
import random
import re
from pathlib import Path

import pytest
import torch

import tiermem.memory.mapping as mapping_module
from tiermem.errors import CapacityError, ConfigError
from tiermem.memory.arena import Frame, HostArena
from tiermem.memory.devices import SimulatedDevice
from tiermem.memory.links import Link
from tiermem.memory.mapping import Mapping, tensor_over

MIB = 1 << 20
PAGE = mmap.PAGESIZE
SMAPS = Path("/proc/self/smaps")
MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(not SMAPS.exists(), reason="needs /proc/self/smaps to see what is resident")


def occupied(mapping: Mapping) -> tuple[int, int]:
    """Resident bytes of the mapping, and how many of them are in huge pages."""
    view = tensor_over(mapping.buffer(0, PAGE))
    begin, end = view.data_ptr(), view.data_ptr() + mapping.nbytes
    resident = huge = 0
    inside = False
    for line in SMAPS.read_text(encoding="ascii").splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            low, high = (int(word, 16) for word in words[0].split("-"))
            inside = begin <= low and high <= end
        elif inside and words[0] == "Rss:":
            resident += int(words[1]) * 1024
        elif inside and words[0] == "AnonHugePages:":
            huge += int(words[1]) * 1024
    return resident, huge


def touch(mapping: Mapping, offset: int, nbytes: int = 1) -> None:
    tensor_over(mapping.buffer(offset, nbytes)).fill_(1)


def test_a_touched_byte_brings_in_one_small_page() -> None:
    mapping = Mapping(32 * MIB)
    mapping.use_whole(8 * MIB + PAGE, 8 * MIB)
    touch(mapping, 8 * MIB + PAGE, 8 * MIB)
    resident, _ = occupied(mapping)
    assert resident == 8 * MIB, "no more than what was said to be used"
    for offset in (0, 8 * MIB, 16 * MIB + 2 * PAGE, 31 * MIB):
        touch(mapping, offset)
        resident += PAGE
        assert occupied(mapping)[0] == resident
    mapping.close()


def test_what_is_given_back_comes_again_in_small_pages() -> None:
    mapping = Mapping(32 * MIB)
    mapping.use_whole(0, 16 * MIB)
    touch(mapping, 0, 16 * MIB)
    mapping.give_back(4 * MIB + PAGE, 8 * MIB)
    assert occupied(mapping)[0] == 8 * MIB
    touch(mapping, 6 * MIB)
    assert occupied(mapping)[0] == 8 * MIB + PAGE
    assert not tensor_over(mapping.buffer(6 * MIB + PAGE, PAGE)).any()
    mapping.close()


needs_huge_pages = pytest.mark.skipif(
    not MODES.exists() or "[never]" in MODES.read_text(), reason="this system has no transparent huge pages"
)
needs_small_ones_to_go = pytest.mark.skipif(
    [int(part) for part in re.findall(r"\d+", platform.release())[:2]] < [6, 14],
    reason="before Linux 6.14 no huge page comes where small ones were",
)


@needs_huge_pages
@needs_small_ones_to_go
def test_small_pages_do_not_stay_where_a_huge_one_could_lie() -> None:
    mapping = Mapping(16 * MIB)
    touch(mapping, 0, 16 * MIB)
    _, huge = occupied(mapping)
    assert huge == 0, "nobody has said that any of it will be used"
    mapping.use_whole(MIB, 14 * MIB)
    touch(mapping, MIB, 14 * MIB)
    resident, huge = occupied(mapping)
    assert resident == 16 * MIB
    if not huge:
        pytest.skip("the system had no huge page to give: its memory is in small pieces")
    assert huge >= 10 * MIB, "14 MiB hold six huge pages at least"
    tensor_over(mapping.buffer(0, 16 * MIB)).fill_(7)
    mapping.use_whole(MIB, 14 * MIB)
    assert int(tensor_over(mapping.buffer(0, 16 * MIB)).min()) == 7, "what is in huge pages is left alone"
    mapping.give_back(7 * MIB, 4 * MIB)
    assert occupied(mapping)[0] == 12 * MIB
    mapping.use_whole(MIB, 14 * MIB)
    touch(mapping, MIB, 14 * MIB)
    assert occupied(mapping) == (16 * MIB, huge)
    mapping.close()


@needs_huge_pages
def test_a_range_used_as_a_whole_is_in_huge_pages() -> None:
    mapping = Mapping(64 * MIB)
    mapping.use_whole(PAGE, 32 * MIB)
    touch(mapping, PAGE, 32 * MIB)
    resident, huge = occupied(mapping)
    assert resident == 32 * MIB
    if not huge:
        pytest.skip("the system had no huge page to give: its memory is in small pieces")
    mapping.use_whole(16 * MIB, 40 * MIB)  # overlapping, and further
    touch(mapping, 33 * MIB, 20 * MIB)
    assert occupied(mapping)[1] > huge
    assert torch.equal(tensor_over(mapping.buffer(PAGE, 8)), torch.ones(8, dtype=torch.uint8))
    mapping.close()


@needs_huge_pages
@needs_small_ones_to_go
def test_pages_move_with_their_bytes_to_where_none_are() -> None:
    source, target = Mapping(16 * MIB), Mapping(32 * MIB)
    begin, place = ((-mapping.address) % (2 * MIB) for mapping in (source, target))
    source.use_whole(begin, 8 * MIB)
    tensor_over(source.buffer(begin, 8 * MIB)).fill_(7)
    before = occupied(source)
    if not source.move(begin + 2 * MIB, 4 * MIB, target, place + 8 * MIB):
        pytest.skip("this system does not move pages")
    assert occupied(source)[0] == 4 * MIB
    assert occupied(target)[0] == 4 * MIB
    assert before[1] == occupied(source)[1] + occupied(target)[1], "huge pages stay whole"
    target.use_whole(place + 6 * MIB, 8 * MIB)
    moved = tensor_over(target.buffer(place + 8 * MIB, 4 * MIB))
    assert int(moved.min()) == int(moved.max()) == 7
    assert int(tensor_over(source.buffer(begin + 2 * MIB, PAGE)).max()) == 0
    touch(source, begin + 2 * MIB)
    assert occupied(source)[0] == 4 * MIB + PAGE, "one byte is one small page again"
    assert int(tensor_over(source.buffer(begin + 6 * MIB, 2 * MIB)).min()) == 7
    target.give_back(place + 8 * MIB, 4 * MIB)
    assert occupied(target)[0] == 0
    source.close()
    target.close()


def test_what_is_in_small_pages_does_not_move() -> None:
    mapping = Mapping(16 * MIB)
    begin = (-mapping.address) % (2 * MIB)
    tensor_over(mapping.buffer(begin, 2 * MIB)).fill_(7)
    assert not mapping.move(begin, 2 * MIB, mapping, begin + 8 * MIB)
    assert int(tensor_over(mapping.buffer(begin, 2 * MIB)).min()) == 7
    mapping.close()


@needs_huge_pages
@needs_small_ones_to_go
@pytest.mark.parametrize("moves", [True, False])
def test_frames_of_whole_huge_pages_are_in_huge_pages_however_they_come_and_go(
    moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not moves:
        monkeypatch.setattr(mapping_module, "_REMAP", None)
    arena = HostArena(64 * MIB, address_factor=4)
    (area,) = arena._areas
    draw = random.Random(0)
    live: list[Frame] = []
    for _ in range(300):
        frame = arena.allocate(draw.choice((2, 2, 10, 10, 24)) * MIB)
        if frame is None:
            while arena.reserved > 32 * MIB:
                arena.free(live.pop(draw.randrange(len(live))))
            continue
        assert frame.tensor.data_ptr() % (2 * MIB) == 0
        frame.tensor.fill_(1)
        live.append(frame)
    resident, huge = occupied(area)
    arena.close()
    if not huge:
        pytest.skip("the system had no huge page to give: its memory is in small pieces")
    assert 32 * MIB < resident <= 64 * MIB
    assert huge >= 0.9 * resident, "a frame of small pages is read and written at half the speed"


def test_more_than_there_are_addresses_is_denied_like_too_much() -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        Mapping(1 << 70)
    with pytest.raises(CapacityError, match="lower host_memory"):
        HostArena(1 << 70)
    device = SimulatedDevice(Link())
    with pytest.raises(ConfigError, match=r"device_memory: no \d+ bytes of host memory") as refused:
        device.make_arena(1 << 70, poison=False)
    device.close()
    assert "\n" not in str(refused.value)


def test_a_range_that_the_system_does_not_take_back_is_an_error() -> None:
    mapping = Mapping(MIB)
    with pytest.raises(CapacityError, match=f"the system refused to take back {PAGE} bytes"):
        mapping.give_back(1, PAGE)  # no page begins there
