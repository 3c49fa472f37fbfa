"""Every fault a transfer can suffer, injected into the system calls of a real O_DIRECT file."""

import errno
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from doubles import FaultySystemCalls, PaperFile, Short, Stall, StepBackend, start_read, start_write
from doubles_garbage import collect

import swap
from swap import AlignedBuffer, Engine, EngineSettings, Operation, Priority, SwapFile, SwapIOError
from swap.backends.base import BlockSource
from swap.backends.inline import InlineBackend
from swap.backends.threads import ThreadsBackend
from swap.device_queue import DeviceQueue

BLOCK = 64 << 10
NBYTES = 4 * BLOCK


@pytest.fixture(params=["threads", "inline"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def system() -> FaultySystemCalls:
    return FaultySystemCalls()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SwapFile]:
    file = SwapFile.open(tmp_path, name="r0", nbytes=1 << 20)
    yield file
    file.close()


@pytest.fixture
def engine(kind: str, system: FaultySystemCalls) -> Iterator[Engine]:
    backend = ThreadsBackend(system) if kind == "threads" else InlineBackend(system)
    engine = Engine(EngineSettings(block_size=BLOCK, queue_depth=2, stall_seconds=30), backend=backend)
    yield engine
    engine.close()


def filled(nbytes: int = NBYTES) -> AlignedBuffer:
    buffer = AlignedBuffer(nbytes)
    buffer.view[:] = os.urandom(nbytes)
    return buffer


def round_trip(engine: Engine, file: SwapFile) -> None:
    source, target = filled(), AlignedBuffer(NBYTES)
    start_write(engine, file, 4096, source.view).wait(30)
    start_read(engine, file, 4096, target.view).wait(30)
    assert source.view == target.view


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("faults", [(4096,), (5000,), (8192, 512, 4097), (BLOCK - 1,), (1, 8191)])
def test_short_transfers_are_continued_at_aligned_places(
    engine: Engine, file: SwapFile, system: FaultySystemCalls, call: str, faults: tuple[int, ...]
) -> None:
    system.inject(call, *map(Short, faults))
    round_trip(engine, file)
    assert system.calls[call] > NBYTES // BLOCK


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_interrupted_calls_are_repeated(engine: Engine, file: SwapFile, system: FaultySystemCalls, call: str) -> None:
    system.inject(call, errno.EINTR, errno.EAGAIN, errno.EINTR, None, errno.EAGAIN)
    round_trip(engine, file)
    assert system.calls[call] == NBYTES // BLOCK + 4
    assert len(system.slept) == 2  # EAGAIN pauses, EINTR does not


def test_endless_eagain_is_an_error_in_the_end(engine: Engine, file: SwapFile, system: FaultySystemCalls) -> None:
    system.always("preadv", errno.EAGAIN)
    with pytest.raises(SwapIOError, match="EAGAIN"):
        start_read(engine, file, 4096, AlignedBuffer(BLOCK).view).wait(30)
    assert 5 < sum(system.slept) < 60


@pytest.mark.parametrize(
    ("call", "code"),
    [("preadv", errno.EIO), ("pwritev", errno.EIO), ("pwritev", errno.ENOSPC), ("pwritev", errno.EDQUOT)],
)
def test_an_error_names_operation_path_offset_length_and_errno(
    engine: Engine, file: SwapFile, system: FaultySystemCalls, call: str, code: int
) -> None:
    system.always(call, code)
    start = start_read if call == "preadv" else start_write
    done = []
    request = start(engine, file, 8192, AlignedBuffer(BLOCK).view, on_done=done.append)
    with pytest.raises(SwapIOError) as caught:
        request.wait(30)
    error = caught.value
    assert error.operation == request.operation == ("read" if call == "preadv" else "write")
    assert (error.path, error.offset, error.length, error.errno) == (file.path, 8192, BLOCK, code)
    assert all(word in str(error) for word in (file.path, "8192", str(BLOCK), errno.errorcode[code]))
    assert done == [request]
    with pytest.raises(SwapIOError):  # and again for whoever else waits
        request.wait()


def test_after_an_error_others_go_on(engine: Engine, file: SwapFile, system: FaultySystemCalls) -> None:
    system.inject("pwritev", errno.EIO)
    with pytest.raises(SwapIOError):
        start_write(engine, file, 4096, filled().view).wait(30)
    round_trip(engine, file)
    statistics = engine.statistics()
    assert statistics.failed_requests == 1
    (device,) = statistics.devices
    assert device.failed_blocks == 1
    assert device.bytes_read == NBYTES


def test_the_end_of_the_file_is_an_error(engine: Engine, file: SwapFile) -> None:
    os.truncate(file.path, 4096 + BLOCK + 100)
    with pytest.raises(SwapIOError, match="unexpected end of file"):
        start_read(engine, file, 4096, AlignedBuffer(NBYTES).view).wait(30)


def test_writes_that_move_nothing_end_in_an_error(engine: Engine, file: SwapFile, system: FaultySystemCalls) -> None:
    system.always("pwritev", Short(100))
    with pytest.raises(SwapIOError, match="takes no more"):
        start_write(engine, file, 4096, AlignedBuffer(BLOCK).view).wait(30)


def test_a_closed_file_is_a_clear_error(engine: Engine, file: SwapFile) -> None:
    file.close()
    with pytest.raises(swap.SwapClosedError, match="is closed"):
        start_read(engine, file, 4096, AlignedBuffer(BLOCK).view).wait(30)


def test_a_misplaced_request_is_refused_at_once(engine: Engine, file: SwapFile) -> None:
    with pytest.raises(ValueError, match="multiples of 4096"):
        start_read(engine, file, 100, AlignedBuffer(BLOCK).view)
    with pytest.raises(ValueError, match="as long as the spans"):
        engine.start(swap.Operation.READ, [(file, 0, 4096)], AlignedBuffer(8192).view, priority=swap.Priority.DEMAND)


@pytest.mark.parametrize("used", [False, True])
def test_a_request_that_is_refused_lets_go_of_its_buffer_at_once(engine: Engine, file: SwapFile, *, used: bool) -> None:
    if used:  # then the engine knows the device
        round_trip(engine, file)
    engine.close()
    buffer = AlignedBuffer(BLOCK)
    collect()
    gc.disable()
    try:
        with pytest.raises(swap.SwapClosedError):
            start_read(engine, file, 4096, buffer.view, checksum=True)
        buffer.close()
    finally:
        gc.enable()


def test_an_on_done_that_raises_is_not_lost(kind: str, file: SwapFile) -> None:
    engine = Engine(EngineSettings(backend=kind, block_size=BLOCK))

    def broken(_: swap.Request) -> None:
        raise ZeroDivisionError("mine")

    request = start_read(engine, file, 4096, AlignedBuffer(BLOCK).view, on_done=broken)
    while request.error is None:  # set after `done`, by whoever ran the callback
        time.sleep(0.001)
    with pytest.raises(ZeroDivisionError):
        request.wait(30)
    round_trip(engine, file)  # the worker survived
    with pytest.raises(swap.SwapError, match="on_done callback raised ZeroDivisionError"):
        engine.close()


@pytest.mark.parametrize("kind", ["threads", "inline", "aiofiles"])
def test_an_error_that_no_system_call_raises_ends_the_request_and_not_the_worker(
    kind: str, file: SwapFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> int:
        raise MemoryError("no room to move bytes")

    with Engine(EngineSettings(backend=kind, block_size=BLOCK, queue_depth=1)) as engine:
        round_trip(engine, file)
        with monkeypatch.context() as patched:
            patched.setattr("swap.transfer.Progress.view", property(broken))
            with pytest.raises(SwapIOError, match=r"write of 65536 bytes at offset 4096 .* MemoryError: no room"):
                start_write(engine, file, 4096, AlignedBuffer(BLOCK).view).wait(30)
        with monkeypatch.context() as patched:
            patched.setattr("swap.requests.checksum", broken)
            with pytest.raises(MemoryError):
                start_write(engine, file, 4096, AlignedBuffer(BLOCK).view, checksum=True).wait(30)
        round_trip(engine, file)
        assert engine.statistics().failed_requests == 2


@pytest.mark.parametrize("allowed", [0, 1])
def test_where_no_more_threads_can_be_started_fewer_do_and_closing_goes_well(
    file: SwapFile, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    engine = Engine(EngineSettings(block_size=BLOCK, queue_depth=4, stall_seconds=60))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", limited)
        if not allowed:
            with pytest.raises(swap.SwapError, match="no thread can be started"):
                start_read(engine, file, 4096, AlignedBuffer(BLOCK).view)
        else:
            round_trip(engine, file)
    round_trip(engine, file)
    engine.close()
    assert not any(thread.is_alive() for thread in started)


def test_an_interrupt_in_a_transfer_without_threads_ends_the_request(file: SwapFile) -> None:
    class Interrupted(swap.SystemCalls):
        def preadv(self, fd: int, view: memoryview, offset: int) -> int:
            raise KeyboardInterrupt

    ended: list[swap.Request] = []
    engine = Engine(EngineSettings(backend="inline", block_size=BLOCK), backend=InlineBackend(Interrupted()))
    with pytest.raises(KeyboardInterrupt):
        start_read(engine, file, 4096, AlignedBuffer(NBYTES).view, on_done=ended.append)
    (request,) = ended
    with pytest.raises(SwapIOError, match="ended by KeyboardInterrupt"):
        request.wait()
    engine.close()


def test_on_done_may_start_the_next_request(engine: Engine, file: SwapFile) -> None:
    buffer = AlignedBuffer(BLOCK)
    finished = threading.Event()
    left = [50]

    def again(_: swap.Request) -> None:
        left[0] -= 1
        if left[0]:
            start_read(engine, file, 4096, buffer.view, on_done=again)
        else:
            finished.set()

    start_read(engine, file, 4096, buffer.view, on_done=again)
    assert finished.wait(30)


def test_the_buffer_is_held_until_done_and_no_longer(file: SwapFile) -> None:
    backend = StepBackend()
    engine = Engine(EngineSettings(block_size=BLOCK, queue_depth=1), backend=backend)
    buffer = AlignedBuffer(NBYTES)
    request = start_write(engine, file, 4096, buffer.view)
    with pytest.raises(BufferError):
        buffer.close()
    backend.run()
    assert request.done
    buffer.close()
    engine.close()


def test_a_request_that_is_done_leaves_nothing_to_the_cycle_collector(engine: Engine, file: SwapFile) -> None:
    """Programs switch it off, so as not to be stopped by it."""
    buffer = filled()
    collect()
    gc.disable()
    try:
        for start in (start_write, start_read):
            request = start(engine, file, 4096, buffer.view, checksum=True, priority=Priority.WRITE_BACK)
            request.wait()
            request.promote(Priority.DEMAND)  # too late, and harmless
            assert str(file.path) in str(request)
            del request
        deadline = time.monotonic() + 30
        # Not `isinstance`, which asks an object for its class, also a proxy of one that is gone.
        while any(type(found) is swap.Request for found in gc.get_objects()):
            assert time.monotonic() < deadline
            time.sleep(0.01)  # the worker drops its last block just after completing it
    finally:
        gc.enable()
    buffer.close()


@pytest.mark.parametrize("code", [0, errno.EIO])
def test_workers_let_go_of_the_buffer(engine: Engine, file: SwapFile, system: FaultySystemCalls, code: int) -> None:
    class Watched(AlignedBuffer):
        pass

    buffer = Watched(NBYTES)
    alive = weakref.ref(buffer)
    if code:
        system.inject("pwritev", code)
    request = start_write(engine, file, 4096, buffer.view)
    deadline = time.monotonic() + 30
    while not request.done and time.monotonic() < deadline:
        time.sleep(0.001)
    assert (request.error is None) == (code == 0)
    while True:  # the worker drops its last block just after completing it
        try:
            buffer.close()
            break
        except BufferError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)
    del buffer
    collect()
    assert alive() is None


def stalled(file: SwapFile, stall_seconds: float) -> tuple[Engine, Stall, swap.Request]:
    system = FaultySystemCalls()
    stall = Stall()
    system.inject("preadv", stall)
    engine = Engine(
        EngineSettings(block_size=BLOCK, queue_depth=2, stall_seconds=stall_seconds), backend=ThreadsBackend(system)
    )
    request = start_read(engine, file, 4096, AlignedBuffer(BLOCK).view)
    assert stall.entered.wait(30)
    return engine, stall, request


def test_waiting_with_a_timeout_ends_and_the_request_may_still_succeed(file: SwapFile) -> None:
    engine, stall, request = stalled(file, 60)
    with pytest.raises(swap.SwapTimeoutError, match=r"read of 65536 bytes at offset 4096 in .* not done in time"):
        request.wait(0.02)
    with pytest.raises(TimeoutError):
        request.wait(0)
    stall.release()
    request.wait(30)
    engine.close()


def test_a_stalled_device_raises_in_the_waiter(file: SwapFile) -> None:
    engine, stall, request = stalled(file, 1.0)  # enough for what comes first, also on a slow drive
    # Other blocks going through do not hide that this one is stuck.
    for _ in range(3):
        start_read(engine, file, 4096, AlignedBuffer(BLOCK).view).wait(30)
    with pytest.raises(swap.SwapTimeoutError, match=r"read of 65536 bytes at offset 4096 in .* is stalled"):
        request.wait()
    stall.release()
    while not request.done:  # until then it still counts as stalled
        time.sleep(0.001)
    request.wait()
    engine.close()


def test_a_queued_request_behind_a_dead_device_is_stalled_too() -> None:
    engine = Engine(EngineSettings(block_size=BLOCK, stall_seconds=0.05), backend=StepBackend())
    request = start_read(engine, PaperFile(), 0, AlignedBuffer(BLOCK).view)
    with pytest.raises(swap.SwapTimeoutError, match="stalled"):
        request.wait()
    engine.close()


def test_a_device_that_is_through_does_not_count_as_stalled_while_the_other_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("swap.engine.time", clock)
    backend = StepBackend()
    engine = Engine(EngineSettings(block_size=BLOCK, queue_depth=1, stall_seconds=10), backend=backend)
    fast, slow = PaperFile("fast", 1), PaperFile("slow", 2)
    spans = [(fast, 0, BLOCK), (slow, 0, 3 * BLOCK)]
    request = engine.start(Operation.WRITE, spans, AlignedBuffer(4 * BLOCK).view, priority=Priority.DEMAND)
    for block in backend.issue():
        if block.file is fast:
            backend.finish(block)
    for _ in range(3):
        backend.issue()
        clock.now += 9
        assert request.stalled() is None
        backend.finish()
    request.wait()

    behind = engine.start(Operation.WRITE, spans, AlignedBuffer(4 * BLOCK).view, priority=Priority.DEMAND)
    clock.now += 11
    assert behind.stalled() is None, "this process may have been stopped all the while"
    clock.now += 3
    assert behind.stalled() is not None
    engine.close()


def test_closing_with_a_stalled_device_does_not_hang(file: SwapFile) -> None:
    engine, stall, request = stalled(file, 0.1)
    with pytest.raises(swap.SwapTimeoutError, match=r"still in flight.*offset 4096"):
        engine.close()
    assert request.done
    with pytest.raises(swap.SwapTimeoutError, match="must not be reused"):
        request.wait()
    (device,) = engine.statistics().devices
    assert 0.1 <= device.seconds_busy < 60
    assert (device.blocks_in_flight, device.blocks, engine.statistics().failed_requests) == (0, 0, 1)
    stall.release()
    engine.close()


def test_closing_fails_what_is_queued_and_finishes_what_is_in_flight() -> None:
    backend = StepBackend()
    engine = Engine(EngineSettings(block_size=BLOCK, queue_depth=1), backend=backend)
    done = []
    requests = [
        start_read(engine, PaperFile(), 0, AlignedBuffer(blocks * BLOCK).view, on_done=done.append) for blocks in (1, 2)
    ]
    backend.issue()
    engine.close()
    requests[0].wait()
    with pytest.raises(swap.SwapClosedError, match=r"read of 131072 bytes .* still queued"):
        requests[1].wait()
    assert sorted(map(id, done)) == sorted(map(id, requests))
    engine.close()
    with pytest.raises(swap.SwapClosedError, match="engine is closed"):
        start_read(engine, PaperFile(), 0, AlignedBuffer(BLOCK).view)


def test_closing_while_another_thread_brings_a_new_device_fails_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    attached, waiting, may_attach = threading.Event(), threading.Event(), threading.Event()

    class Backend(StepBackend):
        def attach(self, source: BlockSource, queue: DeviceQueue) -> None:
            super().attach(source, queue)
            if queue.device == 2:
                attached.set()

    class Gate:
        def __enter__(self) -> None:
            waiting.set()
            assert may_attach.wait(30)

        def __exit__(self, *_: object) -> None:
            pass

    def attach_meanwhile() -> None:
        may_attach.set()
        attached.wait(0.1)  # as it should be, only when this is over

    engine = Engine(EngineSettings(block_size=BLOCK), backend=Backend())
    request = start_read(engine, PaperFile("one", 1), 0, AlignedBuffer(BLOCK).view)
    monkeypatch.setattr(engine, "_attaching", Gate())
    monkeypatch.setattr(engine._available[1], "notify_all", attach_meanwhile)
    late: list[BaseException] = []

    def start() -> None:
        try:
            start_read(engine, PaperFile("two", 2), 0, AlignedBuffer(BLOCK).view)
        except swap.SwapClosedError as error:
            late.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    assert waiting.wait(30)
    engine.close()
    thread.join(30)
    assert len(late) == 1
    with pytest.raises(swap.SwapClosedError, match="still queued"):
        request.wait(0)


def test_an_on_done_may_close_the_engine(kind: str, file: SwapFile) -> None:
    engine = Engine(EngineSettings(backend=kind, block_size=BLOCK))
    closed = threading.Event()

    def close(_: swap.Request) -> None:
        engine.close()
        closed.set()

    start_read(engine, file, 4096, AlignedBuffer(BLOCK).view, on_done=close)
    assert closed.wait(30)


@pytest.mark.parametrize("held", [False, True])
def test_a_forked_child_is_told_and_does_no_harm(tmp_path: Path, *, held: bool) -> None:
    space = swap.SwapSpace.open([tmp_path], name="r0", nbytes=NBYTES)
    source, buffer = filled(), AlignedBuffer(NBYTES)
    extent = space.allocate(NBYTES)
    space.start_write(extent, source.view).wait(30)
    locks = [space.engine._lock, space._lock] if held else []  # as another thread may have at the instant of the fork
    for lock in locks:
        lock.acquire()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        verbs = [
            lambda: start_read(space.engine, PaperFile(), 4096, buffer.view),
            lambda: space.start_read(extent, buffer.view),
            lambda: space.allocate(NBYTES),
            lambda: space.free(extent),
            lambda: space.claim(extent),
            space.make_durable,
            space.statistics,
        ]
        told = 0
        for verb in verbs:
            try:
                verb()
            except swap.SwapError as error:
                told += "forked child" in str(error)
        space.engine.close()
        space.close(remove=True)
        os._exit(0 if told == len(verbs) else 1)
    assert os.waitpid(child, 0)[1] == 0
    for lock in locks:
        lock.release()
    assert (tmp_path / "r0.swapfile").exists()
    space.start_read(extent, buffer.view).wait(30)
    assert buffer.view == source.view
    space.close()
