"""The swap-file engine: bytes between memory and NVMe, without torch.

Owns everything this project does with files on disk while training, and is an instrument for measuring drives alone.
Knows bytes; does not know tensors, models or pages. Guarantees that every completion is checked, and that an error
names operation, path, offset, length and errno. See README.md beside this file.
"""

import swap.system  # noqa: F401 - before all others
from swap.backends.base import Backend
from swap.blocks import ALIGNMENT, align_down, align_up, is_aligned
from swap.buffers import AlignedBuffer
from swap.checksums import checksum
from swap.commit import CommitStore
from swap.engine import Engine
from swap.errors import (
    ChecksumError,
    DirectIOWarning,
    FormatError,
    SwapClosedError,
    SwapError,
    SwapFullError,
    SwapInUseError,
    SwapIOError,
    SwapTimeoutError,
)
from swap.extents import Extent, ExtentAllocator, Piece
from swap.file_systems import file_system_of, free_together
from swap.files import DATA_OFFSET, SwapFile
from swap.generations import Copy, Generations, GenerationsStatistics, Mark
from swap.manifest import Entry, Manifest
from swap.recovery import Leftovers, Recovered, find_leftovers, find_prepared, recover, verify
from swap.requests import Operation, Priority, Request
from swap.rereading import take_checksums
from swap.scratch import ScratchSpace
from swap.settings import DeviceStatistics, DirectoryStatistics, EngineSettings, EngineStatistics, SpaceStatistics
from swap.space import SwapSpace
from swap.syscalls import ReadingCalls, SystemCalls

__all__ = [
    "ALIGNMENT",
    "DATA_OFFSET",
    "AlignedBuffer",
    "Backend",
    "ChecksumError",
    "CommitStore",
    "Copy",
    "DeviceStatistics",
    "DirectIOWarning",
    "DirectoryStatistics",
    "Engine",
    "EngineSettings",
    "EngineStatistics",
    "Entry",
    "Extent",
    "ExtentAllocator",
    "FormatError",
    "Generations",
    "GenerationsStatistics",
    "Leftovers",
    "Manifest",
    "Mark",
    "Operation",
    "Piece",
    "Priority",
    "ReadingCalls",
    "Recovered",
    "Request",
    "ScratchSpace",
    "SpaceStatistics",
    "SwapClosedError",
    "SwapError",
    "SwapFile",
    "SwapFullError",
    "SwapIOError",
    "SwapInUseError",
    "SwapSpace",
    "SwapTimeoutError",
    "SystemCalls",
    "align_down",
    "align_up",
    "checksum",
    "file_system_of",
    "find_leftovers",
    "find_prepared",
    "free_together",
    "is_aligned",
    "recover",
    "take_checksums",
    "verify",
]
