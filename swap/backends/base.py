"""What a way of doing I/O must offer the engine, and what the engine offers it.

Owns two small interfaces. Does not know any of the ways. A backend takes a block from the source when it is
free, moves its bytes, and reports it exactly once with `finish`. Order, depth, splitting, completion: the source's.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Sequence
from typing import Protocol

from swap.device_queue import DeviceQueue
from swap.errors import SwapError
from swap.requests import Block


class BlockSource(Protocol):
    """The engine, as a backend sees it. Every method may be called from any thread."""

    def take(self, queue: DeviceQueue) -> Block | None:
        """Wait for the next block of a device; None when the engine is closed."""

    def try_take(self, queue: DeviceQueue) -> Block | None:
        """The next block of a device, or None if there is none now."""

    def finish(self, queue: DeviceQueue, block: Block, error: SwapError | None) -> None:
        """Report a block taken before; completes its request if it was the last one, calling `on_done` here."""


class Backend(abc.ABC):
    """One way of doing I/O."""

    @abc.abstractmethod
    def attach(self, source: BlockSource, queue: DeviceQueue) -> None:
        """Begin to serve a device. Called once per device, with no lock held."""

    @abc.abstractmethod
    def wake(self, queue: DeviceQueue) -> None:
        """Blocks may have become available. Called with no lock held; backends that wait in `take` need not care."""

    @abc.abstractmethod
    def close(self, timeout: float) -> None:
        """Stop; return when nothing is in flight, or after `timeout` seconds. `take` already returns None."""

    def late(self) -> Sequence[threading.Thread]:
        """After `close`: threads that end when the drive has answered what `close` did not wait for any longer."""
        return ()
