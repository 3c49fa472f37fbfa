"""Writing a safetensors file, a piece at a time.

Owns one file being written: its header, which comes first because all sizes are known, and where each tensor lies.
Does not know models. Guarantees that the file is new, 0600 and no link, that a full or failing disk is an error, that
bytes arrive where the header says, and that `finish` returns only when all of them are durable, with their checksums.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import xxhash

from swap import FormatError, SwapFullError, SystemCalls, errors
from swap.errors import why_full
from swap.transfer import write_all
from tiermem.checkpoint.tensor_file import DTYPES, LENGTH_NBYTES
from tiermem.errors import InvariantError

T = TypeVar("T")

# Synced so often, what is left for the end is little: neither the page cache nor the wait for a slow drive grows with
# the file, so a drive that has failed can be told from one that has much to do.
SYNC_NBYTES = 256 << 20

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that is to be written, row-major."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Written:
    """What is durable: the file's size, and XXH3-64 of the header (its length included) and of each tensor's bytes."""

    nbytes: int
    header: str
    tensors: Mapping[str, str]


class TensorWriter:
    """A safetensors file being written. `finish` it, or `close` and remove it."""

    def __init__(
        self,
        path: Path,
        specs: Sequence[TensorSpec],
        *,
        metadata: Mapping[str, str] | None = None,
        system: SystemCalls | None = None,
    ) -> None:
        """Create the file and write its header. Raises SwapFullError, SwapIOError, also if the name is taken."""
        # Large elements first: readers lay typed views over the bytes, so an offset must be a multiple of the size.
        ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
        self._path = path
        self._system = system or SystemCalls()
        self._places, header = _header(ordered, metadata)
        self._header = xxhash.xxh3_64_hexdigest(header)
        self._digests = {spec.name: xxhash.xxh3_64() for spec in ordered}
        self._unsynced = 0
        self._nbytes = len(header) + sum(spec.nbytes for spec in ordered)
        self._done = dict.fromkeys(self._places, 0)
        with self._reporting("open", 0):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self._fd = self._system.open(os.fspath(path), flags, 0o600)
        try:
            self._write(memoryview(header), 0)
        except BaseException:
            with suppress(OSError):  # the error that matters is on its way
                self.close()
            raise

    def write(self, name: str, data: memoryview) -> None:
        """Write the next bytes of a tensor. Raises SwapFullError or SwapIOError."""
        data = data.cast("B")
        offset, nbytes = self._places[name]
        done = self._done[name]
        if done + len(data) > nbytes:
            raise InvariantError(f"{name}: {done + len(data)} bytes for a tensor of {nbytes}")
        self._write(data, offset + done)
        self._digests[name].update(data)
        self._done[name] = done + len(data)

    def finish(self) -> Written:
        """Wait until all is durable, and close. Raises SwapFullError, SwapIOError; InvariantError for missing bytes."""
        for name, (_, nbytes) in self._places.items():
            if self._done[name] != nbytes:
                raise InvariantError(f"{name}: {self._done[name]} bytes of {nbytes} were written")
        with self._reporting("sync", self._nbytes):
            self._system.fsync(self._fd)
        with self._reporting("close", self._nbytes):
            self.close()
        digests = {name: digest.hexdigest() for name, digest in self._digests.items()}
        return Written(self._nbytes, self._header, digests)

    def close(self) -> None:
        """Close without making sure of anything. May be called twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._system.close(fd)

    def _write(self, data: memoryview, offset: int) -> None:
        with self._reporting("write", len(data), offset):
            write_all(self._fd, data, offset, path=self._path, system=self._system)
        self._unsynced += len(data)
        if self._unsynced >= SYNC_NBYTES:
            self._unsynced = 0
            with self._reporting("sync", self._nbytes):
                self._system.fdatasync(self._fd)

    def _reporting(self, operation: str, length: int, offset: int = 0) -> AbstractContextManager[None]:
        return reporting(operation, self._path, system=self._system, length=length, offset=offset, needed=self._nbytes)


def divided(items: Sequence[T], nbytes_of: Callable[[T], int], most: int) -> list[list[T]]:
    """What goes into which file: in order, each at most `most` bytes; what is larger has a file of its own."""
    files: list[list[T]] = []
    room = 0
    for item in items:
        nbytes = nbytes_of(item)
        if not files or nbytes > room:
            files.append([])
            room = most
        files[-1].append(item)
        room -= nbytes
    return files


def reporting(
    operation: str, path: Path, *, system: SystemCalls, length: int = 0, offset: int = 0, needed: int = 0
) -> AbstractContextManager[None]:
    """Make an OSError of the body a SwapFullError (naming `needed` bytes) or a SwapIOError."""

    def full(code: int) -> SwapFullError:
        nbytes = needed or length
        size = f" of {nbytes} bytes" if nbytes else ""
        why = why_full(partial(system.free_bytes, os.fspath(path.parent)), code, nbytes)
        return SwapFullError(f"no room for {str(path)!r}{size}: {why}; free some, or choose a folder on another drive")

    return errors.reporting(operation, path, offset=offset, length=length, full=full)


def _header(
    specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None
) -> tuple[dict[str, tuple[int, int]], bytes]:
    """The place (offset, bytes) of each tensor in the file, and the header with its length before it."""
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    ends, offset = {}, 0
    for spec in specs:
        if spec.name in fields or spec.name == "__metadata__":
            raise FormatError(f"a safetensors file cannot hold two tensors called {spec.name!r}")
        if spec.dtype not in _NAMES:
            raise FormatError(f"a safetensors file cannot hold {spec.name!r} of {spec.dtype}")
        ends[spec.name] = (offset, spec.nbytes)
        fields[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    base = LENGTH_NBYTES + len(text)
    places = {name: (base + begin, nbytes) for name, (begin, nbytes) in ends.items()}
    return places, len(text).to_bytes(LENGTH_NBYTES, "little") + text
