"""The instrument measures what it says, leaves nothing behind, and refuses what it cannot do."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from doubles import FaultySystemCalls, Stall
from doubles_garbage import collect
from doubles_silence import only_what_is_held_is_silent
from hypothesis import given
from hypothesis import strategies as st

from swap import (
    AlignedBuffer,
    Engine,
    EngineSettings,
    SwapError,
    SwapFullError,
    SwapIOError,
    SwapTimeoutError,
    SystemCalls,
)
from swap.bench import (
    PATTERNS,
    Case,
    Ground,
    Measurement,
    Order,
    choose_best,
    make_plan,
    percentile,
    remove_leftovers,
    run_bench,
)
from swap.bench.__main__ import main
from swap.bench.cases import Sample
from swap.bench.load import Load, Series, Target, run_case
from swap.bench.sweep import settled_at
from swap.buffers import address_of
from swap.files import DATA_OFFSET, SwapFile

MIB = 1 << 20
TINY = Order((Path(),), nbytes=4 * MIB, seconds=0.05, block_sizes=(MIB,), queue_depths=(2,))


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_a_thread_too_many_is_an_error_of_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(SwapError, match=r"no thread can be started|short of threads"):
        run_bench(make_plan(replace(TINY, directories=(tmp_path,), backends=("threads",))))
    assert list(tmp_path.iterdir()) == []
    assert not any(thread.is_alive() for thread in started)


# What is decided


@given(st.lists(st.floats(0, 10), min_size=1), st.sampled_from([1.0, 50.0, 99.0, 100.0]))
def test_a_percentile_is_a_value_that_enough_do_not_exceed(values: list[float], percent: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, percent)
    assert found in values
    assert sum(value <= found for value in values) >= len(values) * percent / 100
    assert sum(value < found for value in values) < len(values) * percent / 100


def _measured(bandwidth: float, cores: float, depth: int = 1) -> Measurement:
    return Measurement(Case("read", "threads", MIB, depth, direct=True), Sample(int(bandwidth * 1e6), 1.0, cores))


def test_the_best_is_the_fastest_and_among_equals_the_one_that_costs_least() -> None:
    slow, hungry, frugal = _measured(900, 0.01, 1), _measured(1000, 0.5, 2), _measured(995, 0.1, 3)
    assert choose_best([slow, hungry, frugal]) is frugal
    assert choose_best([slow, hungry]) is hungry
    assert choose_best([_measured(0, 0.0)]) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.lists(st.floats(0, 1), max_size=3)), max_size=5))
def test_slices_of_a_case_add_up(slices: list[tuple[int, int, list[float]]]) -> None:
    total = Sample()
    for nbytes, seconds, latencies in slices:
        total = total.plus(Sample(nbytes, seconds, seconds / 2, tuple(latencies)))
    assert total.nbytes == sum(nbytes for nbytes, _, _ in slices)
    assert len(total.latencies) == sum(len(latencies) for _, _, latencies in slices)
    assert total.cpu_cores == (0.5 if slices else 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backends": ("uring",)}, "backend: expected one of threads, aiofiles, inline, found 'uring'"),
        ({"nbytes": MIB // 2}, "size: expected at least one block"),
        ({"nbytes": MIB}, "block size x queue depth"),
        ({"nbytes": 2 * MIB + 1}, "multiple of 4096"),
        ({"block_sizes": (100,)}, "block size: expected a positive multiple of 4096"),
        ({"queue_depths": (0,)}, "queue depth: expected 1 to 256"),
        ({"seconds": 0.0}, "seconds: expected a positive number"),
        ({"directories": ()}, "directories: expected at least one"),
        ({"nbytes": 1 << 40, "block_sizes": (1 << 30,)}, "bytes in flight"),
        ({"steady_seconds": -1.0}, "steady state"),
        ({"seconds": math.inf}, "seconds: expected a positive number, found inf"),
        ({"steady_seconds": math.inf}, "not without end"),
        ({"directories": (Path(), Path("swap/.."))}, "directories: expected different ones"),
    ],
)
def test_an_order_that_cannot_be_carried_out_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(replace(TINY, **change))


def test_the_plan_covers_settings_patterns_and_paths_and_knows_its_length() -> None:
    plan = make_plan(Order((Path(),), seconds=5.0))
    assert {case.pattern for case in plan.cases} == set(PATTERNS)
    of_read = plan.of_pattern("read")
    assert {case.backend for case in of_read} == {"threads", "aiofiles", "inline"}
    assert {(case.block_size, case.queue_depth) for case in of_read if case.backend == "threads" and case.direct} == {
        (size, depth) for size in (MIB, 4 * MIB, 8 * MIB) for depth in (4, 8, 16)
    }
    assert any(case.backend == "threads" and not case.direct for case in of_read)
    assert 15 < plan.estimate_seconds() < 30
    assert make_plan(replace(plan.order, quick=True)).estimate_seconds() < plan.estimate_seconds()
    small = make_plan(Order((Path(),), nbytes=MIB))
    assert {case.block_size * case.queue_depth for case in small.cases} == {MIB}


def test_steady_state_is_found_where_bandwidth_stops_changing() -> None:
    falling = [9.0, 8.0, 5.0, 3.0, *[2.0, 2.1, 1.9] * 4]
    assert settled_at(Series(2.0, tuple(falling))) == 8.0
    assert settled_at(Series(1.0, (2.0,) * 6)) == 0.0
    assert settled_at(Series(1.0, (1.0, 3.0) * 6)) is None
    assert settled_at(Series(1.0, (2.0,) * 3)) is None


# What is measured


def test_the_report_has_every_figure_and_the_directory_is_empty_again(tmp_path: Path) -> None:
    said: list[str] = []
    order = replace(TINY, directories=(tmp_path,), steady_seconds=0.05, steady_bytes=8 * MIB)
    report = run_bench(make_plan(order), lambda what, _: said.append(what))
    assert list(tmp_path.iterdir()) == []
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    for pattern in PATTERNS:
        best = found[pattern]["best"]
        assert best in found[pattern]["all"]
        assert len(found[pattern]["all"]) == 4
        for one in found[pattern]["all"]:
            assert one["gigabytes_per_second"] == pytest.approx(one["bytes"] / one["seconds"] / 1e9)
            assert one["bytes"] == one["requests"] * MIB > 0
            assert 0 < one["latency_ms"]["p50"] <= one["latency_ms"]["p99"] <= one["latency_ms"]["max"]
            assert one["cpu_cores"] > 0
    (first,) = found["first_write"]
    assert first["first"]["bytes"] == first["overwrite"]["bytes"] == 4 * MIB
    assert found["steady_state"]["bytes"] > 0
    assert any(line.startswith("steady state") for line in said)
    assert len(report.to_rows()) == 1 + 3 * 4
    assert sum(row[0] == "*" for row in report.to_rows()) == 3
    assert any("overwrite" in line for line in report.to_lines())


def test_several_directories_are_measured_alone_and_striped(tmp_path: Path) -> None:
    directories = (tmp_path / "a", tmp_path / "b")
    for directory in directories:
        directory.mkdir()
    report = run_bench(make_plan(replace(TINY, directories=directories, quick=True)))
    assert [device.directory for device in report.devices] == [str(directory) for directory in directories]
    assert set(report.devices[0].found) == set(PATTERNS)
    assert len(report.weights) == 2
    assert [list(directory.iterdir()) for directory in directories] == [[], []]


class _WritesSeen(SystemCalls):
    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        self.calls.append(("read", offset, view.nbytes))
        return super().preadv(fd, view, offset)

    def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
        self.calls.append(("write", offset, view.nbytes))
        return super().pwritev(fd, view, offset)


@pytest.mark.parametrize("backend", ["threads", "inline"])
def test_the_load_visits_the_whole_file_in_blocks_and_mixes_evenly(tmp_path: Path, backend: str) -> None:
    system = _WritesSeen()
    with Ground.open([tmp_path], nbytes=8 * MIB, buffer_nbytes=2 * MIB, system=system) as ground:
        for pattern, expected in (("write", {"write": 8}), ("read", {"read": 8}), ("mixed", {"read": 4, "write": 4})):
            system.calls.clear()
            case = Case(pattern, backend, MIB, 2, direct=ground.direct)  # type: ignore[arg-type]
            sample, _ = run_case(ground, Target((0,), (1.0,)), case, seconds=60.0, nbytes=8 * MIB)
            counts = {name: sum(call[0] == name for call in system.calls) for name in expected}
            assert counts == expected
            assert len(system.calls) == 8
            assert {offset for _, offset, _ in system.calls} == {DATA_OFFSET + n * MIB for n in range(8)}
            assert {nbytes for _, _, nbytes in system.calls} == {MIB}
            assert sample.nbytes == 8 * MIB
            assert len(sample.latencies) == 8


@pytest.mark.parametrize(
    ("call", "passes", "code", "operation"),
    [("open", 4, errno.EMFILE, "open"), ("fdatasync", 0, errno.EIO, "sync")],
)
def test_a_fault_in_the_page_cache_s_view_of_a_file_names_the_file(
    tmp_path: Path, call: str, passes: int, code: int, operation: str
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    system = FaultySystemCalls()
    system.inject(call, *[None] * passes, code)
    with pytest.raises(SwapIOError) as caught:
        with Ground.open([tmp_path], nbytes=MIB, buffer_nbytes=MIB, system=system) as ground:
            ground.settle()
    assert (caught.value.operation, caught.value.errno) == (operation, code)
    assert str(tmp_path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the kernel does not tell")
@pytest.mark.parametrize(("huge_pages", "flag"), [(True, "hg"), (False, "nh")])
def test_the_memory_is_in_the_pages_asked_for(huge_pages: bool, flag: str) -> None:
    with AlignedBuffer(64 * MIB, huge_pages=huge_pages) as buffer:
        maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
        (where,) = [index for index, text in enumerate(maps) if f"{address_of(buffer.view):x}-" in text]
        if huge_pages and not Path("/sys/kernel/mm/transparent_hugepage").exists():
            pytest.skip("the kernel has no huge pages")
        assert flag in maps[where + 1].splitlines()[0].split()


def test_a_striped_request_is_divided_by_the_weights(tmp_path: Path) -> None:
    assert Target((0, 1), (3.0, 1.0)).pieces(8 * MIB) == [8 * MIB, 8 * MIB // 3 // 4096 * 4096]
    assert Target((0,), (5.0,)).pieces(MIB) == [MIB]


def test_the_files_are_its_own_private_and_full_of_noise(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("mine")
    with Ground.open([tmp_path], nbytes=MIB, buffer_nbytes=2 * MIB) as ground:
        (file,) = ground.files
        found = os.fstat(file.fileno())
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_size == MIB + DATA_OFFSET
        assert found.st_nlink == 0
        assert len(set(bytes(ground.buffer.view[:256]))) > 64
    assert [found.name for found in tmp_path.iterdir()] == ["other"]
    assert (tmp_path / "other").read_text() == "mine"


# What goes wrong


def test_a_missing_directory_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "none", tmp_path / "file", tmp_path / "loop"):
        with pytest.raises(SwapIOError, match=r"failed: (No|Too many levels)"):
            run_bench(make_plan(replace(TINY, directories=(path,))))
    assert sorted(found.name for found in tmp_path.iterdir()) == ["file", "loop"]


def test_too_little_room_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    class Small(SystemCalls):
        def free_bytes(self, path: str) -> int:
            return 4 * MIB

        def open(self, path: str, flags: int, mode: int = 0o600) -> int:
            raise AssertionError(path)

    with pytest.raises(SwapFullError, match=f"needs {4 * MIB + DATA_OFFSET} bytes, {4 * MIB} are free"):
        run_bench(make_plan(replace(TINY, directories=(tmp_path,))), system=Small())


def test_a_file_system_that_does_not_say_what_is_free_is_refused(tmp_path: Path) -> None:
    class Silent(SystemCalls):
        def free_bytes(self, path: str) -> int:
            raise OSError("of a file system in user space, without a number")

    with pytest.raises(SwapIOError, match="EIO"):
        run_bench(make_plan(replace(TINY, directories=(tmp_path,))), system=Silent())


@pytest.mark.parametrize("backend", ["threads", "inline"])
def test_a_failing_drive_ends_the_measurement_with_its_error_and_no_file(tmp_path: Path, backend: str) -> None:
    system = FaultySystemCalls()
    order = replace(TINY, directories=(tmp_path,), backends=(backend,))
    with pytest.raises(SwapIOError, match="EIO"):
        run_bench(
            make_plan(order), lambda what, _: system.always("preadv", 5 if "read" in what else None), system=system
        )
    assert list(tmp_path.iterdir()) == []


def test_a_drive_that_does_not_answer_when_the_files_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, stall = FaultySystemCalls(), Stall()
    only_what_is_held_is_silent(monkeypatch, stall.entered.is_set)
    system.inject("open", stall)
    with pytest.raises(SwapIOError, match="ETIMEDOUT"):
        Ground.open([tmp_path], nbytes=MIB, buffer_nbytes=MIB, system=system, stall_seconds=0.1)
    stall.release()


def test_leftovers_on_a_drive_that_does_not_answer_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, stall = FaultySystemCalls(), Stall()
    only_what_is_held_is_silent(monkeypatch, stall.entered.is_set)
    system.inject("ask", stall)
    assert remove_leftovers([tmp_path], system, stall_seconds=0.1) == []
    assert stall.entered.is_set()
    stall.release()


@pytest.mark.parametrize("passed", [0, 20])
def test_a_drive_that_stops_answering_ends_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed: int
) -> None:
    monkeypatch.setattr("swap.bench.load._DRAIN_SECONDS", 0.3)
    monkeypatch.setattr("swap.bench.load.EngineSettings", partial(EngineSettings, stall_seconds=1.0))
    system, stall = FaultySystemCalls(), Stall()
    only_what_is_held_is_silent(monkeypatch, stall.entered.is_set)
    system.inject("pwritev", *[None] * (2 + passed), stall)  # the first two write the header
    try:
        with pytest.raises(SwapTimeoutError, match="did not answer"):
            run_bench(make_plan(replace(TINY, directories=(tmp_path,), backends=("threads",))), system=system)
    finally:
        stall.release()
    assert list(tmp_path.iterdir()) == []


def test_where_direct_io_is_refused_everything_is_buffered_and_said(tmp_path: Path) -> None:
    system = FaultySystemCalls()
    system.refuse_direct = True
    report = run_bench(make_plan(replace(TINY, directories=(tmp_path,))), system=system)
    assert not report.direct
    assert not any(one.case.direct for result in report.results.values() for one in result.all)
    assert report.to_lines()[0].startswith("direct I/O is refused")


def test_an_error_while_starting_ends_the_load(tmp_path: Path) -> None:
    with Ground.open([tmp_path], nbytes=MIB, buffer_nbytes=MIB) as ground, AlignedBuffer(MIB) as buffer:
        engine = Engine(EngineSettings(queue_depth=2))
        engine.close()
        load = Load(engine, Case("read", "threads", MIB, 1, direct=True), ground.seen([0], direct=True), [MIB])
        load.start([buffer.view], laps=1)
        assert load.finished.wait(60)
        assert "closed" in str(load.error)
        collect()  # the request that never began still has a view of the buffer


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_it_ends_the_file(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "swap.bench", str(tmp_path), "--mebibytes", "16", "--seconds", "600", "--quick"]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stderr is not None
        for line in child.stderr:  # until it measures
            if line.startswith("read,"):
                break
        open_files = [os.readlink(link) for link in Path(f"/proc/{child.pid}/fd").iterdir()]
        assert any("tiermem-bench-" in name and str(tmp_path) in name for name in open_files)
        child.send_signal(number)
        rest = child.stderr.read()
        code = child.wait(60)
    if number != signal.SIGKILL:
        assert (code, rest.splitlines()[-1]) == (130, "swap.bench: interrupted")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from swap import SystemCalls
from swap.bench import Ground

class Killing(SystemCalls):
    def fallocate(self, fd, offset, nbytes):
        super().fallocate(fd, offset, nbytes)
        os.kill(os.getpid(), signal.SIGKILL)

Ground.open([sys.argv[1]], nbytes=1 << 24, buffer_nbytes=1 << 20, system=Killing())
"""


def test_a_file_whose_maker_was_killed_is_removed_by_the_next_measurement(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("*.swapfile")
    assert left.stat().st_size > 1 << 24
    assert main([str(tmp_path), "--mebibytes", "8", "--seconds", "0.05", "--quick"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert f"removed {left.with_suffix('')}, left behind" in capfd.readouterr().err


def test_only_what_nobody_holds_and_is_ours_is_removed(tmp_path: Path) -> None:
    held = SwapFile.open(tmp_path, name="tiermem-bench-7-0123abcd", nbytes=MIB)
    kept = {"tiermem-bench-7-0123abcd.swapfile", "tiermem-bench-7-0123abcd.lock"}
    for name in ("tiermem-bench-8-0123abcd.swapfile", "tiermem-bench-9-0123abcd.lock", "tiermem-bench-mine.swapfile"):
        (tmp_path / name).write_text("not a file of ours")
        kept.add(name)
    (tmp_path / "tiermem-bench-10-0123abcd.lock").touch()  # killed before it had a file
    assert remove_leftovers([tmp_path, tmp_path / "none"]) == [str(tmp_path / "tiermem-bench-10-0123abcd")]
    assert {path.name for path in tmp_path.iterdir()} == kept
    held.close(remove=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("form", [["--json"], []])
def test_a_report_that_cannot_be_written_is_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: list[str]
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", open(full, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
        assert main([str(tmp_path), "--mebibytes", "8", "--seconds", "0.05", "--quick", *form]) == 1
        with contextlib.suppress(OSError):
            sys.stdout.close()  # writes what is left
    os.close(full)
    assert capsys.readouterr().err.splitlines()[-1] == "swap.bench: [Errno 28] No space left on device: 'stdout'"


def test_a_directory_that_is_not_there_is_refused_before_it_is_said_how_long_it_will_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("swap.bench: open in ")


def test_the_module_alone_reports_and_refuses_in_one_line(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "ignore", "-X", "importtime", "-m", "swap.bench", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)

    started = time.perf_counter()
    done = run(str(tmp_path), "--mebibytes", "8", "--seconds", "0.05", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    assert set(PATTERNS) <= json.loads(done.stdout).keys()
    assert not any(line.split("|")[-1].strip() in {"torch", "numpy", "tiermem"} for line in done.stderr.splitlines())
    assert time.perf_counter() > started
    assert list(tmp_path.iterdir()) == []
    failed = run(str(tmp_path / "none"), "--mebibytes", "8")
    assert failed.returncode == 1
    assert "create the directory first" in failed.stderr.splitlines()[-1]
    for size in ("0.1", "inf", "nan"):
        refused = run(str(tmp_path), "--mebibytes", size)
        assert refused.returncode == 2
        assert refused.stderr.splitlines()[-1].startswith("swap.bench: ")
