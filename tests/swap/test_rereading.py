"""Checksums taken afterwards, by reading again what was written without one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from doubles import FaultySystemCalls
from hypothesis import given
from hypothesis import strategies as st

from swap import (
    AlignedBuffer,
    Copy,
    EngineSettings,
    Extent,
    Priority,
    Request,
    SwapIOError,
    SwapSpace,
    checksum,
    take_checksums,
)
from swap.checksums import CHECKSUM_BLOCK, RunningChecksum

MIB = 1 << 20


def write(space: SwapSpace, nbytes: int) -> tuple[Extent, bytes]:
    extent, data = space.allocate(nbytes), os.urandom(nbytes)
    with AlignedBuffer(nbytes) as buffer:
        buffer.view[:] = data
        space.start_write(extent, buffer.view).wait(30)
    return extent, data


def open_striped(path: Path) -> SwapSpace:
    drives = [path / str(index) for index in range(3)]
    for drive in drives:
        drive.mkdir()
    return SwapSpace.open(drives, name="r0", nbytes=96 * MIB, weights=[3, 2, 1])


def test_copies_without_a_checksum_get_that_of_their_bytes(tmp_path: Path) -> None:
    """Of one block, of several parts, of a number of bytes that is no multiple of either."""
    with open_striped(tmp_path) as space:
        written = [write(space, nbytes) for nbytes in (4096, 8 * MIB, 21 * MIB + 4096, 9 * MIB - 4096, MIB)]
        copies = [Copy(extent, None) for extent, _ in written]
        assert max(len(copy.extent.pieces) for copy in copies) > 1
        known = Copy(written[0][0], 5)  # not asked for, and not compared
        assert take_checksums(space, [*copies, known]) == sum(len(data) for _, data in written)
        assert [copy.checksum for copy in copies] == [checksum(data) for _, data in written]
        assert known.checksum == 5
        before = space.statistics().engine.devices[0].bytes_read
        assert take_checksums(space, [*copies, known]) == 0
        assert space.statistics().engine.devices[0].bytes_read == before


def test_what_training_waits_for_is_read_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SwapSpace.open([tmp_path], name="r0", nbytes=MIB) as space:
        extent, _ = write(space, 8192)
        read, priorities = space.start_read, list[Priority]()

        def noted(*given: Any, priority: Priority, **named: Any) -> Request:
            priorities.append(priority)
            return read(*given, priority=priority, **named)

        monkeypatch.setattr(space, "start_read", noted)
        take_checksums(space, [Copy(extent, None)])
        assert priorities == [max(Priority)]


def test_a_drive_that_does_not_give_the_bytes_is_an_error_and_no_checksum(tmp_path: Path) -> None:
    system = FaultySystemCalls()
    with SwapSpace.open([tmp_path], name="r0", nbytes=32 * MIB, system=system) as space:
        copies = [Copy(write(space, 12 * MIB)[0], None) for _ in range(2)]
        system.always("preadv", 5)
        with pytest.raises(SwapIOError):
            take_checksums(space, copies)
        assert [copy.checksum for copy in copies] == [None, None]


def test_a_copy_of_which_only_the_first_part_was_read_has_no_checksum(tmp_path: Path) -> None:
    """A commit that is tried again would take it for that of the whole."""
    system, settings = FaultySystemCalls(), EngineSettings(backend="inline", block_size=8 * MIB)
    with SwapSpace.open([tmp_path], name="r0", nbytes=32 * MIB, settings=settings, system=system) as space:
        extent, data = write(space, 12 * MIB)
        copy = Copy(extent, None)
        system.inject("preadv", None, 5)
        with pytest.raises(SwapIOError):
            take_checksums(space, [copy])
        assert copy.checksum is None
        take_checksums(space, [copy])
        assert copy.checksum == checksum(data)


def test_a_part_of_an_extent_is_read_wherever_it_is_cut(tmp_path: Path) -> None:
    with open_striped(tmp_path) as space:
        extent, data = write(space, 6 * MIB)
        cuts = [0, 4096, extent.pieces[0].nbytes, extent.pieces[0].nbytes + 8192, 6 * MIB]
        for begin in cuts:
            for end in (cut for cut in cuts if cut > begin):
                with AlignedBuffer(end - begin) as buffer:
                    space.start_read(extent, buffer.view, part=(begin, end)).wait(30)
                    assert bytes(buffer.view) == data[begin:end]
        with AlignedBuffer(4096) as buffer, pytest.raises(ValueError, match="multiples of 4096"):
            space.start_read(extent, buffer.view, part=(100, 4196))
        with AlignedBuffer(8192) as buffer, pytest.raises(ValueError, match="expected a buffer of 4096 bytes"):
            space.start_read(extent, buffer.view, part=(0, 4096))


@given(blocks=st.lists(st.integers(0, 2), max_size=4), rest=st.integers(0, 5000))
def test_bytes_that_come_in_parts_have_the_checksum_of_all(blocks: list[int], rest: int) -> None:
    data = bytes(range(256)) * ((sum(blocks) * CHECKSUM_BLOCK) // 256) + b"x" * rest
    running, begin = RunningChecksum(), 0
    for count in blocks:
        running.add(data[begin : begin + count * CHECKSUM_BLOCK])
        begin += count * CHECKSUM_BLOCK
    running.add(data[begin:])
    assert running.value() == checksum(data)


def test_nothing_comes_behind_a_part_of_a_block() -> None:
    running = RunningChecksum()
    running.add(b"abc")
    with pytest.raises(ValueError, match="whole blocks"):
        running.add(b"d")


@pytest.mark.parametrize("backend", ["threads", "aiofiles", "inline"])
def test_every_backend_reads_parts(tmp_path: Path, backend: str) -> None:
    settings = EngineSettings(backend=backend, block_size=12288)
    with SwapSpace.open([tmp_path], name="r0", nbytes=16 * MIB, settings=settings) as space:
        extent, data = write(space, 10 * MIB)
        copy = Copy(extent, None)
        take_checksums(space, [copy])
        assert copy.checksum == checksum(data)
