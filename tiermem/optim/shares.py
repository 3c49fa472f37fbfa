"""A loop over a range, done by several threads at once.

Owns the threads that help the update's worker. Does not know what the loop does, only that its elements are independent
of each other and that it lets go of the interpreter lock. Guarantees that `run` returns when all shares are done,
raises the error of one that failed, and cuts at whole blocks, so that the bits do not depend on the number of shares.

One thread cannot use all the bandwidth that a machine's memory has, and the update is little else than bandwidth. Where
the processor computes the model too, shares of equal length on all cores disturb it less than one long loop on one of
them: torch's own threads wait for the slowest of them at the end of every operation.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

# Handing over a share costs some 50 microseconds, a loop takes about 1 ns for an element.
LEAST_NUMEL = 1 << 18
# A few threads fill the memory's channels; more of them only take cores from whoever computes.
MOST_THREADS = 8


def update_threads() -> int:
    """How many threads update a tile: as many as torch computes with, and at most `MOST_THREADS`."""
    return min(torch.get_num_threads(), MOST_THREADS)


class Shares:
    """`threads` threads, the caller's among them. The others start with the first range long enough to be shared."""

    def __init__(self, threads: int = 1, *, least_numel: int = LEAST_NUMEL) -> None:
        self.threads = max(1, threads)
        self._least_numel = max(1, least_numel)
        self._helpers: ThreadPoolExecutor | None = None

    def run(self, numel: int, block: int, loop: Callable[[slice], None]) -> None:
        """Call `loop` with slices that are [0, numel) together, of whole blocks all but the last. One caller at a time.

        Raises what `loop` raises, after all shares have ended.
        """
        pieces = cut(numel, block, min(self.threads, numel // self._least_numel))
        if len(pieces) == 1:
            loop(pieces[0])
            return
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(self.threads - 1, "tiermem-update-share")
        others = [self._helpers.submit(loop, piece) for piece in pieces[1:]]
        try:
            loop(pieces[0])
        finally:
            wait(others)
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads. May be called twice; a range that comes after it starts new ones."""
        if self._helpers is not None:
            self._helpers.shutdown(wait=True)
            self._helpers = None


def cut(numel: int, block: int, count: int) -> list[slice]:
    """Cut [0, numel) at multiples of `block` into at most `count` slices as equal as that allows, at least one."""
    length = max(1, -(-numel // (max(1, count) * block))) * block
    return [slice(start, min(start + length, numel)) for start in range(0, max(1, numel), length)]
