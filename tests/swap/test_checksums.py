"""Checksums: their definition, where they are taken, and what happens when they differ."""

import os
import pickle
import threading
from pathlib import Path

import pytest
import xxhash
from doubles import FaultySystemCalls
from hypothesis import given
from hypothesis import strategies as st

from swap import AlignedBuffer, ChecksumError, EngineSettings, Request, SwapIOError, SwapSpace, checksum

MIB = 1 << 20


def test_the_checksum_is_what_its_definition_says() -> None:
    data = os.urandom(2 * MIB + 4096)
    blocks = [data[:MIB], data[MIB : 2 * MIB], data[2 * MIB :]]
    digests = b"".join(xxhash.xxh3_64_intdigest(block).to_bytes(8, "little") for block in blocks)
    assert checksum(data) == xxhash.xxh3_64_intdigest(digests, seed=len(data))
    assert checksum(b"") == xxhash.xxh3_64_intdigest(b"", seed=0)
    assert checksum(memoryview(b"abcd").cast("I")) == checksum(b"abcd")
    assert checksum(b"tiermem") == 0x02628403181DD614  # written to disk by every version: must never change


@given(st.binary(min_size=1, max_size=64), st.data())
def test_one_flipped_bit_or_a_missing_byte_changes_it(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert checksum(flipped) != checksum(data)
    assert checksum(data[:-1]) != checksum(data)


@pytest.mark.parametrize("backend", ["threads", "aiofiles", "inline"])
def test_checksums_do_not_depend_on_stripes_and_blocks(tmp_path: Path, backend: str) -> None:
    for index in range(3):
        (tmp_path / str(index)).mkdir()
    settings = EngineSettings(backend=backend, block_size=12288)
    drives = [tmp_path / str(index) for index in range(3)]
    with SwapSpace.open(drives, name="r0", nbytes=16 * MIB, weights=[3, 2, 1], settings=settings) as space:
        extent = space.allocate(5 * MIB + 4096)
        assert len(extent.pieces) > 1
        with AlignedBuffer(extent.nbytes) as source, AlignedBuffer(extent.nbytes) as target:
            source.view[:] = os.urandom(extent.nbytes)
            wanted = checksum(source.view)
            written = space.start_write(extent, source.view, checksum=True)
            written.wait(30)
            read = space.start_read(extent, target.view, expected=wanted)
            read.wait(30)
            plain = space.start_read(extent, target.view)
            plain.wait(30)
        assert (written.checksum, read.checksum, plain.checksum) == (wanted, wanted, None)


def test_the_checksum_is_there_when_on_done_runs_and_is_taken_elsewhere(tmp_path: Path) -> None:
    seen: list[tuple[int | None, int]] = []

    def note(request: Request) -> None:
        seen.append((request.checksum, threading.get_ident()))

    with SwapSpace.open([tmp_path], name="r0", nbytes=MIB) as space, AlignedBuffer(MIB) as buffer:
        space.start_write(space.allocate(MIB), buffer.view, checksum=True, on_done=note).wait(30)
        assert [value for value, _ in seen] == [checksum(buffer.view)]
    assert seen[0][1] != threading.get_ident()


def test_a_flipped_bit_is_an_error_that_says_where(tmp_path: Path) -> None:
    with SwapSpace.open([tmp_path], name="r0", nbytes=MIB) as space, AlignedBuffer(8192) as buffer:
        space.allocate(4096)
        extent = space.allocate(8192)
        buffer.view[:] = os.urandom(8192)
        written = space.start_write(extent, buffer.view, checksum=True)
        written.wait(30)
        (piece,) = extent.pieces
        with open(tmp_path / "r0.swapfile", "r+b", buffering=0) as file:
            file.seek(piece.offset + 5000)
            byte = file.read(1)[0]
            file.seek(piece.offset + 5000)
            file.write(bytes([byte ^ 16]))
        request = space.start_read(extent, buffer.view, expected=written.checksum)
        with pytest.raises(ChecksumError, match=r"read of 8192 bytes at offset 8192 in .*r0.swapfile") as caught:
            request.wait(30)
        error = caught.value
        assert (error.expected, error.found) == (written.checksum, request.checksum)
        assert (error.offset, error.length, error.path) == (8192, 8192, str(tmp_path / "r0.swapfile"))
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), copy.expected, copy.found) == (str(error), error.expected, error.found)
        assert space.statistics().engine.failed_requests == 1


def test_a_failed_transfer_has_no_checksum(tmp_path: Path) -> None:
    system = FaultySystemCalls()
    with SwapSpace.open([tmp_path], name="r0", nbytes=MIB, system=system) as space, AlignedBuffer(8192) as buffer:
        system.always("pwritev", 5)
        request = space.start_write(space.allocate(8192), buffer.view, checksum=True)
        with pytest.raises(SwapIOError):
            request.wait(30)
        assert request.checksum is None
