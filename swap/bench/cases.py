"""What is measured, and what was found: values and the arithmetic on them.

Owns the description of a case (pattern and settings), the sample that a run of it gives, and the choice of the best.
Does not know files, engines or time. Guarantees that samples of one case add up, so that a case measured in several
slices is judged by all of them, and that percentiles are values that occurred.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Pattern = Literal["read", "write", "mixed"]
PATTERNS: tuple[Pattern, ...] = ("read", "write", "mixed")
_TIE = 0.01  # differences of bandwidth below this share are noise: then CPU decides


@dataclass(frozen=True, slots=True)
class Case:
    """One setting to measure. `mixed` is half reads, half writes, block by block, as an update reads and writes tiles.

    `block_size` bytes per request, `queue_depth` requests in flight per device; `direct`: past the page cache.
    """

    pattern: Pattern
    backend: str
    block_size: int
    queue_depth: int
    direct: bool

    def __str__(self) -> str:
        size = f"{self.block_size / 2**20:g} MiB" if self.block_size >= 2**20 else f"{self.block_size / 2**10:g} KiB"
        return f"{self.pattern}, {self.backend}, {size} x {self.queue_depth}, {'direct' if self.direct else 'buffered'}"


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes moved in `seconds` of wall clock with `cpu_seconds` of this process, and each request's seconds."""

    nbytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    latencies: tuple[float, ...] = ()

    def plus(self, other: Sample) -> Sample:
        """Both slices as one."""
        return Sample(
            self.nbytes + other.nbytes,
            self.seconds + other.seconds,
            self.cpu_seconds + other.cpu_seconds,
            self.latencies + other.latencies,
        )

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth; 0.0 if nothing was measured."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def cpu_cores(self) -> float:
        """Seconds of CPU per second."""
        return self.cpu_seconds / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """A case and what was found for it."""

    case: Case
    sample: Sample

    def to_dict(self) -> dict[str, Any]:
        """The measurement as JSON values; a gigabyte is 1e9 bytes."""
        sample = self.sample
        gigabytes = sample.nbytes / 1e9
        ordered = sorted(sample.latencies)
        return {
            "gigabytes_per_second": sample.bytes_per_second / 1e9,
            "cpu_cores": sample.cpu_cores,
            "cpu_seconds_per_gigabyte": sample.cpu_seconds / gigabytes if gigabytes else None,
            "backend": self.case.backend,
            "block_size": self.case.block_size,
            "queue_depth": self.case.queue_depth,
            "direct": self.case.direct,
            "latency_ms": {
                "p50": percentile(ordered, 50) * 1e3,
                "p99": percentile(ordered, 99) * 1e3,
                "max": percentile(ordered, 100) * 1e3,
            },
            "seconds": sample.seconds,
            "bytes": sample.nbytes,
            "requests": len(ordered),
        }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed (nearest rank); 0.0 without values.

    `ordered` ascending.
    """
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def choose_best(measurements: Iterable[Measurement]) -> Measurement | None:
    """The fastest; of those within a hundredth of it, the one that needs the least CPU. None without any."""
    found = [one for one in measurements if one.sample.nbytes]
    top = max((one.sample.bytes_per_second for one in found), default=0.0)
    close = [one for one in found if one.sample.bytes_per_second >= (1 - _TIE) * top]
    return min(close, key=lambda one: (one.sample.cpu_cores, -one.sample.bytes_per_second), default=None)
