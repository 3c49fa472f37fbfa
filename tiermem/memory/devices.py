"""What computes, as the memory room sees it: where its frames lie, and how bytes come and go.

Owns the words for an accelerator (`Device`) and the one played by the processor (`SimulatedDevice`). Does not know
pages, tiers' policy or modules. Guarantees that a copy changes its target only while it is on its way, that each copy
ends once, and that on a simulated device it takes as long as its link says, whatever the processor could do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from tiermem.errors import ConfigError
from tiermem.memory.arena import Arena, Frame
from tiermem.memory.copies import Copy, Done, Flight, start_lines
from tiermem.memory.links import Link
from tiermem.memory.pagelock import HostSlab
from tiermem.memory.slab import SlabArena, TensorSlab
from tiermem.memory.tiers import Tier

# How often to look at a fence that has not passed; only tests make such devices.
_LOOK_SECONDS = 0.001


class Device(Protocol):
    """An accelerator, real or not."""

    @property
    def torch_device(self) -> torch.device:
        """Where torch computes on its frames."""

    def make_arena(self, nbytes: int, *, poison: bool) -> Arena:
        """The arena of the DEVICE tier."""

    def make_host_arena(self, nbytes: int, *, poison: bool, passing: int = 0) -> Arena:
        """The arena of the HOST tier, in memory that suits its copies; `passing` as for `SlabArena`."""

    def start_copy(self, source: Frame, target: Frame, nbytes: int, *, up: bool, urgent: bool, done: Done) -> Copy:
        """Copy between a HOST and a DEVICE frame, `up` to the device, once the fences of both have passed.

        Never waits. `done(error)` is called once, on some thread, when the bytes are there or have failed to come.
        """

    def work_beside(self) -> None:
        """What the calling thread asks for from now on runs beside what others ask for; fences bring both in order."""

    def follow(self) -> None:
        """What the calling thread asks for from now on comes after all that whoever called this last has asked for."""

    def close(self) -> None:
        """Wait for copies under way and end the threads; before the arenas are closed."""


def copy_whole(copy: Copy) -> None:
    """Copy all of the frame, which is up to a page more than asked for.

    No slices: for their lifetime they would look, to whoever counts the holders of the storage, like a tensor that
    somebody keeps (README.md, M5).
    """
    copy.target.tensor.copy_(copy.source.tensor, non_blocking=True)


class _SimulatedFlight:
    """The bytes arrive all at once, when the time is over: a copy looked at too early shows."""

    def __init__(self, copy: Copy, due: float, clock: Callable[[], float]) -> None:
        self._copy = copy
        self._due = due
        self._clock = clock

    def remaining(self) -> float:
        fences = (*self._copy.source.fences, *self._copy.target.fences)
        if not all(fence.passed() for fence in fences):
            return _LOOK_SECONDS
        return max(0.0, self._due - self._clock())

    def land(self) -> None:
        copy_whole(self._copy)


class SimulatedDirection:
    """One direction: copies follow one another at `bandwidth` bytes per second, each `latency` seconds later."""

    def __init__(self, bandwidth: float, latency: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._bandwidth = bandwidth
        self._latency = latency
        self._free_at = 0.0

    def launch(self, copy: Copy) -> Flight:
        """Begin a copy as soon as the one before has left. On the line's thread."""
        self._free_at = max(self._free_at, self._clock()) + copy.nbytes / self._bandwidth
        return _SimulatedFlight(copy, self._free_at + self._latency, self._clock)


class SimulatedDevice:
    """A part of host memory that plays a device, behind a link of given speed. See `Device`.

    Its frames lie in one piece, as on a real one. What computes is the processor, so nothing is ever still running
    when a call returns and no frame has fences; where a test makes some, copies wait for them.
    """

    def __init__(self, link: Link) -> None:
        self.torch_device = torch.device("cpu")
        self._up, self._down = start_lines(
            ("tiermem-copy-up", SimulatedDirection(link.up, link.latency).launch),
            ("tiermem-copy-down", SimulatedDirection(link.down, link.latency).launch),
        )

    def make_arena(self, nbytes: int, *, poison: bool) -> Arena:
        """The arena of the DEVICE tier."""
        return SlabArena(_processor_slab(nbytes), Tier.DEVICE, poison=poison)

    def make_host_arena(self, nbytes: int, *, poison: bool, passing: int = 0) -> Arena:
        """The arena of the HOST tier: in one piece as beside a real device, though there is nothing to lock it for."""
        return SlabArena(HostSlab(nbytes), Tier.HOST, poison=poison, passing=passing)

    def start_copy(self, source: Frame, target: Frame, nbytes: int, *, up: bool, urgent: bool, done: Done) -> Copy:
        """See `Device`. Raises TiermemError after `close`."""
        return (self._up if up else self._down).start(source, target, nbytes, urgent=urgent, done=done)

    def work_beside(self) -> None:
        """Nothing to do: a processor's threads run beside each other."""

    def follow(self) -> None:
        """Nothing to do: what was asked of a processor is done."""

    def close(self) -> None:
        """Wait for copies under way and end both threads. Idempotent."""
        self._up.close()
        self._down.close()


def _processor_slab(nbytes: int) -> TensorSlab:
    try:
        return TensorSlab(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
    except (RuntimeError, TypeError) as error:  # a TypeError of many lines: more bytes than an address can count
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"device_memory: no {nbytes} bytes of host memory for a simulated device ({reason})"
        ) from error
