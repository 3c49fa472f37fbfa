"""What only a real device can show: copies run beside kernels, and nobody reads or writes a frame too early."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from doubles_gpu import MIB, TRIALS, Trial, tokens
from doubles_pager import is_viewed

import tiermem
from tiermem.memory.arena import Arena, Frame
from tiermem.memory.cuda import CudaDevice, CudaRegistry
from tiermem.memory.pagelock import HostSlab

SECONDS = 60.0
LONG = 200_000_000  # cycles of a kernel that does nothing: about a tenth of a second


@pytest.fixture
def arenas(cuda):
    device = CudaDevice(cuda)
    above, below = device.make_arena(64 * MIB, poison=False), device.make_host_arena(64 * MIB, poison=False)
    yield device, above, below
    device.close()
    above.close()
    below.close()


def frame(arena: Arena, nbytes: int) -> Frame:
    made = arena.allocate(nbytes)
    assert made is not None
    return made


def copy(device: CudaDevice, source: Frame, target: Frame, *, up: bool) -> threading.Event:
    ended = threading.Event()
    errors: list[BaseException] = []

    def done(error: BaseException | None) -> None:
        errors.extend([error] if error is not None else [])
        ended.set()

    device.start_copy(source, target, source.asked, up=up, urgent=True, done=done)
    ended.errors = errors  # type: ignore[attr-defined]
    return ended


def arrive(ended: threading.Event) -> None:
    assert ended.wait(SECONDS)
    assert ended.errors == []  # type: ignore[attr-defined]


def test_all_of_host_memory_is_page_locked(cuda):
    """Else copies are slow, and computation and copies wait for each other; all other tests go on without."""
    device = CudaDevice(cuda)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arena = device.make_host_arena(64 * MIB, poison=False)
    assert device._below is not None
    assert device._below.edges == ()
    assert frame(arena, MIB).tensor.is_pinned()
    device.close()
    arena.close()


def test_frames_are_one_allocation_and_storages_of_their_own(arenas):
    _, above, _ = arenas
    before = torch.cuda.memory_allocated()
    frames = [frame(above, MIB) for _ in range(8)]
    assert torch.cuda.memory_allocated() == before
    addresses = {each.tensor.untyped_storage().data_ptr() for each in frames}
    assert len(addresses) == 8
    assert all(each.tensor.storage_offset() == 0 for each in frames)
    assert not any(is_viewed(each) for each in frames)
    view = frames[3].tensor.view(torch.float32)[5:]
    assert [is_viewed(each) for each in frames] == [number == 3 for number in range(8)]
    assert view.untyped_storage().data_ptr() == frames[3].tensor.data_ptr()


def test_bytes_go_up_and_come_back(arenas):
    device, above, below = arenas
    there, up, back = frame(below, 5 * MIB + 3), frame(above, 5 * MIB + 3), frame(below, 5 * MIB + 3)
    there.tensor.random_(0, 256)
    arrive(copy(device, there, up, up=True))
    arrive(copy(device, up, back, up=False))
    assert torch.equal(there.tensor[: there.asked], back.tensor[: there.asked])


@pytest.mark.parametrize("limit", [None, 24 * MIB])
def test_bytes_go_across_the_edges_of_what_is_locked(limit, cuda, monkeypatch):
    """In pieces of 8 MiB; with a limit what lies above it stays unlocked, as where the system refuses."""
    lock = CudaRegistry.cudaHostRegister
    locked: list[int] = []

    def limited(registry: CudaRegistry, address: int, nbytes: int, flags: int) -> object:
        if limit is not None and sum(locked) + nbytes > limit:
            return 2
        locked.append(nbytes)
        return lock(registry, address, nbytes, flags)

    monkeypatch.setattr(CudaRegistry, "cudaHostRegister", limited)
    monkeypatch.setattr(CudaRegistry, "cudaGetErrorString", lambda registry, answer: "refused by the test")
    monkeypatch.setattr("tiermem.memory.cuda.HostSlab", functools.partial(HostSlab, piece=8 * MIB))
    device = CudaDevice(cuda)
    above = device.make_arena(64 * MIB, poison=False)
    with contextlib.nullcontext() if limit is None else pytest.warns(UserWarning, match="refused by the test"):
        below = device.make_host_arena(96 * MIB, poison=False)
    there, up, back = frame(below, 30 * MIB), frame(above, 30 * MIB), frame(below, 30 * MIB)
    there.tensor.random_(0, 256)
    back.tensor.zero_()
    arrive(copy(device, there, up, up=True))
    arrive(copy(device, up, back, up=False))
    assert torch.equal(there.tensor, back.tensor)
    device.close()
    above.close()
    below.close()


def test_a_copy_down_waits_for_the_kernel_that_writes_the_frame(arenas):
    device, above, below = arenas
    source, target = frame(above, 4 * MIB), frame(below, 4 * MIB)
    target.tensor.zero_()
    torch.cuda._sleep(LONG)
    source.tensor.fill_(7)
    source.fence(above.fence())
    arrive(copy(device, source, target, up=False))
    assert target.tensor.unique().tolist() == [7]


def test_a_copy_up_does_not_overwrite_what_a_kernel_is_about_to_read(arenas):
    device, above, below = arenas
    fresh, used = frame(below, 4 * MIB), frame(above, 4 * MIB)
    fresh.tensor.fill_(1)
    used.tensor.fill_(9)
    torch.cuda._sleep(LONG)
    read = used.tensor.clone()  # late: behind the sleeping kernel
    used.fence(above.fence())
    above.free(used)
    again = frame(above, 4 * MIB)
    assert again.offset == used.offset
    arrive(copy(device, fresh, again, up=True))
    assert read.unique().tolist() == [9]
    assert again.tensor.unique().tolist() == [1]


def test_copies_go_on_while_the_computation_is_busy(arenas):
    device, above, below = arenas
    source, target = frame(below, 16 * MIB), frame(above, 16 * MIB)
    source.tensor.fill_(3)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    busy = torch.cuda.Event()
    busy.record()
    arrive(copy(device, source, target, up=True))
    assert not busy.query(), "the copy has arrived before the kernel is through"


@contextlib.contextmanager
def waiting(mode: str) -> Iterator[None]:
    """What torch makes of a call that waits for the device: "error" or "default"; on all threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("update", ["step", "forward", "backward"])
def test_forward_and_backward_never_wait_for_the_device(update, cuda, tmp_path):
    """torch reports every call that waits; norms of gradients are waited for in optimizer.step() only."""
    trial = TRIALS["fused attention"]
    config = tiermem.Config(
        device="cuda", device_memory=8 * MIB, host_memory=64 * MIB, swap_dirs=[tmp_path], update=update
    )
    model = trial.make()
    with tiermem.offload(model, config):
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
        for step in range(4):
            batch = tokens(step, cuda)
            with waiting("error" if step >= 2 else "default"):
                trial.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def beside_the_model(trial: Trial, device: torch.device) -> int:
    """Most bytes that a step of the resident model takes beside its weights: gradients, activations, cuBLAS's room."""
    model = trial.make().to(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for step in range(2):  # cuBLAS's room is allocated at its first use, and stays
        trial.loss(model, tokens(step, device)).backward()
        model.zero_grad()
    return torch.cuda.max_memory_allocated() - before


def test_device_memory_is_what_was_given_and_does_not_grow(cuda, tmp_path):
    trial = TRIALS["llama"]
    config = tiermem.Config(device="cuda", device_memory=8 * MIB, host_memory=64 * MIB, swap_dirs=[tmp_path])
    beside = beside_the_model(trial, cuda)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = trial.make()
    reserved = []
    with tiermem.offload(model, config):
        optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
        torch.cuda.reset_peak_memory_stats()
        for step in range(8):
            trial.loss(model, tokens(step, cuda)).backward()
            optimizer.step()
            optimizer.zero_grad()
            reserved.append(torch.cuda.memory_reserved())
        peak = torch.cuda.max_memory_allocated() - before
    assert len(set(reserved[3:])) == 1, reserved
    assert peak <= 8 * MIB + beside + MIB, "the arena, and what a step takes without it"
    assert torch.cuda.memory_allocated() - before < MIB, "given back at the end"


def test_auto_plans_the_device_memory(cuda, tmp_path):
    config = tiermem.Config(device="cuda", host_memory=64 * MIB, swap_dirs=[tmp_path])
    model = TRIALS["llama"].make()
    with tiermem.offload(model, config) as runtime:
        top = runtime.statistics().tiers[-1]
        assert top.name == "DEVICE"
        assert top.budget < 16 * MIB, "no more than the model can use"


def test_too_much_device_memory_is_said_so(cuda, tmp_path):
    config = tiermem.Config(device="cuda", device_memory="4TiB", host_memory=64 * MIB, swap_dirs=[tmp_path])
    with pytest.raises(tiermem.CapacityError, match=r"device_memory is 4\.00 TiB"):
        tiermem.offload(TRIALS["llama"].make(), config)
    assert list(tmp_path.iterdir()) == []
