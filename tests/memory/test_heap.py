"""Freed memory goes back to the system, and threads share a heap."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tiermem.memory.heap import share_heap, trim_heap

# In a process of its own: the setting is for the whole process, and other tests' heaps would blur the numbers.
_CODE = """
import psutil, sys, torch
from tiermem.memory.heap import return_large_blocks, trim_heap
if sys.argv[1] == "threshold":
    assert return_large_blocks(1 << 20)
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


_THREADS = """
import ctypes, sys, threading
from tiermem.memory.heap import share_heap
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes, libc.fflush.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
over = threading.Event()
def work(done):
    libc.malloc(100_000)
    done.set()
    over.wait()  # a heap whose thread has ended is given to the next one
print(share_heap() if sys.argv[1] == "share" else None, flush=True)
for _ in range(6):
    done = threading.Event()
    threading.Thread(target=work, args=(done,), daemon=True).start()
    done.wait()
stream = libc.fdopen(1, b"w")
libc.malloc_info(0, stream)
libc.fflush(stream)
over.set()
"""


def _start_threads(way: str) -> tuple[str, int]:
    """Six threads allocate something; what `share_heap` said, and how many heaps there are in the end."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", _THREADS, way]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=inherited)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()[0], run.stdout.count("<heap ")


def test_threads_share_a_heap() -> None:
    if not trim_heap():
        pytest.skip("the C library has no malloc_trim: its heaps are not glibc's")
    said, heaps = _start_threads("share")
    assert said == "True"
    assert _start_threads("own")[1] >= heaps + 5


@pytest.mark.parametrize("setting", ["MALLOC_ARENA_MAX=3", "GLIBC_TUNABLES=glibc.malloc.arena_max=3"])
def test_what_the_environment_says_of_heaps_stands(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*setting.split("=", 1))
    assert not share_heap()
