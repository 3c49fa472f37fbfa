"""What a measurement found, as values, as JSON and as lines of text.

Owns the records and the names in the JSON, which others rely on. Does not measure. Guarantees that the text says no
more than the JSON, and that bandwidth is in gigabytes (1e9 bytes) per second everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swap.bench.cases import Measurement, Pattern
from swap.bench.load import STEADY_WINDOWS, Series
from swap.bench.plan import Order


@dataclass(frozen=True, slots=True)
class PatternResult:
    """The sweep of one pattern. `best` is None if not a single request ended in its slice."""

    best: Measurement | None
    all: tuple[Measurement, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "best": self.best.to_dict() if self.best is not None else None,
            "all": [one.to_dict() for one in self.all],
        }


@dataclass(frozen=True, slots=True)
class FirstWrite:
    """A file written for the first time, and again: the same settings, every byte once."""

    directory: str
    first: Measurement
    again: Measurement

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"directory": self.directory, "first": self.first.to_dict(), "overwrite": self.again.to_dict()}


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """One directory by itself; `device` is its `file_system_of`."""

    directory: str
    device: int
    direct: bool
    found: Mapping[Pattern, Measurement]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        patterns: dict[str, Any] = {pattern: one.to_dict() for pattern, one in self.found.items()}
        return {"directory": self.directory, "device": self.device, "direct": self.direct, **patterns}


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Overwriting without end. `settled_seconds`: after how long bandwidth stayed the same, None if it never did."""

    measurement: Measurement
    series: Series
    settled_seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **self.measurement.to_dict(),
            "settled_seconds": self.settled_seconds,
            "window_seconds": self.series.window_seconds,
            "gigabytes_per_second_over_time": [rate / 1e9 for rate in self.series.bytes_per_second],
        }


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All of it. With several directories `results` are those of all of them together, striped by `weights`."""

    order: Order
    direct: bool
    first_write: tuple[FirstWrite, ...]
    results: Mapping[Pattern, PatternResult]
    devices: tuple[DeviceResult, ...]
    weights: tuple[float, ...]
    steady_state: SteadyState | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; `read`, `write` and `mixed` each hold `best` and `all`."""
        return {
            "directories": [str(directory) for directory in self.order.directories],
            "size": self.order.nbytes,
            "seconds": self.order.seconds,
            "direct": self.direct,
            "huge_pages": self.order.huge_pages,
            **{pattern: result.to_dict() for pattern, result in self.results.items()},
            "first_write": [one.to_dict() for one in self.first_write],
            "devices": [device.to_dict() for device in self.devices],
            "weights": list(self.weights),
            "steady_state": self.steady_state.to_dict() if self.steady_state is not None else None,
        }

    def to_rows(self) -> list[tuple[str, ...]]:
        """A table: the heading first, then every case of the sweep, the best of each pattern marked with `*`."""
        rows: list[tuple[str, ...]] = [
            ("", "pattern", "backend", "block", "depth", "path", "GB/s", "CPU", "p50 ms", "p99 ms", "max ms")
        ]
        for pattern, result in self.results.items():
            for one in result.all:
                mark = "*" if result.best is not None and one.case == result.best.case else ""
                rows.append((mark, pattern, *_cells(one)))
        return rows

    def to_lines(self) -> list[str]:
        """What does not fit into the table, one sentence each."""
        lines = []
        if not self.direct:
            lines.append("direct I/O is refused here: every figure includes a copy through the page cache")
        for one in self.first_write:
            first, again = (each.sample.bytes_per_second / 1e9 for each in (one.first, one.again))
            lines.append(f"{one.directory}: first write {first:.2f} GB/s, overwrite {again:.2f} GB/s")
        for device in self.devices:
            figures = ", ".join(
                f"{pattern} {one.sample.bytes_per_second / 1e9:.2f}" for pattern, one in device.found.items()
            )
            lines.append(f"{device.directory} alone: {figures} GB/s")
        steady = self.steady_state
        if steady is not None:
            sample = steady.measurement.sample
            settled = "which had not settled"
            if len(steady.series.bytes_per_second) < STEADY_WINDOWS:
                settled = "too short to say whether that lasts"
            elif steady.settled_seconds is not None:
                settled = f"steady from second {steady.settled_seconds:.0f} on"
            lines.append(
                f"overwriting for {sample.seconds:.0f} s: {sample.bytes_per_second / 1e9:.2f} GB/s over "
                f"{sample.nbytes / 1e9:.1f} GB, {settled}"
            )
        return lines


def _cells(one: Measurement) -> tuple[str, ...]:
    found = one.to_dict()
    latency = found["latency_ms"]
    return (
        one.case.backend,
        f"{one.case.block_size / 2**20:g} MiB",
        str(one.case.queue_depth),
        "direct" if one.case.direct else "buffered",
        f"{found['gigabytes_per_second']:.2f}",
        f"{found['cpu_cores']:.2f}",
        *(f"{latency[name]:.1f}" for name in ("p50", "p99", "max")),
    )
