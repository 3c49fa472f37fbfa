"""Loops over ranges, done by several threads at once.

Owns the threads that help the update's worker. Does not know what the loops do, only that elements are independent of
each other and that a loop lets go of the interpreter lock. Guarantees that `run` returns when all shares are done,
raises the error of one that failed, and cuts at whole blocks, so that the bits do not depend on the number of shares.

One thread cannot use all the bandwidth that a machine's memory has, and the update is little else than bandwidth. Where
the processor computes the model too, shares of equal length on all cores disturb it less than one long loop on one of
them: torch's own threads wait for the slowest of them at the end of every operation.

Why shares wait in a queue and threads come for them: a thread is woken once for all the loops of a tile, and one that
was woken late does less. Woken anew for every loop, eight threads were three and a half times as fast as one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch

# Handing over a share costs some 50 microseconds, a loop takes about 1 ns for an element.
LEAST_NUMEL = 1 << 18
# A few threads fill the memory's channels; more of them only take cores from whoever computes.
MOST_THREADS = 8
# Where a device computes nobody else wants the cores, except those that ask it and those that move pages.
MOST_BESIDE_A_DEVICE = 16
_OTHERS_BESIDE_A_DEVICE = 2
# For each thread, where there are several: all end at about the same time, whenever they began.
_PIECES = 2

Loop = Callable[[slice], None]


class Job(NamedTuple):
    """A loop over [0, numel), to be cut at multiples of `block` only."""

    numel: int
    block: int
    loop: Loop


def update_threads(*, beside_device: bool = False) -> int:
    """How many threads update a tile: as many as torch computes with, and at most `MOST_THREADS`.

    `beside_device`: a device computes the model. Then two are left to others, of at most `MOST_BESIDE_A_DEVICE`.
    """
    threads = torch.get_num_threads()
    if not beside_device:
        return min(threads, MOST_THREADS)
    return max(min(threads, 2), min(threads - _OTHERS_BESIDE_A_DEVICE, MOST_BESIDE_A_DEVICE))


class Shares:
    """`threads` threads, the caller's among them. The others start with the first loops long enough to be shared."""

    def __init__(self, threads: int = 1, *, least_numel: int = LEAST_NUMEL) -> None:
        self.threads = max(1, threads)
        self._least_numel = max(1, least_numel)
        self._helpers: ThreadPoolExecutor | None = None

    def run(self, jobs: Sequence[Job]) -> None:
        """Call each loop with slices that are its range together, of whole blocks all but the last. One caller at once.

        Raises what a loop raises, after all threads have ended.
        """
        total = sum(job.numel for job in jobs)
        count = min(self.threads, total // self._least_numel)
        if count <= 1:
            for job in jobs:
                job.loop(slice(0, job.numel))
            return
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(self.threads - 1, "tiermem-update-share")
        length = max(1, total // (_PIECES * count))
        pieces = deque((job.loop, piece) for job in jobs for piece in cut(job.numel, job.block, job.numel // length))
        others: list[Future[None]] = []
        try:
            for _ in range(count - 1):
                others.append(self._helpers.submit(_work, pieces))  # noqa: PERF401 - those before a refused one count
        except RuntimeError:  # a limit on threads, or the interpreter is ending: those that run do all of it
            self.threads = 1 + len(others)
        try:
            _work(pieces)
        finally:
            wait(others)
            if 1 + len(others) < count:  # what was refused is queued all the same, and a helper may have begun it
                self.close()
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads. May be called twice; a range that comes after it starts new ones."""
        if self._helpers is not None:
            self._helpers.shutdown(wait=True)
            self._helpers = None


def _work(pieces: deque[tuple[Loop, slice]]) -> None:
    """Do one piece after the other until none is left."""
    while True:
        try:
            loop, piece = pieces.popleft()
        except IndexError:
            return
        loop(piece)


def cut(numel: int, block: int, count: int) -> list[slice]:
    """Cut [0, numel) at multiples of `block` into at most `count` slices as equal as that allows, at least one."""
    length = max(1, -(-numel // (max(1, count) * block))) * block
    return [slice(start, min(start + length, numel)) for start in range(0, max(1, numel), length)]
