"""A CUDA device: its memory, and copies that run beside the computation.

Owns the allocation that device frames lie in, a stream for each direction, and the events that order them. Does not
know pages or policy. Guarantees that nobody waits for the device as a whole while it is in use: a copy waits on its own
stream for the fences of its frames, and its end is noticed by asking its event now and then; and that a frame is
written by a copy only after the work that its last holder asked for.

Why nobody records streams on tensors: torch's allocator never hears of single frames. They lie in one allocation that
lives as long as the arena, and their order is the business of the fences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from tiermem.errors import CapacityError, InvariantError
from tiermem.memory.arena import Arena, Fence, Frame
from tiermem.memory.copies import Copy, Done, Flight, start_lines
from tiermem.memory.devices import copy_whole
from tiermem.memory.numa import node_to_prefer, pci_address
from tiermem.memory.pagelock import HostRegistry, HostSlab, failed
from tiermem.memory.sizes import format_bytes
from tiermem.memory.slab import SlabArena, own_storage
from tiermem.memory.tiers import Tier

# How often the event of a copy is asked: a page takes from a third of a millisecond (8 MiB) upwards.
_LOOK_SECONDS = 0.0002
_MEASURED_NBYTES = 64 << 20


class CudaFence:
    """What was asked of a stream up to now."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device) -> None:
        """On the calling thread's current stream of `device`."""
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        """Whether all of it is done. Raises the device's error, if it has failed."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def hold(self) -> None:
        """Have the calling thread's current stream wait for it."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaSlab:
    """Device memory: one allocation of torch's, see `Slab`. Raises CapacityError if the device has no room for it.

    At its begin and at its end the device is waited for. torch's allocator orders what it hands out, and gets back, on
    the stream that asked for it only; frames are used on several. So before the first copy into a frame, whatever used
    those bytes before is through (a kernel of the user's, or torch's filling of fresh memory in deterministic mode),
    and before torch gets them back, so is whatever used them here.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        try:
            self._tensor: torch.Tensor | None = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            free, _ = torch.cuda.mem_get_info(device)
            raise CapacityError(
                f"device_memory is {format_bytes(nbytes)}, but {device} has {format_bytes(free)} free; lower it, and "
                "leave room for activations"
            ) from error
        torch.cuda.synchronize(device)

    def frame(self, offset: int, asked: int, nbytes: int) -> Frame:
        """See `Slab`. Raises InvariantError after `close`."""
        if self._tensor is None:
            raise InvariantError("a frame was asked of device memory that was given back")
        return Frame(offset, asked, own_storage(self._tensor[offset : offset + nbytes]))

    def fill(self, frame: Frame, value: int) -> None:
        """Have every byte of the frame set, on a stream of its own, after the frame's fences."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for fence in frame.fences:
                fence.hold()
            frame.tensor.fill_(value)
            frame.fences = (CudaFence(self._device),)

    def fence(self) -> Fence:
        """What the calling thread has asked of its current stream."""
        return CudaFence(self._device)

    def close(self) -> None:
        """Forget the allocation; torch keeps it until the last frame somebody looks at is gone. Idempotent.

        Raises the device's error, if it has failed; the allocation is forgotten all the same.
        """
        tensor, self._tensor = self._tensor, None
        if tensor is not None:
            torch.cuda.synchronize(self._device)


class CudaRegistry:
    """The CUDA runtime's page-locking (see `HostRegistry`), as torch binds it.

    With the device made the current one: the runtime would else make a context on the first device of the machine for
    it, several hundred megabytes there for each rank of the others.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime: HostRegistry = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> object:  # noqa: N802 - the runtime's name
        """Lock a range. A refusal leaves nothing behind for others to stumble over."""
        with torch.cuda.device(self._device):
            return self._forget(self._runtime.cudaHostRegister(address, nbytes, flags))

    def cudaHostUnregister(self, address: int) -> object:  # noqa: N802 - the runtime's name
        """Unlock the range that begins there."""
        with torch.cuda.device(self._device):
            return self._forget(self._runtime.cudaHostUnregister(address))

    def cudaGetErrorString(self, answer: object) -> str:  # noqa: N802 - the runtime's name
        """What an answer means."""
        return self._runtime.cudaGetErrorString(answer)

    def _forget(self, answer: object) -> object:
        """The runtime keeps the last error until somebody asks: the next kernel launch would raise it."""
        if failed(answer):
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device)
        return answer


def bus_address(device: torch.device | int) -> str | None:
    """Where the device is on the bus, as the kernel names it; None where torch does not say."""
    properties = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")  # of torch 2.11 and later; no stub names them
    found = [getattr(properties, name, None) for name in names]
    return None if None in found else pci_address(*found)  # type: ignore[arg-type]


class _CudaFlight:
    """A copy, and the event recorded after it."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    def remaining(self) -> float:
        return 0.0 if self._fence.passed() else _LOOK_SECONDS

    def land(self) -> None:
        """The bytes are there when the event has passed."""


class CudaDevice:
    """See `tiermem.memory.devices.Device`."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        self._above: CudaSlab | None = None
        self._below: HostSlab | None = None
        self._followed: torch.cuda.Stream | None = None
        # Both by `up`: whether copies go to the device.
        self._streams = [torch.cuda.Stream(self.torch_device) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._lines = start_lines(
            ("tiermem-copy-down", self._launcher(up=False)), ("tiermem-copy-up", self._launcher(up=True))
        )

    def make_arena(self, nbytes: int, *, poison: bool) -> Arena:
        """The arena of the DEVICE tier: one allocation."""
        self._above = CudaSlab(nbytes, self.torch_device)
        return SlabArena(self._above, Tier.DEVICE, poison=poison)

    def make_host_arena(self, nbytes: int, *, poison: bool, passing: int = 0) -> Arena:
        """The arena of the HOST tier: page-locked as far as the system allows, on the device's own NUMA node."""
        registry, address = CudaRegistry(self.torch_device), bus_address(self.torch_device)
        node = None if address is None else node_to_prefer(address)
        self._below = HostSlab(nbytes, registry, measure=self._measure, node=node)
        return SlabArena(self._below, Tier.HOST, poison=poison, passing=passing)

    def start_copy(self, source: Frame, target: Frame, nbytes: int, *, up: bool, urgent: bool, done: Done) -> Copy:
        """See `Device`. Raises TiermemError after `close`."""
        return self._lines[up].start(source, target, nbytes, urgent=urgent, done=done)

    def work_beside(self) -> None:
        """A stream of its own becomes the calling thread's current one: before others, as exchanges are waited for."""
        torch.cuda.set_stream(torch.cuda.Stream(self.torch_device, priority=-1))  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """The calling thread's current stream waits for the one of the call before, if that was another."""
        stream = torch.cuda.current_stream(self.torch_device)
        before, self._followed = self._followed, stream
        if before is not None and before != stream:
            stream.wait_stream(before)

    def close(self) -> None:
        """Wait for copies under way and end both threads. Idempotent."""
        for line in self._lines:
            line.close()

    def _launcher(self, *, up: bool) -> Callable[[Copy], Flight]:
        def launch(copy: Copy) -> Flight:
            # On the line's thread: from memory that is not page-locked the call itself takes as long as the copy. The
            # thread is the line's own and stays on the stream: leaving it, `torch.cuda.stream` would make the first
            # device of the machine the current one, and with it a context there, for each rank of the others.
            torch.cuda.set_stream(self._streams[up])
            for fence in (*copy.source.fences, *copy.target.fences):
                fence.hold()
            cuts = self._cuts(copy.source if up else copy.target)
            if cuts:
                self._copy_in_parts(copy, cuts, up=up)
            else:
                copy_whole(copy)
            return _CudaFlight(CudaFence(self.torch_device))

        return launch

    def _cuts(self, host: Frame) -> list[int]:
        """Where a frame in host memory crosses from one locked piece to another, or to what is not locked.

        CUDA refuses a copy from or to memory that is locked in part, and promises nothing of several pieces.
        """
        edges = () if self._below is None else self._below.edges
        return [edge - host.offset for edge in edges if host.offset < edge < host.offset + host.nbytes]

    def _copy_in_parts(self, copy: Copy, cuts: Sequence[int], *, up: bool) -> None:
        """As `copy_whole`, cut; the parts are the slabs', with storages of their own, hence no views of the frames."""
        below, above = self._below, self._above
        if below is None or above is None:
            raise InvariantError("a copy without both of its arenas; this is a bug in tiermem")
        source, target = (below, above) if up else (above, below)
        for begin, end in pairwise((0, *cuts, copy.source.nbytes)):
            part = source.frame(copy.source.offset + begin, end - begin, end - begin).tensor
            target.frame(copy.target.offset + begin, end - begin, end - begin).tensor.copy_(part, non_blocking=True)

    def _measure(self, host: torch.Tensor) -> float:
        """Bytes per second of a copy to the device; before anything runs, so here it may be waited for."""
        part = host[:_MEASURED_NBYTES].zero_()
        target = torch.empty_like(part, device=self.torch_device)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.torch_device):  # events are recorded on the current device's stream
            target.copy_(part, non_blocking=True)  # once before: the first one sets things up
            begun.record()
            target.copy_(part, non_blocking=True)
            ended.record()
            ended.synchronize()
        seconds = float(begun.elapsed_time(ended)) / 1e3
        return part.numel() / max(seconds, 1e-9)
