"""Freed memory goes back to the system, if asked for at once, and so do the pages of a library that is through."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tiermem.memory.heap import release_library, trim_heap

# In a process of its own: the setting is for the whole process, and other tests' heaps would blur the numbers.
_CODE = """
import psutil, sys, torch
from tiermem.memory.heap import return_large_blocks, trim_heap
if sys.argv[1] == "threshold":
    assert return_large_blocks()
for _ in range(4):  # let glibc see large blocks freed, upon which it would begin to keep them
    del_me = [torch.ones(6 << 20, dtype=torch.uint8) for _ in range(40)]
    guards = [torch.ones(1 << 10, dtype=torch.uint8) for _ in range(1000)]
    del del_me
before = psutil.Process().memory_info().rss
blocks = [[torch.ones(6 << 20, dtype=torch.uint8), torch.ones(5000, dtype=torch.uint8)] for _ in range(40)]
keep = [pair[1] for pair in blocks]
del blocks
if sys.argv[1] == "trim":
    assert trim_heap()
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.parametrize("way", ["threshold", "trim"])
def test_freed_blocks_leave_the_process(way: str) -> None:
    if not trim_heap():
        pytest.skip("the C library has no malloc_trim: there is nothing to give back")
    run = subprocess.run([sys.executable, "-c", _CODE, way], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 60 << 20  # of 240 MiB that were touched and freed


_COMPILER = """
import psutil
from tiermem.memory.heap import release_library
import numba

def resident():
    return psutil.Process().memory_info().rss

@numba.njit
def triple(x):
    return 3 * x

assert triple(5) == 15
before = resident()
released = release_library("libllvmlite")
freed = before - resident()
assert triple(5.0) == 15.0  # compiled anew: what was released is in the file
print(released, freed)
"""


def test_a_library_that_is_through_gives_its_pages_back_and_works_on() -> None:
    pytest.importorskip("numba", reason="numba is not installed")
    if not Path("/proc/self/smaps").exists():
        pytest.skip("what is mapped is read from /proc/self/smaps")
    run = subprocess.run([sys.executable, "-c", _COMPILER], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    released, freed = map(int, run.stdout.split())
    assert released > 20 << 20
    assert freed > 0.8 * released


def test_a_library_that_is_not_there_releases_nothing() -> None:
    assert release_library("libnothing-of-the-kind") == 0
