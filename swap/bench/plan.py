"""What a measurement will do: which cases, how long each, how much is written. Decided before a file is made.

Owns the defaults of the sweep and the checks of what was asked. Does not do I/O. Guarantees that a plan can be carried
out: known backends, aligned blocks, and no more in flight than the file holds; and that it can say how long it takes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swap.bench.cases import PATTERNS, Case, Pattern
from swap.blocks import ALIGNMENT, is_aligned
from swap.settings import BACKENDS, LARGEST_QUEUE_DEPTH

BLOCK_SIZES = (1 << 20, 4 << 20, 8 << 20)
QUEUE_DEPTHS = (4, 8, 16)
FILL_BLOCK, FILL_DEPTH = 8 << 20, 8
EXPLORED = 0.6  # share of a pattern's time in which every case has a slice; the rest is for the most promising ones
FINALISTS = 3
ROUNDS = 2  # slices of each finalist, in turn, so that a slow moment of the machine meets all of them
_GUESSED_BANDWIDTH = 1e9  # bytes per second, for the estimate only
_SETTLING = 0.1  # seconds around every slice: threads start, requests drain
_MOST_BUFFER = 1 << 30


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for. `nbytes` per directory; `seconds` per pattern, shared by its cases; None: the defaults.

    `steady_seconds`: afterwards overwrite with the best settings for that long, or until `steady_bytes` are written,
    whichever comes first (0: no limit of that kind); both 0: do not. `huge_pages`: for the memory of the requests.
    """

    directories: tuple[Path, ...]
    nbytes: int = 2 << 30
    seconds: float = 5.0
    block_sizes: tuple[int, ...] | None = None
    queue_depths: tuple[int, ...] | None = None
    backends: tuple[str, ...] | None = None
    quick: bool = False
    steady_seconds: float = 0.0
    steady_bytes: int = 0
    huge_pages: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """An order that can be carried out, and its cases."""

    order: Order
    cases: tuple[Case, ...]
    fill: Case

    def of_pattern(self, pattern: Pattern) -> list[Case]:
        """The cases of one pattern."""
        return [case for case in self.cases if case.pattern == pattern]

    @property
    def slice_seconds(self) -> float:
        """How long each case is measured at first."""
        return self.order.seconds * EXPLORED / max(1, len(self.of_pattern("read")))

    @property
    def final_seconds(self) -> float:
        """How long each slice of a finalist lasts."""
        finalists = min(FINALISTS, len(self.of_pattern("read")))
        return self.order.seconds * (1 - EXPLORED) / (finalists * ROUNDS)

    @property
    def buffer_nbytes(self) -> int:
        """Memory for the requests in flight of the largest case, all directories together."""
        each = max(case.block_size * case.queue_depth for case in (*self.cases, self.fill))
        return each * len(self.order.directories)

    @property
    def write_nbytes(self) -> int:
        """Bytes written before the sweep: the whole of every file, twice."""
        return 2 * self.order.nbytes * len(self.order.directories)

    def estimate_seconds(self) -> float:
        """Roughly how long all of it takes on a drive of one gigabyte a second."""
        order = self.order
        slices = len(PATTERNS) * (len(self.of_pattern("read")) + FINALISTS * ROUNDS)
        alone = len(order.directories) * 2 * len(PATTERNS) * self.slice_seconds if len(order.directories) > 1 else 0.0
        measured = len(PATTERNS) * order.seconds + slices * _SETTLING + alone
        steady = order.steady_seconds or order.steady_bytes / _GUESSED_BANDWIDTH
        return self.write_nbytes / _GUESSED_BANDWIDTH + measured + steady


def make_plan(order: Order) -> Plan:
    """The cases of an order. Raises ValueError, in one sentence, for what cannot be measured."""
    _require_possible(order)
    block_sizes = order.block_sizes or (BLOCK_SIZES[-1:] if order.quick else BLOCK_SIZES)
    depths = order.queue_depths or (QUEUE_DEPTHS[1:2] if order.quick else QUEUE_DEPTHS)
    given = order.block_sizes is not None or order.queue_depths is not None
    fitting = [(size, depth) for size in block_sizes for depth in depths if size * depth <= order.nbytes]
    if not fitting:
        smallest = min(block_sizes) * min(depths)
        if given or min(block_sizes) > order.nbytes:
            raise ValueError(
                f"size: expected at least block size x queue depth = {smallest} bytes, found {order.nbytes}; "
                "measure a larger file or choose smaller blocks"
            )
        fitting = [(min(block_sizes), max(1, order.nbytes // min(block_sizes)))]
    if max(size * depth for size, depth in fitting) * len(order.directories) > _MOST_BUFFER:
        raise ValueError(
            f"block size x queue depth: expected at most {_MOST_BUFFER} bytes in flight, "
            f"found {max(size * depth for size, depth in fitting) * len(order.directories)}"
        )
    middle = min(fitting, key=lambda pair: (abs(pair[0] - FILL_BLOCK), abs(pair[1] - FILL_DEPTH)))
    cases = [case for pattern in PATTERNS for case in _cases(pattern, order, fitting, middle)]
    return Plan(order, tuple(cases), Case("write", "threads", *middle, direct=True))


def _cases(pattern: Pattern, order: Order, fitting: Sequence[tuple[int, int]], middle: tuple[int, int]) -> list[Case]:
    backends = order.backends or (("threads",) if order.quick else BACKENDS)
    cases: list[Case] = []
    for backend in backends:
        if backend == "threads":
            cases += [Case(pattern, backend, size, depth, direct=True) for size, depth in fitting]
            if not order.quick:
                cases.append(Case(pattern, backend, *middle, direct=False))
        elif backend == "inline":
            cases += [
                Case(pattern, backend, size, 1, direct=True) for size in sorted({size for size, _ in fitting})[-1:]
            ]
        else:  # aiofiles goes through the page cache; it is there for comparison, so one setting will do
            cases.append(Case(pattern, backend, *middle, direct=False))
    return cases


def _require_possible(order: Order) -> None:
    if not order.directories:
        raise ValueError("directories: expected at least one")
    if len(set(map(os.path.realpath, order.directories))) < len(order.directories):
        names = ", ".join(map(str, order.directories))
        raise ValueError(f"directories: expected different ones, found {names}; name each once")
    for backend in order.backends or ():
        if backend not in BACKENDS:
            raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, found {backend!r}")
    for size in order.block_sizes or ():
        if size <= 0 or not is_aligned(size):
            raise ValueError(f"block size: expected a positive multiple of {ALIGNMENT} bytes, found {size}")
        if size > order.nbytes:
            raise ValueError(f"size: expected at least one block of {size} bytes, found {order.nbytes}")
    for depth in order.queue_depths or ():
        if not 1 <= depth <= LARGEST_QUEUE_DEPTH:
            raise ValueError(f"queue depth: expected 1 to {LARGEST_QUEUE_DEPTH}, found {depth}")
    if not 0 < order.seconds < math.inf:
        raise ValueError(f"seconds: expected a positive number, found {order.seconds}")
    if order.nbytes < ALIGNMENT or not is_aligned(order.nbytes):
        raise ValueError(f"size: expected a positive multiple of {ALIGNMENT} bytes, found {order.nbytes}")
    if not 0 <= order.steady_seconds < math.inf or order.steady_bytes < 0:
        raise ValueError("steady state: expected seconds and bytes of zero or more, not without end")
