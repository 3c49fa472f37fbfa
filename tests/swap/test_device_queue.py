"""Order: priorities, promotion, the reserved share, depth and bytes in flight; on a device driven by hand."""

from itertools import count
from types import SimpleNamespace

import pytest
from doubles import PaperFile, StepBackend, start_read, start_write
from hypothesis import given
from hypothesis import strategies as st

import swap
from swap import AlignedBuffer, Engine, EngineSettings, Operation, Priority
from swap.device_queue import DeviceQueue, SharePolicy
from swap.requests import cut

BLOCK = 4096


def engine_by_hand(depth: int = 4, max_bytes: int = 1 << 30) -> tuple[Engine, StepBackend]:
    backend = StepBackend()
    settings = EngineSettings(block_size=BLOCK, queue_depth=depth, max_bytes_in_flight=max_bytes)
    return Engine(settings, backend=backend), backend


def buffer(blocks: int) -> memoryview:
    return AlignedBuffer(blocks * BLOCK).view


def offsets(blocks: list) -> list[int]:
    return [block.offset // BLOCK for block in blocks]


def test_demand_before_read_ahead_before_write_back() -> None:
    engine, backend = engine_by_hand(depth=1)
    file = PaperFile()
    start_write(engine, file, 0, buffer(1))
    start_read(engine, file, BLOCK, buffer(1), priority=Priority.READ_AHEAD)
    start_read(engine, file, 2 * BLOCK, buffer(1), priority=Priority.DEMAND)
    start_read(engine, file, 3 * BLOCK, buffer(1), priority=Priority.DEMAND)
    assert offsets(backend.run()) == [2, 3, 1, 0]
    engine.close()


def test_promoted_blocks_jump_the_queue() -> None:
    engine, backend = engine_by_hand(depth=1)
    file = PaperFile()
    start_read(engine, file, 0, buffer(2), priority=Priority.READ_AHEAD)
    later = start_read(engine, file, 10 * BLOCK, buffer(3), priority=Priority.READ_AHEAD)
    backend.issue(1)
    later.promote(Priority.DEMAND)
    later.promote(Priority.WRITE_BACK)  # never demotes
    assert later.priority is Priority.DEMAND
    backend.finish()
    assert offsets(backend.run()) == [10, 11, 12, 1]
    later.promote(Priority.DEMAND)
    later.wait()
    engine.close()


def test_promoting_a_request_half_issued_moves_the_rest() -> None:
    engine, backend = engine_by_hand(depth=1)
    file = PaperFile()
    request = start_read(engine, file, 0, buffer(3), priority=Priority.READ_AHEAD)
    backend.issue(1)
    start_read(engine, file, 10 * BLOCK, buffer(1), priority=Priority.DEMAND)
    request.promote(Priority.DEMAND)
    backend.finish()
    assert offsets(backend.run()) == [10, 1, 2]
    assert request.done
    engine.close()


def test_a_device_that_had_nothing_to_do_is_not_taken_for_a_silent_one() -> None:
    """Its patience begins anew with the first part that is queued, and with none behind that."""
    queue = DeviceQueue(0, block_size=BLOCK, depth=1, max_bytes_in_flight=BLOCK)
    numbers = count()

    def push(now: float) -> float:
        (part,) = cut([(PaperFile(), 0, BLOCK)], buffer(1))
        part.request = SimpleNamespace(operation=Operation.READ, priority=Priority.DEMAND)
        queue.push(part, numbers, now)
        return queue.progressed

    assert [push(1000.0), push(1001.0)] == [1000.0, 1000.0]
    block = queue.take(1002.0)
    assert push(1003.0) == 1000.0
    queue.finish(block, 1004.0, failed=False)
    assert push(1005.0) == 1004.0
    while (block := queue.take(1006.0)) is not None:
        queue.finish(block, 1006.0, failed=False)
    assert push(5000.0) == 5000.0


def test_writes_keep_a_share_of_the_depth_under_reads() -> None:
    engine, backend = engine_by_hand(depth=4)
    file = PaperFile()
    start_read(engine, file, 0, buffer(20))
    start_write(engine, file, 100 * BLOCK, buffer(5))
    for _ in range(5):
        backend.issue()
        kinds = [block.operation for block in backend.in_flight]
        assert kinds.count(Operation.READ) == 3
        assert kinds.count(Operation.WRITE) == 1
        for block in list(backend.in_flight):
            backend.finish(block)
    engine.close()


def test_waiting_reads_keep_most_of_the_depth_under_writes() -> None:
    engine, backend = engine_by_hand(depth=4)
    file = PaperFile()
    start_write(engine, file, 100 * BLOCK, buffer(20))
    assert len(backend.issue()) == 4  # nothing else to do: writes have it all
    start_read(engine, file, 0, buffer(20))
    for _ in range(8):
        backend.finish()
        backend.issue()
    assert sum(block.operation is Operation.READ for block in backend.in_flight) == 3
    engine.close()


def test_at_depth_one_the_other_operation_gets_every_fourth_block() -> None:
    engine, backend = engine_by_hand(depth=1)
    file = PaperFile()
    start_read(engine, file, 0, buffer(9))
    start_write(engine, file, 100 * BLOCK, buffer(2))
    assert offsets(backend.run()) == [0, 1, 2, 100, 3, 4, 5, 101, 6, 7, 8]
    engine.close()


def test_bytes_in_flight_hold_blocks_back() -> None:
    engine, backend = engine_by_hand(depth=8, max_bytes=2 * BLOCK)
    request = start_read(engine, PaperFile(), 0, buffer(5))
    assert len(backend.issue()) == 2
    assert engine.statistics().devices[0].blocks_in_flight == 2
    backend.finish()
    assert len(backend.issue()) == 1
    while backend.in_flight:
        backend.finish()
        backend.issue()
    request.wait()
    assert engine.statistics().devices[0].high_water_bytes_in_flight == 2 * BLOCK
    engine.close()


def test_a_block_larger_than_the_limit_goes_alone() -> None:
    engine, backend = engine_by_hand(depth=8, max_bytes=1)
    start_read(engine, PaperFile(), 0, buffer(3))
    assert len(backend.issue()) == 1
    engine.close()


def test_each_device_has_its_own_depth() -> None:
    engine, backend = engine_by_hand(depth=2)
    for device in (1, 2):
        start_read(engine, PaperFile(f"paper{device}", device), 0, buffer(5))
    assert len(backend.issue()) == 4
    engine.close()


def test_a_request_may_lie_in_several_files() -> None:
    engine, backend = engine_by_hand(depth=2)
    files = [PaperFile(f"paper{device}", device) for device in (1, 2)]
    source, target = buffer(5), buffer(5)
    source[:] = bytes(range(256)) * (5 * BLOCK // 256)
    spans = [(files[0], 0, 2 * BLOCK), (files[1], 7 * BLOCK, 3 * BLOCK)]
    done = []
    write = engine.start(Operation.WRITE, spans, source, priority=Priority.DEMAND, on_done=done.append)
    backend.run()
    read = engine.start(Operation.READ, spans, target, priority=Priority.DEMAND)
    backend.run()
    write.wait()
    read.wait()
    assert done == [write]
    assert source == target
    engine.close()


def test_an_error_drops_the_rest_and_waits_for_what_is_in_flight() -> None:
    engine, backend = engine_by_hand(depth=2)
    done = []
    request = start_read(engine, PaperFile(), 0, buffer(9), on_done=done.append)
    first, second = backend.issue()
    backend.finish(first, swap.SwapIOError("read", "paper", offset=0, length=BLOCK, errno=5))
    assert not request.done  # the device still writes into the buffer
    assert backend.issue() == []
    backend.finish(second)
    assert done == [request]
    with pytest.raises(swap.SwapIOError, match="EIO"):
        request.wait()
    assert engine.statistics().failed_requests == 1
    engine.close()


@pytest.mark.parametrize("depth", range(1, 65))
def test_the_share_leaves_both_something(depth: int) -> None:
    policy = SharePolicy.for_depth(depth)
    assert (depth > 1) <= policy.reserve <= depth // 2
    assert policy.prefers_front(0, 0)
    assert not policy.prefers_front(depth, depth + 3)


@given(st.integers(1, 6), st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(1, 5)), max_size=20))
def test_nothing_starves_and_depth_is_kept(depth: int, work: list[tuple[bool, int, int]]) -> None:
    engine, backend = engine_by_hand(depth=depth)
    requests = []
    for read, priority, blocks in work:
        start = start_read if read else start_write
        requests.append(start(engine, PaperFile(), 0, buffer(blocks), priority=Priority(priority)))
    while backend.issue() or backend.in_flight:
        assert len(backend.in_flight) <= depth
        backend.finish()
    assert all(request.done and request.error is None for request in requests)
    engine.close()


@pytest.mark.parametrize(("depth", "max_bytes", "served"), [(32, 8 * BLOCK, 32), (8, 4 * BLOCK, 8), (8, 1 << 30, 4)])
def test_writes_are_served_where_fewer_blocks_than_the_depth_can_be_with_the_device(
    depth: int, max_bytes: int, served: int
) -> None:
    """For lack of bytes in flight, or of threads: reads that always wait must not have all there is."""
    engine, backend = engine_by_hand(depth, max_bytes)
    file, block = PaperFile(), buffer(1)
    start_write(engine, file, 0, buffer(2))
    for _ in range(2 * depth):
        start_read(engine, file, BLOCK, block)
    backend.served[0][1].limit_depth(served)
    done = []
    for _ in range(100):
        backend.issue()
        done.append(backend.finish())
        start_read(engine, file, BLOCK, block)
    assert [each.operation for each in done].count(Operation.WRITE) == 2
    engine.close()


def test_who_was_refused_for_want_of_bytes_is_called_when_a_block_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, backend = engine_by_hand(max_bytes=BLOCK)
    called: list[object] = []
    monkeypatch.setattr(backend, "wake", called.append)
    start_read(engine, PaperFile(), 0, buffer(3))
    ((_, queue),) = backend.served
    monkeypatch.setattr(engine._available[queue.device], "notify_all", lambda: called.append("those who wait in take"))
    called.clear()
    assert len(backend.issue()) == 1, "and the next one was refused"
    backend.finish()
    assert called == ["those who wait in take", queue]
    backend.issue(1)
    backend.finish()
    assert len(called) == 2, "nobody was refused since"
    backend.run()
    engine.close()


@pytest.mark.parametrize(
    ("depth", "left"),
    [
        (1, 29.0),  # of the device that still has some of it, and has shown progress at 20
        (2, 9.0),  # of the block that it has had since 0, whatever progress it has shown with others
    ],
)
def test_how_long_a_request_may_still_take(depth: int, left: float, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 0.0
    monkeypatch.setattr("swap.engine.time", SimpleNamespace(monotonic=lambda: moment))
    backend = StepBackend()
    engine = Engine(EngineSettings(block_size=BLOCK, queue_depth=depth, stall_seconds=30.0), backend=backend)
    spans = [(PaperFile(device=1), 0, BLOCK), (PaperFile(device=2), 0, 2 * BLOCK)]
    request = engine.start(Operation.READ, spans, buffer(3), priority=Priority.DEMAND)
    through, first, *_ = backend.issue()
    moment = 1.0
    backend.finish(through)
    moment = 20.0
    backend.finish(first)
    backend.issue()
    moment = 21.0
    assert engine.seconds_until_stall(request) == left
    backend.run()
    engine.close()


def test_an_error_that_is_raised_again_does_not_keep_who_met_it_before() -> None:
    engine, backend = engine_by_hand()
    request = start_read(engine, PaperFile(), 0, buffer(1))
    backend.issue()
    backend.finish(error=swap.SwapIOError("read", "paper", errno=5))
    depths = []
    for _ in range(2):
        with pytest.raises(swap.SwapIOError) as caught:
            request.wait()
        depths.append(len(caught.traceback))
    assert depths[0] == depths[1]
    engine.close()
