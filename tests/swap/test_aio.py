"""What the aiofiles backend does about faults of its own."""

import asyncio
import errno
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from aiofiles.threadpool.binary import AsyncFileIO
from doubles import start_read, start_write

import swap
from swap import AlignedBuffer, Engine, EngineSettings, SwapFile
from swap.backends.aio import AioBackend

BLOCK = 64 << 10


def test_the_end_of_the_file_is_an_error_and_others_go_on(tmp_path: Path) -> None:
    file = SwapFile.open(tmp_path, name="r0", nbytes=1 << 20)
    with Engine(EngineSettings(backend="aiofiles", block_size=BLOCK)) as engine:
        os.truncate(file.path, 4096 + BLOCK + 100)
        with pytest.raises(swap.SwapIOError, match="unexpected end of file") as caught:
            start_read(engine, file, 4096, AlignedBuffer(2 * BLOCK).view).wait(30)
        assert (caught.value.operation, caught.value.path) == ("read", file.path)
        start_read(engine, file, 4096, AlignedBuffer(BLOCK).view).wait(30)
        file.close()
        with pytest.raises(swap.SwapClosedError, match="is closed"):
            start_read(engine, file, 4096, AlignedBuffer(BLOCK).view).wait(30)


def test_what_the_system_refuses_is_the_error_of_that_write_and_others_go_on(tmp_path: Path) -> None:
    file = SwapFile.open(tmp_path, name="r0", nbytes=1 << 20)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Engine(EngineSettings(backend="aiofiles", block_size=BLOCK)) as engine, AlignedBuffer(2 * BLOCK) as buffer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + BLOCK, limit[1]))
        try:
            refused = start_write(engine, file, 4096, buffer.view)
            with pytest.raises(swap.SwapIOError, match="EFBIG") as caught:
                refused.wait(30)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert (caught.value.offset, caught.value.length) == (4096 + BLOCK, BLOCK)
        start_write(engine, file, 4096, buffer.view).wait(30)
    file.close()


def test_files_of_one_name_that_have_lost_it_are_told_apart(tmp_path: Path) -> None:
    files = []
    for _ in range(2):
        files.append(SwapFile.open(tmp_path, name="r0", nbytes=1 << 20))
        files[-1].forget_name()
    written = [AlignedBuffer(BLOCK) for _ in files]
    with Engine(EngineSettings(backend="aiofiles", block_size=BLOCK, queue_depth=1)) as engine:
        for file, buffer in zip(files, written, strict=True):
            buffer.view[:] = os.urandom(BLOCK)
            start_write(engine, file, 4096, buffer.view).wait(30)
        for file, buffer in zip(files, written, strict=True):
            found = AlignedBuffer(BLOCK)
            start_read(engine, file, 4096, found.view).wait(30)
            assert found.view == buffer.view
    for file in files:
        file.close()


def test_closing_lets_blocks_in_flight_finish_or_fails_them(tmp_path: Path) -> None:
    file = SwapFile.open(tmp_path, name="r0", nbytes=16 << 20)
    engine = Engine(EngineSettings(backend="aiofiles", block_size=BLOCK, queue_depth=2))
    done: list[swap.Request] = []
    buffers = [AlignedBuffer(1 << 20) for _ in range(8)]
    requests = [start_write(engine, file, 4096, buffer.view, on_done=done.append) for buffer in buffers]
    engine.close()
    assert len(done) == len(requests)
    for request in requests:
        assert request.error is None or isinstance(request.error, swap.SwapClosedError)
    for buffer in buffers:
        buffer.close()
    file.close()


def test_a_file_that_cannot_be_closed_leaves_the_others_to_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    both, failed = asyncio.Event(), asyncio.Event()
    write = AsyncFileIO.write

    async def late(handle: AsyncFileIO, view: memoryview) -> int:
        written.append(view.nbytes)
        if len(written) == 2:
            both.set()
        await both.wait()  # both coroutines have a file open
        if len(written) == 3:
            await failed.wait()
            await asyncio.sleep(0.01)
        return await write(handle, view)

    async def refuse(handle: AsyncFileIO) -> None:
        handle._file.close()
        failed.set()
        raise OSError(errno.EIO, "as of a file system over a network")

    monkeypatch.setattr(AsyncFileIO, "write", late)
    monkeypatch.setattr(AsyncFileIO, "close", refuse)
    file = SwapFile.open(tmp_path, name="r0", nbytes=1 << 20)
    engine = Engine(EngineSettings(backend="aiofiles", block_size=BLOCK, queue_depth=2))
    start_write(engine, file, 4096, AlignedBuffer(2 * BLOCK).view).wait(30)
    request = start_write(engine, file, 4096, AlignedBuffer(BLOCK).view)
    while len(written) < 3:
        time.sleep(0.001)
    engine.close()
    assert request.error is None
    file.close()


@pytest.mark.parametrize("used", [True, False])
def test_whoever_starts_while_another_thread_closes_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, used: bool
) -> None:
    """`used`: whether the device was known before."""
    file = SwapFile.open(tmp_path, name="r0", nbytes=1 << 20)
    backend = AioBackend()
    engine = Engine(EngineSettings(backend="aiofiles", block_size=BLOCK), backend=backend)
    if used:
        start_read(engine, file, 4096, AlignedBuffer(BLOCK).view).wait(30)
    here, tell = threading.current_thread(), backend._loop.call_soon_threadsafe

    def tell_late(*arguments: Any, **settings: Any) -> Any:
        if threading.current_thread() is here:
            closing = threading.Thread(target=engine.close)
            closing.start()
            closing.join(30)
        return tell(*arguments, **settings)

    monkeypatch.setattr(backend._loop, "call_soon_threadsafe", tell_late)
    with pytest.raises(swap.SwapClosedError):
        start_read(engine, file, 4096, AlignedBuffer(BLOCK).view).wait(30)
    file.close()


def test_where_closing_gets_no_thread_it_closes_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.enumerate()
    file = SwapFile.open(tmp_path, name="r0", nbytes=1 << 20)
    engine = Engine(EngineSettings(backend="aiofiles", block_size=BLOCK))
    start_write(engine, file, 4096, AlignedBuffer(BLOCK).view).wait(30)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", a_thread_too_many)
        engine.close()
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []
    file.close()


@pytest.mark.parametrize("refused", [0, 1])
def test_where_few_threads_can_be_started_those_that_run_move_all_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """One thread, the first `refused` times none; what was refused then opens no file later that nobody closes."""
    refusals: list[threading.Thread] = []
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("swap-aio_"):
            if started or len(refusals) < refused:
                refusals.append(thread)
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    file = SwapFile.open(tmp_path, name="r0", nbytes=1 << 20)
    written, found = AlignedBuffer(8 * BLOCK), AlignedBuffer(8 * BLOCK)
    written.view[:] = os.urandom(8 * BLOCK)
    monkeypatch.setattr(threading.Thread, "start", limited)
    with Engine(EngineSettings(backend="aiofiles", block_size=BLOCK, queue_depth=4)) as engine:
        start_write(engine, file, 4096, written.view).wait(30)
        start_read(engine, file, 4096, found.view).wait(30)
    assert found.view == written.view
    assert len(started) == 1
    file.close()


def a_thread_too_many(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
