"""Huge pages lie inside ranges that are used as a whole, and nowhere else: one byte is one small page."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from tiermem.memory.mapping import Mapping, tensor_over

MIB = 1 << 20
PAGE = mmap.PAGESIZE
SMAPS = Path("/proc/self/smaps")

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


def test_a_range_used_as_a_whole_is_in_huge_pages() -> None:
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not modes.exists() or "[never]" in modes.read_text():
        pytest.skip("this system has no transparent huge pages")
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
