"""Stripes: the arithmetic as properties, and a space over several directories."""

import math
import os
from pathlib import Path

import pytest
from doubles import FaultySystemCalls
from hypothesis import given
from hypothesis import strategies as st

import swap
from swap import ALIGNMENT, AlignedBuffer, EngineSettings, FormatError, SwapFullError, SwapSpace, probe
from swap.probe import measure, measure_weights
from swap.stripes import MINIMUM_STRIPE, divide, fill, proportional
from swap.syscalls import SystemCalls

MIB = 1 << 20
units = st.integers(0, 1 << 20).map(lambda count: count * ALIGNMENT)
weight = st.floats(1e-3, 1e12, allow_nan=False)


@st.composite
def directories(draw: st.DrawFn) -> tuple[list[float], list[int], list[int]]:
    count = draw(st.integers(1, 8))
    many = lambda of: draw(st.lists(of, min_size=count, max_size=count))
    return many(weight), many(units), many(units)


@given(units, st.lists(weight, min_size=1, max_size=8))
def test_parts_are_in_proportion_to_within_a_unit(nbytes: int, weights: list[float]) -> None:
    parts = proportional(nbytes, weights)
    assert sum(parts) == nbytes
    total = math.fsum(weights)
    for part, one in zip(parts, weights, strict=True):
        assert part % ALIGNMENT == 0
        assert part >= 0
        assert abs(part - nbytes * (one / total)) <= ALIGNMENT * (1 + 1e-6)


@given(units, directories())
def test_nobody_gets_more_than_his_room(nbytes: int, drawn: tuple[list[float], list[int], list[int]]) -> None:
    weights, room, _ = drawn
    parts = fill(nbytes, weights, room)
    if parts is None:
        assert sum(room) < nbytes
        return
    assert sum(parts) == nbytes
    assert all(0 <= part <= limit and part % ALIGNMENT == 0 for part, limit in zip(parts, room, strict=True))
    free = [index for index, limit in enumerate(room) if parts[index] < limit]
    shares = proportional(sum(parts[i] for i in free), [weights[i] for i in free]) if free else []
    assert [parts[i] for i in free] == shares  # those with room left are still in proportion to each other


@given(units.filter(bool), directories(), st.sampled_from([ALIGNMENT, 1 << 16, MINIMUM_STRIPE]))
def test_an_extent_is_divided_exactly(nbytes: int, drawn: tuple[list[float], list[int], list[int]], least: int) -> None:
    weights, room, load = drawn
    parts = divide(nbytes, weights, room=room, load=load, minimum=least)
    if parts is None:
        assert sum(room) < nbytes
        return
    assert sum(parts) == nbytes
    assert all(0 <= part <= limit and part % ALIGNMENT == 0 for part, limit in zip(parts, room, strict=True))
    if all(limit >= nbytes for limit in room):
        assert all(part == 0 or part >= min(nbytes, least) for part in parts)
        if nbytes < 2 * least:
            assert sum(part > 0 for part in parts) == 1


def test_many_small_extents_are_divided_in_proportion_too() -> None:
    weights, load = [3.0, 1.0], [0, 0]
    for _ in range(4000):
        parts = divide(ALIGNMENT, weights, room=[1 << 40] * 2, load=load)
        assert parts is not None
        load = [held + part for held, part in zip(load, parts, strict=True)]
    assert load == [3000 * ALIGNMENT, 1000 * ALIGNMENT]


def test_a_slow_directory_is_spared_pieces_below_the_minimum() -> None:
    room, load = [1 << 40] * 3, [0, 0, 0]
    assert divide(4 * MIB, [10, 10, 1], room=room, load=load) == [2 * MIB, 2 * MIB, 0]
    assert divide(42 * MIB, [10, 10, 1], room=room, load=load) == [20 * MIB, 20 * MIB, 2 * MIB]
    assert divide(3 * MIB, [1, 1, 1, 1], room=[1 << 40] * 4, load=[5, 9, 5, 5]) == [MIB, 0, MIB, MIB]


def make(tmp_path: Path, count: int) -> list[Path]:
    found = [tmp_path / f"drive{index}" for index in range(count)]
    for directory in found:
        directory.mkdir()
    return found


def round_trip(space: SwapSpace, nbytes: int) -> swap.Extent:
    extent = space.allocate(nbytes)
    with AlignedBuffer(extent.nbytes) as source, AlignedBuffer(extent.nbytes) as target:
        source.view[:] = os.urandom(extent.nbytes)
        space.start_write(extent, source.view).wait(30)
        space.start_read(extent, target.view).wait(30)
        assert source.view == target.view
    return extent


def test_files_and_extents_are_in_proportion_to_the_weights(tmp_path: Path) -> None:
    settings = EngineSettings(block_size=64 << 10)
    with SwapSpace.open(make(tmp_path, 3), name="r0", nbytes=24 * MIB, weights=[5, 2, 1], settings=settings) as space:
        assert space.file_sizes == (15 * MIB, 6 * MIB, 3 * MIB)
        extent = round_trip(space, 8 * MIB)
        assert [(piece.directory, piece.nbytes) for piece in extent.pieces] == [(0, 5 * MIB), (1, 2 * MIB), (2, MIB)]
        statistics = space.statistics()
        assert [found.allocated for found in statistics.directories] == [5 * MIB, 2 * MIB, MIB]
        assert [found.weight for found in statistics.directories] == [5 / 8, 2 / 8, 1 / 8]
        assert (statistics.allocated, statistics.high_water) == (8 * MIB, 8 * MIB)
        space.free(extent)
        assert space.statistics().allocated == 0
        # Both others full: the rest goes to the first, in the end in pieces below the minimum.
        for _ in range(3):
            round_trip(space, 8 * MIB)
        assert space.statistics().allocated == 24 * MIB
        with pytest.raises(SwapFullError, match="0 bytes are free"):
            space.allocate(4096)


def test_a_directory_that_fills_up_leaves_the_rest_to_the_others(tmp_path: Path) -> None:
    with SwapSpace.open(make(tmp_path, 2), name="r0", nbytes=8 * MIB, weights=[3, 1]) as space:
        held = [round_trip(space, 3 * 4096) for _ in range(600)]
        assert {len(extent.pieces) for extent in held} == {1}
        # What is left: 8 MiB - 600 * 12 KiB, in two places.
        left = 8 * MIB - 600 * 3 * 4096
        extent = round_trip(space, left)
        assert extent.nbytes == left
        assert [found.allocated for found in space.statistics().directories] == [6 * MIB, 2 * MIB]


def test_a_small_disk_gets_a_smaller_file(tmp_path: Path) -> None:
    small, large = make(tmp_path, 2)
    system = FaultySystemCalls()
    free = {os.fspath(small): 2 * MIB, os.fspath(large): 1 << 40}
    system.free_bytes = lambda path: free[path]  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swap.opening.file_system_of", hash)  # two devices, where the test has one
        space = SwapSpace.open([small, large], name="r0", nbytes=8 * MIB, system=system)
    with space:
        assert space.file_sizes[0] < 2 * MIB
        assert sum(space.file_sizes) == 8 * MIB
        round_trip(space, 4 * MIB)


def test_no_room_anywhere_names_a_directory(tmp_path: Path) -> None:
    system = FaultySystemCalls()
    system.free_bytes = lambda _: MIB  # type: ignore[method-assign]
    system.always("fallocate", 28)
    with pytest.raises(SwapFullError, match="drive0"):
        SwapSpace.open(make(tmp_path, 2), name="r0", nbytes=8 * MIB, system=system)
    assert [list(directory.iterdir()) for directory in tmp_path.iterdir()] == [[], []]


def test_weights_can_be_measured_and_the_probe_leaves_nothing(tmp_path: Path) -> None:
    drives = make(tmp_path, 2)
    found = measure(drives[0], name="r0", settings=EngineSettings(), nbytes=MIB)
    assert found.read > 0
    assert found.write > 0
    assert list(drives[0].iterdir()) == []
    with SwapSpace.open(drives, name="r0", nbytes=8 * MIB, weights="measure") as space:
        assert math.isclose(sum(space.weights), 1)
        round_trip(space, 4 * MIB)
        space.close(remove=True)
    assert list(drives[0].iterdir()) == []


class TimedDrives(SystemCalls):
    """Drives of known speed, on a clock that only they move; a first write takes four times as long."""

    def __init__(self, **speeds: tuple[float, float]) -> None:
        self.now = 0.0
        self.speeds = speeds  # of reading and writing, bytes a second
        self.written: set[tuple[str, int]] = set()

    def perf_counter(self) -> float:
        return self.now

    def free_bytes(self, path: str) -> int:
        return 4 * MIB

    def _speeds_of(self, fd: int) -> tuple[str, float, float]:
        drive = Path(os.readlink(f"/proc/self/fd/{fd}")).parent.name
        return (drive, *self.speeds[drive])

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        self.now += len(view) / self._speeds_of(fd)[1]
        return super().preadv(fd, view, offset)

    def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
        drive, _, speed = self._speeds_of(fd)
        self.now += len(view) / speed * (1 if (drive, offset) in self.written else 4)
        self.written.add((drive, offset))
        return super().pwritev(fd, view, offset)


def test_what_is_measured_is_what_the_drives_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drives, settings = make(tmp_path, 2), EngineSettings(backend="inline")
    system = TimedDrives(drive0=(400.0, 100.0), drive1=(100.0, 100.0))
    monkeypatch.setattr(probe, "time", system)
    found = measure(drives[0], name="r0", settings=settings, system=system, nbytes=MIB)
    assert (found.read, found.write, found.both) == pytest.approx((400.0, 100.0, 160.0))
    weights = measure_weights(drives, name="r0", settings=settings, system=system)
    assert weights == pytest.approx((80.0, 50.0)), "they are on one device, and share what it gives"
    with SwapSpace.open(drives, name="r0", nbytes=MIB, weights="measure", settings=settings, system=system) as space:
        assert space.weights == pytest.approx((8 / 13, 5 / 13))


def test_a_drive_with_less_room_than_a_probe_takes_is_measured_with_less(tmp_path: Path) -> None:
    system = FaultySystemCalls()
    system.free_bytes = lambda _: 2 * MIB  # type: ignore[method-assign]
    sizes: list[int] = []
    reserve = system.fallocate

    def fallocate(fd: int, offset: int, nbytes: int) -> None:
        sizes.append(nbytes)
        reserve(fd, offset, nbytes)

    system.fallocate = fallocate  # type: ignore[method-assign]
    assert all(
        weight > 0 for weight in measure_weights(make(tmp_path, 2), name="r0", settings=EngineSettings(), system=system)
    )
    assert 0 < max(sizes) < 2 * MIB


@pytest.mark.parametrize("weights", [[1], [1, 2, 3], [1, 0], [1, -1], [1, math.inf], [1, math.nan]])
def test_weights_that_make_no_sense_are_refused(tmp_path: Path, weights: list[float]) -> None:
    with pytest.raises(ValueError, match="expected 2 positive weights"):
        SwapSpace.open(make(tmp_path, 2), name="r0", nbytes=MIB, weights=weights)


def test_kept_files_must_be_of_one_run_and_in_order(tmp_path: Path) -> None:
    drives = make(tmp_path, 3)
    with SwapSpace.open(drives, name="r0", nbytes=6 * MIB, weights=[3, 2, 1]) as space:
        run_id = space.run_id
    with SwapSpace.open(drives, name="r0", nbytes=6 * MIB, keep=True) as space:
        assert space.run_id == run_id
        assert space.weights == (3 / 6, 2 / 6, 1 / 6)
    with pytest.raises(FormatError, match=r"to be file 1 of 3, found file 2 of 3.*order"):
        SwapSpace.open([drives[1], drives[0], drives[2]], name="r0", nbytes=MIB, keep=True)
    with pytest.raises(FormatError, match=r"to be file 1 of 2, found file 1 of 3"):
        SwapSpace.open(drives[:2], name="r0", nbytes=MIB, keep=True)
    with pytest.raises(FormatError, match=f"at least {7 * MIB} bytes of data, found {6 * MIB}"):
        SwapSpace.open(drives, name="r0", nbytes=7 * MIB, keep=True)
    SwapSpace.open(drives[1:2], name="r0", nbytes=MIB).close()
    with pytest.raises(FormatError, match="to be of one run"):
        SwapSpace.open(drives, name="r0", nbytes=MIB, keep=True)
