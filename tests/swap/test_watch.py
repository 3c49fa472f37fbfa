"""A process that was stopped does not take the pause for a silent drive; a drive that is silent is found out."""

import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swap.patience import PatientSystemCalls
from swap.syscalls import SystemCalls
from swap.watch import Watch, WatchedThread, grace, join

STALL = 10.0  # seconds; its grace is 3

MOVE = """
import pathlib, sys, swap
settings = swap.EngineSettings(stall_seconds=3.0, block_size=1 << 20, queue_depth=2)
with swap.SwapSpace.open([pathlib.Path(sys.argv[1])], name="r0", nbytes=32 << 20, settings=settings) as space:
    buffers = [swap.AlignedBuffer(4 << 20) for _ in range(8)]
    extents = [space.allocate(4 << 20) for _ in buffers]
    print("ready", flush=True)
    for turn in range(int(sys.argv[2])):
        move = space.start_read if turn % 2 else space.start_write
        for request in [move(extent, buffer.view) for extent, buffer in zip(extents, buffers)]:
            request.wait()
        print(turn, flush=True)
"""


def test_a_process_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", MOVE, str(tmp_path), "100000"],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.extend(iter(child.stdout.readline, "")))  # type: ignore[union-attr]
    assert child.stdout.readline() == "ready\n"
    reader.start()
    try:
        for pause in range(2):
            before = len(seen)
            time.sleep(0.1 + 0.017 * pause)
            child.send_signal(signal.SIGSTOP)
            time.sleep(5.0)  # longer than silence may last, and than two looks are apart
            child.send_signal(signal.SIGCONT)
            until = time.monotonic() + 60
            while child.poll() is None and len(seen) < before + 3 and time.monotonic() < until:
                time.sleep(0.01)
            assert child.poll() is None, child.communicate()[1]
            assert len(seen) >= before + 3
    finally:
        child.kill()
        reader.join()
        child.communicate()


@given(st.lists(st.floats(0.0, 30.0), min_size=2, max_size=40))
def test_silence_means_something_only_after_looking_on_end(gaps: list[float]) -> None:
    """Whenever it is believed, looks less than a grace and a second apart have gone on for a grace."""
    watch, now, times = Watch(STALL), 0.0, []
    for gap in gaps:
        now += gap
        times.append(now)
        if watch.look(now) <= 0:
            on_end = [now]
            for later, earlier in pairwise(reversed(times)):
                if later - earlier > grace(STALL) + 1:
                    break
                on_end.append(earlier)
            assert now - on_end[-1] >= grace(STALL) * (1 - 1e-9)


@given(st.floats(0, 1e6), st.floats(0.01, 300))
def test_who_looks_again_when_told_finds_out_at_the_second_look(start: float, stall: float) -> None:
    watch = Watch(stall)
    wait = watch.look(start)
    assert 0 < wait <= min(stall, 3.0) + 1e-6 * (1 + start)
    assert watch.look(start + wait) <= 1e-6 * (1 + start)


def test_a_thread_is_joined_for_its_time_and_the_grace() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, daemon=True)
    thread.start()
    began = time.monotonic()
    join([thread], 0.1)
    assert thread.is_alive()
    assert time.monotonic() - began >= 0.2
    release.set()
    join([thread], 60.0)
    assert not thread.is_alive()


def test_a_call_that_is_answered_in_the_grace_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a call comes behind the one that waits for it, where both were stopped."""
    answers, waits, real = threading.Event(), list[float](), WatchedThread.join

    class Slow(SystemCalls):
        def unlink(self, path: str) -> None:
            assert answers.wait(60)

    def join(thread: WatchedThread, timeout: float) -> None:
        waits.append(timeout)
        if len(waits) == 2:
            answers.set()
            timeout = 60.0  # the answer is given, and may come late on a busy machine
        real(thread, timeout)

    monkeypatch.setattr(WatchedThread, "join", join)
    PatientSystemCalls(Slow(), 0.2).unlink(str(tmp_path / "name"))
    assert len(waits) == 2
    assert max(waits) <= 0.2
