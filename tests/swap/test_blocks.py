"""Alignment arithmetic, splitting, buffers."""

import errno
import mmap
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import swap
from swap.blocks import block_count, split
from swap.buffers import address_of, aligned_view


@given(st.integers(0, 1 << 60))
def test_rounding(nbytes: int) -> None:
    down, up = swap.align_down(nbytes), swap.align_up(nbytes)
    assert down <= nbytes <= up
    assert up - down in (0, swap.ALIGNMENT)
    assert swap.is_aligned(down)
    assert swap.is_aligned(up)


@given(st.integers(1, 1000), st.integers(1, 64))
def test_blocks_cover_without_overlap(nbytes: int, block_size: int) -> None:
    blocks = list(split(nbytes, block_size))
    assert len(blocks) == block_count(nbytes, block_size)
    cursor = 0
    for start, length in blocks:
        assert start == cursor
        assert 0 < length <= block_size
        cursor += length
    assert cursor == nbytes


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 3 << 20])
def test_a_buffer_is_exact_aligned_and_zero(nbytes: int) -> None:
    with swap.AlignedBuffer(nbytes) as buffer:
        assert buffer.view.nbytes == nbytes
        assert address_of(buffer.view) % mmap.PAGESIZE == 0
        assert not any(buffer.view[:4096])
        buffer.view[-1] = 7
    with pytest.raises(swap.SwapClosedError):
        _ = buffer.view


def test_a_buffer_in_use_is_not_unmapped() -> None:
    buffer = swap.AlignedBuffer(8192)
    user = buffer.view[4096:]
    with pytest.raises(BufferError):
        buffer.close()
    buffer.view[0] = user[0] = 1
    user.release()
    buffer.close()
    buffer.close()


@pytest.mark.parametrize("raised", [KeyboardInterrupt, None])
def test_leaving_a_buffer_somebody_uses_by_an_error_does_not_hide_the_error(
    raised: type[BaseException] | None,
) -> None:
    """The traceback of an interrupted transfer holds a view of the buffer."""
    buffer = swap.AlignedBuffer(8192)
    views = []

    def use() -> None:
        with buffer:
            views.append(buffer.view[4096:])
            if raised:
                raise raised

    with pytest.raises(raised or BufferError):
        use()
    views.pop()[0] = 1
    buffer.close()


def test_unfit_buffers_are_refused() -> None:
    with swap.AlignedBuffer(8192) as buffer:
        for unfit, reason in (
            (bytes(4096), "writable"),
            (buffer.view[:100], "length"),
            (buffer.view[:0], "length"),
            (buffer.view[512 : 512 + 4096], "address"),
            (buffer.view[::2], "contiguous"),
        ):
            with pytest.raises(ValueError, match=reason):
                aligned_view(unfit)
        assert address_of(aligned_view(buffer.view.cast("d"))) == address_of(buffer.view)
        del unfit
    with pytest.raises(ValueError, match="positive"):
        swap.AlignedBuffer(0)


def test_an_io_error_survives_pickling_and_is_an_oserror() -> None:
    error = swap.SwapIOError("read", "/a/b", offset=4096, length=8192, errno=5)
    for found in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(found, OSError)
        assert isinstance(found, swap.SwapError)
        assert (found.operation, found.path, found.offset, found.length, found.errno) == ("read", "/a/b", 4096, 8192, 5)
        assert "read of 8192 bytes at offset 4096 in '/a/b'" in str(found)
        assert "EIO" in str(found)


@pytest.mark.parametrize(
    ("codes", "advice"),
    [
        ("ENOLCK ENOSYS", "choose a directory"),
        ("ESTALE ENOTCONN ENODEV ENXIO ECONNABORTED ECONNRESET EHOSTDOWN ESHUTDOWN", "mount it again"),
        ("EIO ENODATA EREMOTEIO ENOLINK EILSEQ", "reported a fault: see the kernel log"),
        ("EUCLEAN EBADMSG", "the file system is damaged"),
    ],
)
def test_what_a_network_or_a_drive_answers_comes_with_advice(codes: str, advice: str) -> None:
    for code in codes.split():
        assert advice in str(swap.SwapIOError("read", "x", length=4096, errno=getattr(errno, code)))


def test_advice_for_a_call_that_moves_no_bytes_does_not_speak_of_a_buffer() -> None:
    assert "choose a directory on another" in str(swap.SwapIOError("sync", "/proc", errno=errno.EINVAL))
    unaligned = swap.SwapIOError("read", "/a/b", offset=1, length=8192, errno=errno.EINVAL)
    assert "must be multiples of the device's block size" in str(unaligned)


@pytest.mark.parametrize(
    "wrong",
    [
        {"backend": "magic"},
        {"block_size": 5000},
        {"block_size": 0},
        {"queue_depth": 0},
        {"max_bytes_in_flight": 0},
        {"stall_seconds": float("nan")},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        swap.EngineSettings(**wrong)
