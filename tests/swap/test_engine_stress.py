"""Many requests from many threads, checked against a model; nothing left behind."""

import os
import random
import threading
import time
from pathlib import Path

import pytest
from doubles_combinations import number_of

import swap
from swap import AlignedBuffer, EngineSettings, Priority, SwapSpace

KIB = 1 << 10


def user(space: SwapSpace, seed: int, errors: list[BaseException]) -> None:
    """Own a few extents; write, read back, promote, free and allocate at random, always knowing what must be there."""
    chance = random.Random(seed)
    model: dict[swap.Extent, int] = {}
    try:
        for step in range(number_of(30, 60)):
            while len(model) < 4:
                model[space.allocate(chance.randrange(1, 80) * 4096)] = -1
            started = []
            for extent in chance.sample(list(model), 3):
                buffer = AlignedBuffer(extent.nbytes)
                stamp = model[extent]
                if stamp < 0 or chance.random() < 0.5:
                    stamp = model[extent] = (seed * 61 + step) % 251
                    buffer.view[:] = bytes([stamp]) * extent.nbytes
                    request = space.start_write(extent, buffer.view, priority=chance.choice(list(Priority)))
                else:
                    request = space.start_read(extent, buffer.view, priority=chance.choice(list(Priority)))
                if chance.random() < 0.3:
                    request.promote(Priority.DEMAND)
                started.append((request, buffer, stamp))
            for request, buffer, stamp in started:
                request.wait(60)
                assert bytes(buffer.view) == bytes([stamp]) * buffer.nbytes
            if chance.random() < 0.3:
                extent = chance.choice(list(model))
                del model[extent]
                space.free(extent)
        for extent in model:
            space.free(extent)
    except BaseException as error:  # noqa: BLE001 - handed to the test
        errors.append(error)


@pytest.mark.parametrize("backend", ["threads", "aiofiles", "inline"])
def test_random_concurrent_requests_match_the_model(tmp_path: Path, backend: str) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    settings = EngineSettings(backend=backend, block_size=64 * KIB, queue_depth=4, max_bytes_in_flight=150 * KIB)
    with SwapSpace.open(directories, name="r0", nbytes=16 << 20, settings=settings) as space:
        errors: list[BaseException] = []
        users = [threading.Thread(target=user, args=(space, seed, errors)) for seed in range(4)]
        for thread in users:
            thread.start()
        for thread in users:
            thread.join()
        assert errors == []
        statistics = space.statistics()
        assert statistics.allocated == 0
        assert [device.blocks_in_flight for device in statistics.engine.devices] == [0]
        assert statistics.engine.failed_requests == 0
        assert statistics.engine.devices[0].high_water_bytes_in_flight <= 150 * KIB
        assert [d.largest_hole for d in statistics.directories] == [d.nbytes for d in statistics.directories]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("backend", ["threads", "aiofiles", "inline"])
def test_many_cycles_leave_no_thread_and_no_descriptor(tmp_path: Path, backend: str) -> None:
    def cycle() -> None:
        settings = EngineSettings(backend=backend, queue_depth=2)
        with (
            AlignedBuffer(4096) as buffer,
            SwapSpace.open([tmp_path], name="r0", nbytes=4096, settings=settings) as space,
        ):
            space.start_write(space.allocate(4096), buffer.view).wait()

    cycle()
    threads, open_files = threading.active_count(), descriptors()
    for _ in range(number_of(40, 100)):
        cycle()
    assert threading.active_count() <= threads
    assert descriptors() <= open_files


def hammer(
    space: SwapSpace, extent: swap.Extent, started: list[swap.Request], done: list[swap.Request], wrong: list[object]
) -> None:
    """Read again and again until the space is closed."""
    buffer = AlignedBuffer(extent.nbytes)
    while True:
        try:
            started.append(space.start_read(extent, buffer.view, on_done=done.append))
            started[-1].wait(30)
        except swap.SwapClosedError:
            return
        except BaseException as error:  # noqa: BLE001 - handed to the test
            wrong.append(error)
            return


@pytest.mark.parametrize("backend", ["threads", "aiofiles", "inline"])
def test_users_race_with_close(tmp_path: Path, backend: str) -> None:
    """Whoever is late gets SwapClosedError; nobody hangs, and every request is completed."""
    settings = EngineSettings(backend=backend, block_size=4096, queue_depth=4)
    for _ in range(10):
        space = SwapSpace.open([tmp_path], name="r0", nbytes=1 << 20, settings=settings)
        extent = space.allocate(256 * KIB)
        started: list[swap.Request] = []
        done: list[swap.Request] = []
        wrong: list[object] = []
        users = [threading.Thread(target=hammer, args=(space, extent, started, done, wrong)) for _ in range(3)]
        for thread in users:
            thread.start()
        while len(done) < 5 and not wrong:
            time.sleep(0.001)
        space.close()
        for thread in users:
            thread.join(30)
            assert not thread.is_alive()
        assert wrong == []
        assert len(done) == len(started)
