"""Reading a safetensors file, a piece at a time.

Owns the list of a file's tensors and the reads of their bytes. The `safetensors` library judges the header; the bytes
are read with checked reads instead of its memory map, because a map turns a failing drive or a file cut short into a
signal that kills the process. Does not know models or what a tensor means. Guarantees that a damaged header is a
FormatError, that a failed or short read is an error naming the place, and that no more memory is taken than asked for.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from swap import FormatError, SwapIOError, SystemCalls
from swap.errors import reporting
from swap.patience import PatientSystemCalls
from swap.settings import STALL_SECONDS
from tiermem.errors import ConfigError, InvariantError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
LENGTH_NBYTES = 8  # of the header's length, which stands before it
BLOCK_NBYTES = 4 << 20  # what is read at once where bytes have to be converted or compared


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file; row-major. `offset`: where its data begin, in bytes from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file whose header has been checked. Nothing is kept open. `data_offset`: where the header ends."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    data_offset: int

    @contextmanager
    def reading(self, system: SystemCalls | None = None) -> Iterator[TensorReader]:
        """Open the file for reads. Raises SwapIOError, also for a drive that does not answer."""
        patient = PatientSystemCalls(system, STALL_SECONDS)
        with opened(self.path, patient) as fd:
            yield TensorReader(self.path, fd, patient)


class TensorReader:
    """An open file."""

    def __init__(self, path: Path, fd: int, system: SystemCalls) -> None:
        self._path = path
        self._fd = fd
        self._system = system

    def read(self, out: memoryview, offset: int) -> None:
        """Fill `out` from byte `offset` of the file. Raises SwapIOError, FormatError where the file ends before."""
        out, done = out.cast("B"), 0
        while done < len(out):
            with reporting("read", self._path, offset=offset, length=len(out)):
                moved = self._system.preadv(self._fd, out[done:], offset + done)
            if moved == 0:
                raise FormatError(
                    f"expected {str(self._path)!r} to have {offset + len(out)} bytes, found {offset + done}: it has "
                    "been cut short"
                )
            done += moved


class TensorLoader(ExitStack):
    """Reads several files, one of which is open at a time: the last. At the end of a `with` none is."""

    def __init__(self) -> None:
        super().__init__()
        self._file: TensorFile | None = None
        self._reader: TensorReader | None = None

    def load(self, file: TensorFile, name: str) -> torch.Tensor:
        """One tensor, in memory of its own. Raises SwapIOError, FormatError where the file ends before."""
        info = file.tensors[name]
        values = torch.empty(info.shape, dtype=info.dtype, device="cpu")
        self.reader(file).read(bytes_of(values), info.offset)
        return values

    def reader(self, file: TensorFile) -> TensorReader:
        """The file, open until another one is asked for. Raises SwapIOError."""
        if self._reader is None or self._file is not file:
            self._reader = None
            self.close()
            self._file, self._reader = file, self.enter_context(file.reading())
        return self._reader


def open_tensors(path: Path) -> TensorFile:
    """Look at a safetensors file. Links are followed: the cache of Hugging Face is made of them.

    Raises FormatError for anything that is not a whole safetensors file, SwapIOError if it cannot be read.
    """
    system = PatientSystemCalls(None, STALL_SECONDS)
    with opened(path, system) as fd:
        size = os.fstat(fd).st_size
        if size < LENGTH_NBYTES:
            raise FormatError(f"expected {str(path)!r} to be a safetensors file, found {size} bytes")
        length = bytearray(LENGTH_NBYTES)
        TensorReader(path, fd, system).read(memoryview(length), 0)
    data_offset = LENGTH_NBYTES + int.from_bytes(length, "little")
    try:
        with safe_open(path, framework="numpy") as file:
            slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
            found = [(name, str(each.get_dtype()), tuple(each.get_shape())) for name, each in slices]
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        raise FormatError(f"expected {str(path)!r} to be a whole safetensors file: {error}") from error
    tensors, offset = {}, data_offset
    for name, dtype, shape in found:
        if dtype not in DTYPES:
            raise FormatError(f"{str(path)!r}: expected one of {', '.join(DTYPES)}, found tensor {name!r} of {dtype}")
        tensors[name] = TensorInfo(name, DTYPES[dtype], shape, offset)
        offset += tensors[name].nbytes
    if offset != size:
        raise FormatError(f"expected {str(path)!r} to have {offset} bytes, found {size}")
    return TensorFile(path, tensors, data_offset)


def bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as bytes; it lives as long as they are looked at."""
    if not (values.is_cpu and values.is_contiguous()) or values.is_conj() or values.is_neg():
        raise InvariantError(f"expected the bytes of a plain tensor in one piece, found one on {values.device}")
    if not values.numel():
        return memoryview(bytearray())
    # Not `values.numpy()`: torch then refuses for good to resize the tensor, which may be somebody's buffer.
    array = (ctypes.c_ubyte * values.nbytes).from_address(values.data_ptr())
    array.owner = values.detach()  # type: ignore[attr-defined]
    view: memoryview = np.frombuffer(memoryview(array), np.uint8).data
    return view


def tensor_of(dtype: str, shape: Sequence[int], text: str) -> torch.Tensor:
    """The tensor with these bytes, in base64; on memory of its own. `dtype`: as torch names it, without "torch."."""
    data, kind = bytearray(base64.b64decode(text)), getattr(torch, dtype)
    flat = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind, device="cpu")
    return flat.reshape(tuple(shape))


def fits_files(values: torch.Tensor) -> bool:
    """Whether a tensor can be one of a file: plain memory, of a dtype that these files have."""
    return values.layout is torch.strided and not values.is_nested and values.dtype in DTYPES.values()


def require_fit(what: str, values: torch.Tensor) -> None:
    """Raise ConfigError for a tensor, `what`, that cannot be one of a file."""
    if not fits_files(values):
        odd = f"has the layout {values.layout}" if values.layout is not torch.strided else f"is of {values.dtype}"
        raise ConfigError(
            f"{what} {'is nested' if values.is_nested else odd}: safetensors files hold dense tensors of "
            f"{', '.join(DTYPES)}; make it dense and of such a dtype, or a buffer that is no part of the state "
            "(register_buffer(..., persistent=False))"
        )


def read_text(path: Path, *, limit: int = 1 << 32) -> str:
    """The text of a regular file. Raises FormatError for what is no text or longer, SwapIOError if it fails."""
    system = PatientSystemCalls(None, STALL_SECONDS)
    with opened(path, system) as fd:
        size = os.fstat(fd).st_size
        if size > limit:
            raise FormatError(f"expected {str(path)!r} to have at most {limit} bytes, found {size}")
        data = bytearray(size)
        TensorReader(path, fd, system).read(memoryview(data), 0)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"expected {str(path)!r} to be text: {error}") from error


@contextmanager
def opened(path: Path, system: SystemCalls) -> Iterator[int]:
    """A descriptor of a regular file. Raises SwapIOError, FormatError for a folder, a pipe or a device."""
    try:
        # Non-blocking, or a pipe in the way would wait for its other end.
        fd = system.open(os.fspath(path), os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise SwapIOError("open", path, errno=error.errno or errno.EIO) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FormatError(f"expected {str(path)!r} to be a file, found something else")
        yield fd
    finally:
        system.close(fd)
