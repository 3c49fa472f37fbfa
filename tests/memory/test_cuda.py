"""What the CUDA device asks of CUDA, and in which order, with CUDA played by a list. Real ones: tests/cuda."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from doubles_pager import is_viewed

from tiermem.memory.arena import FRAME_ALIGNMENT, Frame
from tiermem.memory.cuda import CudaDevice, CudaFence, CudaRegistry, CudaSlab
from tiermem.memory.pagelock import HostSlab
from tiermem.memory.slab import SlabArena
from tiermem.memory.tiers import Tier

SECONDS = 60.0


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str, device: torch.device) -> None:
        self.cuda, self.name, self.device = cuda, name, device

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.name, self.over = cuda, "?", threading.Event()

    def record(self, stream: FakeStream) -> None:
        self.cuda.events.append(self)
        self.name = f"event {len(self.cuda.events)}"
        self.cuda.log.append(f"{self.name} behind {stream.name}")

    def query(self) -> bool:
        return self.over.is_set()


class FakeCuda:
    """Streams and events that only note what they are told; nothing here waits for the whole device."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events: list[FakeEvent] = []
        self.streams = 0
        self.waits: list[torch.device] = []
        self.devices: list[torch.device] = [torch.device("cuda", 0)]
        self.contexts: list[torch.device] = []
        self.local = threading.local()

    def Stream(self, device: torch.device, priority: int = 0) -> FakeStream:  # noqa: N802
        self.streams += 1
        return FakeStream(self, f"stream {self.streams}", device)

    def Event(self) -> FakeEvent:  # noqa: N802
        return FakeEvent(self)

    def set_stream(self, stream: FakeStream) -> None:
        self.local.stream = stream

    def current_stream(self, device: torch.device) -> FakeStream:
        return getattr(self.local, "stream", None) or FakeStream(self, "compute", device)

    def synchronize(self, device: torch.device) -> None:
        self.waits.append(device)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        yield
        self.devices.pop()

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """As torch's: leaving it sets the device that was current before, and so makes a context there."""
        if self.devices[-1] != stream.device:
            self.contexts.append(self.devices[-1])
        before, self.local.stream = getattr(self.local, "stream", None), stream
        yield
        self.local.stream = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("Stream", "Event", "current_stream", "stream", "set_stream", "synchronize", "device"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def frame() -> Frame:
    return Frame(0, 10, torch.zeros(FRAME_ALIGNMENT, dtype=torch.uint8))


def test_a_copy_waits_for_both_frames_and_ends_with_its_own_event(cuda: FakeCuda) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    source, target = frame(), frame()
    source.tensor[:10] = 7
    source.fence(CudaFence(device.torch_device))
    target.fence(CudaFence(device.torch_device))
    ended: list[BaseException | None] = []
    arrived = threading.Event()

    def done(error: BaseException | None) -> None:
        ended.append(error)
        arrived.set()

    device.start_copy(source, target, 10, up=True, urgent=True, done=done)
    while len(cuda.events) < 3:
        assert threading.Event().wait(0.001) is False
    assert not ended, "issued, but its event has not passed"
    cuda.events[2].over.set()
    assert arrived.wait(SECONDS)
    assert ended == [None]
    assert cuda.log == [
        "event 1 behind compute",
        "event 2 behind compute",
        "stream 2 waits for event 1",
        "stream 2 waits for event 2",
        "event 3 behind stream 2",
    ]
    assert target.tensor[:10].tolist() == [7] * 10
    device.close()


def test_no_context_is_made_on_another_device(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of megabytes on the first device of the machine, for each rank of the others."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
    monkeypatch.setattr(FakeEvent, "query", lambda event: True)
    device = CudaDevice(torch.device("cuda", 1))
    arena = device.make_arena(FRAME_ALIGNMENT, poison=True)
    above, arrived = arena.allocate(10), threading.Event()
    assert above is not None
    device.start_copy(frame(), above, 10, up=True, urgent=True, done=lambda error: arrived.set())
    assert arrived.wait(SECONDS)
    arena.free(above)
    device.close()
    assert cuda.contexts == []


def test_a_thread_that_works_beside_others_has_a_stream_of_its_own(cuda: FakeCuda) -> None:
    device = CudaDevice(torch.device("cuda", 0))

    def issuer() -> None:
        device.work_beside()
        CudaFence(device.torch_device)

    thread = threading.Thread(target=issuer)
    thread.start()
    thread.join(SECONDS)
    CudaFence(device.torch_device).hold()
    assert cuda.log == ["event 1 behind stream 3", "event 2 behind compute", "compute waits for event 2"]
    device.close()


def test_who_follows_waits_for_the_stream_of_whoever_did_so_before(cuda: FakeCuda) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    one, other = (cuda.Stream(device.torch_device) for _ in range(2))
    for stream in (one, one, other, one):
        cuda.set_stream(stream)
        device.follow()
    assert cuda.log == ["stream 4 waits for stream 3", "stream 3 waits for stream 4"]
    device.close()


def test_the_error_of_an_event_is_the_copys(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(event: FakeEvent) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(FakeEvent, "query", failing)
    device = CudaDevice(torch.device("cuda", 0))
    ended: list[Any] = []
    device.start_copy(frame(), frame(), 10, up=False, urgent=False, done=ended.append)
    device.close()
    assert len(ended) == 1
    assert "illegal memory access" in str(ended[0])


def test_a_freed_frame_is_poisoned_behind_its_fences_and_its_heir_waits_for_that(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
    arena = SlabArena(CudaSlab(4 * FRAME_ALIGNMENT, torch.device("cuda", 0)), Tier.DEVICE, poison=True)
    monkeypatch.setattr(torch, "empty", empty)
    held = arena.allocate(4 * FRAME_ALIGNMENT)
    assert held is not None
    del cuda.log[:], cuda.events[:]
    held.fences = ()
    held.fence(arena.fence())
    arena.free(held)
    heir = arena.allocate(FRAME_ALIGNMENT)
    assert heir is not None
    assert cuda.log == [
        "event 1 behind compute",
        "stream 1 waits for event 1",
        "event 2 behind stream 1",  # poisoned when it was freed
        "stream 1 waits for event 2",
        "event 3 behind stream 1",  # and when it was handed out
    ]
    assert len(heir.fences) == 1
    for fence in heir.fences:
        fence.hold()
    assert cuda.log[-1] == "compute waits for event 3"
    assert heir.tensor.unique().tolist() == [0xFF]
    assert cuda.waits == [torch.device("cuda", 0)], "before the first frame: torch knows of one stream only"
    arena.close()
    arena.close()
    assert len(cuda.waits) == 2, "and before torch gets the bytes back"


def test_a_refused_lock_is_not_left_for_the_next_kernel_to_report(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Any] = []
    current: list[torch.device] = []

    def zeros(*shape: int, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: out of memory")  # what the refusal has left behind

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
            current.append(cuda.devices[-1])
            return 2 if address else 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            current.append(cuda.devices[-1])
            return 0

        def cudaGetErrorString(self, answer: int) -> str:  # noqa: N802
            return "out of memory" if answer == 2 else "no error"

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch, "zeros", zeros)
    registry = CudaRegistry(torch.device("cuda", 1))
    assert registry.cudaHostRegister(0, 1, 1) == 0
    assert registry.cudaHostUnregister(0) == 0
    assert launched == []
    assert registry.cudaHostRegister(4096, 1, 1) == 2
    assert launched == [torch.device("cuda", 1)]
    assert set(current) == {torch.device("cuda", 1)}, "no context is made on another device"
    assert registry.cudaGetErrorString(2) == "out of memory"


class Locks:
    """The runtime's page-locking: a piece is locked, up to `most` of them. Notes where."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.ranges: list[range] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if len(self.ranges) == self.most:
            return 2
        self.ranges.append(range(address, address + nbytes))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.ranges = [locked for locked in self.ranges if locked.start != address]
        return 0

    def cudaGetErrorString(self, answer: int) -> str:  # noqa: N802
        return "out of memory"

    def cross(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in more than one piece, or in one and beside it."""
        begin, last = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() - 1
        return any((begin in locked) != (last in locked) for locked in self.ranges)


@pytest.mark.parametrize(("most", "parts"), [(4, 3), (2, 3), (1, 2), (0, 1)])
def test_no_copy_goes_across_the_edges_of_what_is_locked(
    most: int, parts: int, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA refuses one from or to memory that is locked in part: CUDA_ERROR_INVALID_VALUE."""
    locks, unit, copied = Locks(most), FRAME_ALIGNMENT, list[tuple[bool, bool]]()
    empty, copy_ = torch.empty, torch.Tensor.copy_
    monkeypatch.setattr(torch.cuda, "cudart", lambda: locks)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)
    monkeypatch.setattr("tiermem.memory.cuda.HostSlab", partial(HostSlab, piece=2 * unit))
    device = CudaDevice(torch.device("cuda", 0))
    monkeypatch.setattr(device, "_measure", lambda part: 1e9)
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device=None: empty(*shape, dtype=dtype))
    above = device.make_arena(8 * unit, poison=False)
    with contextlib.nullcontext() if most == 4 else pytest.warns(UserWarning, match="page-locked"):
        below = device.make_host_arena(8 * unit, poison=False)
    first, there, up = below.allocate(unit), below.allocate(4 * unit), above.allocate(4 * unit)
    assert first is not None
    assert there is not None
    assert up is not None
    assert there.offset == unit
    there.tensor.random_(0, 256)

    def watched(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copied.append((locks.cross(target) or locks.cross(source), is_viewed(up) or is_viewed(there)))
        return copy_(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", watched)
    monkeypatch.setattr(FakeEvent, "query", lambda event: True)
    for source, target, way in ((there, up, True), (up, there, False)):
        ended: list[BaseException | None] = []
        arrived = threading.Event()

        def done(
            error: BaseException | None,
            ended: list[BaseException | None] = ended,
            arrived: threading.Event = arrived,
        ) -> None:
            ended.append(error)
            arrived.set()

        wanted = source.tensor.tolist()
        target.tensor.zero_()
        device.start_copy(source, target, source.asked, up=way, urgent=True, done=done)
        assert arrived.wait(SECONDS)
        assert ended == [None]
        assert target.tensor.tolist() == wanted
    assert copied == [(False, False)] * (2 * parts)
    piece = Frame(2 * unit, 2 * unit, torch.empty(2 * unit, dtype=torch.uint8))
    assert device._cuts(piece) == [], "what begins and ends at edges goes across none"
    device.close()
    above.close()
    below.close()
    assert locks.ranges == []
