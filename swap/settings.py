"""The engine's settings and the statistics of engine and space: values, nothing else.

Owns the defaults and their checks. Does not know engine or space. Guarantees that settings which cannot work are
refused with a ValueError when they are made, not when the first byte moves.
"""

from __future__ import annotations

from dataclasses import dataclass

from swap.blocks import ALIGNMENT, is_aligned

BACKENDS = ("threads", "aiofiles", "inline")
LARGEST_QUEUE_DEPTH = 256

STALL_SECONDS = 120.0
"""How long a drive may show no progress, unless somebody says otherwise: a disk that spins up takes thirty."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How bytes are moved.

    `block_size` bytes per submission; `queue_depth` submissions and `max_bytes_in_flight` bytes at once per device;
    `stall_seconds` without progress before waiting raises. `direct`: whether the files of a space bypass the page cache
    (O_DIRECT) where the file system can.
    """

    backend: str = "threads"
    block_size: int = 8 << 20
    queue_depth: int = 8
    max_bytes_in_flight: int = 64 << 20
    stall_seconds: float = STALL_SECONDS
    direct: bool = True

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, found {self.backend!r}")
        if self.block_size <= 0 or not is_aligned(self.block_size):
            raise ValueError(f"block_size: expected a positive multiple of {ALIGNMENT} bytes, found {self.block_size}")
        if not 1 <= self.queue_depth <= LARGEST_QUEUE_DEPTH:
            raise ValueError(f"queue_depth: expected 1 to {LARGEST_QUEUE_DEPTH}, found {self.queue_depth}")
        if self.max_bytes_in_flight <= 0:
            raise ValueError(f"max_bytes_in_flight: expected a positive number, found {self.max_bytes_in_flight}")
        if not self.stall_seconds > 0:
            raise ValueError(f"stall_seconds: expected a positive number, found {self.stall_seconds}")


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """One device (`file_system_of`) since the engine was made. `seconds_busy`: at least one block in flight."""

    device: int
    bytes_read: int
    bytes_written: int
    blocks: int
    failed_blocks: int
    seconds_busy: float
    blocks_in_flight: int
    high_water_bytes_in_flight: int


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Requests since the engine was made, and what its devices have seen."""

    requests: int
    failed_requests: int
    devices: tuple[DeviceStatistics, ...]


@dataclass(frozen=True, slots=True)
class DirectoryStatistics:
    """One directory of a space; bytes. `high_water`: most bytes ever allocated at once.

    `device` finds the traffic in `EngineStatistics.devices`; directories on one file system share it. `weight`: the
    part of an extent that goes here, of 1.
    """

    path: str
    device: int
    direct: bool
    nbytes: int
    allocated: int
    high_water: int
    largest_hole: int
    weight: float


@dataclass(frozen=True, slots=True)
class SpaceStatistics:
    """A swap space at one instant; bytes. `high_water`: most bytes ever allocated at once, all directories together."""

    nbytes: int
    allocated: int
    high_water: int
    directories: tuple[DirectoryStatistics, ...]
    engine: EngineStatistics
