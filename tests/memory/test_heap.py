"""Freed memory goes back to the system, if asked for at once, and so do the pages of a library that is through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiermem.memory.heap import release_library, trim_heap

# In a process of its own: the setting is for the whole process, and other tests' heaps would blur the numbers. All of
# them in one, for importing torch takes longer than what is measured; the setting is made when there is none to come.
_CODE = """
import json, os, psutil, torch
from tiermem.memory.heap import release_library, return_large_blocks, trim_heap

def resident():
    return psutil.Process().memory_info().rss

def left_of_what_was_freed(trim):
    for _ in range(4):  # let glibc see large blocks freed, upon which it would begin to keep them
        del_me = [torch.ones(6 << 20, dtype=torch.uint8) for _ in range(40)]
        guards = [torch.ones(1 << 10, dtype=torch.uint8) for _ in range(1000)]
        del del_me
    before = resident()
    blocks = [[torch.ones(6 << 20, dtype=torch.uint8), torch.ones(5000, dtype=torch.uint8)] for _ in range(40)]
    keep = [pair[1] for pair in blocks]
    del blocks
    if trim:
        assert trim_heap()
    return resident() - before

found = {}
if trim_heap():
    found["trim"] = left_of_what_was_freed(True)
    assert return_large_blocks()
    found["threshold"] = left_of_what_was_freed(False)

try:
    import numba
except ImportError:
    numba = None
if numba is not None and os.path.exists("/proc/self/smaps"):  # what is mapped is read from there
    @numba.njit
    def triple(x):
        return 3 * x

    assert triple(5) == 15
    before = resident()
    released = release_library("libllvmlite")
    found["library"] = released, before - resident()
    assert triple(5.0) == 15.0  # compiled anew: what was released is in the file
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Bytes that stay, by the way that others go; of the library those released, and those that went."""
    run = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    bytes_by_way: dict[str, Any] = json.loads(run.stdout)
    return bytes_by_way


@pytest.mark.parametrize("way", ["threshold", "trim"])
def test_freed_blocks_leave_the_process(way: str, found: dict[str, Any]) -> None:
    if not trim_heap():
        pytest.skip("the C library has no malloc_trim: there is nothing to give back")
    assert found[way] < 60 << 20  # of 240 MiB that were touched and freed


def test_a_library_that_is_through_gives_its_pages_back_and_works_on(found: dict[str, Any]) -> None:
    pytest.importorskip("numba", reason="numba is not installed")
    if not Path("/proc/self/smaps").exists():
        pytest.skip("what is mapped is read from /proc/self/smaps")
    released, freed = found["library"]
    assert released > 20 << 20
    assert freed > 0.8 * released


def test_a_library_that_is_not_there_releases_nothing() -> None:
    assert release_library("libnothing-of-the-kind") == 0


@pytest.mark.parametrize(
    ("decided", "expected"), [({}, "False True True"), ({"MALLOC_ARENA_MAX": "4"}, "False False False")]
)
def test_whoever_asks_knows_whether_freed_blocks_are_kept(decided: dict[str, str], expected: str) -> None:
    if not trim_heap():
        pytest.skip("another C library keeps what it will")
    code = "from tiermem.memory.heap import *; print(keeps_freed_blocks(), keep_freed_blocks(), keeps_freed_blocks())"
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ours | decided)
    assert run.stdout.strip() == expected
