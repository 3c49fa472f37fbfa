"""The swap space: extents over one or several directories.

Owns a swap file and an allocator per directory, and the engine that moves the bytes. Does not know tensors, pages, or
what an extent holds. Guarantees that extents in use never overlap, that a transfer touches its extent only, that a
directory is used by one run at a time, that the files of a space belong to one run and stand in their order, and that
what `open` has taken is given back if `open` fails half-way.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from swap.backends.base import Backend
from swap.blocks import align_up
from swap.durability import sync_files
from swap.engine import Engine, OnDone, foreign, make_backend
from swap.errors import SwapClosedError, SwapError, SwapFullError
from swap.extents import Extent, ExtentAllocator, Piece
from swap.files import DATA_OFFSET, SwapFile
from swap.manifest_files import ManifestFiles
from swap.opening import Weights, begin_files, give_back, reserve_files, warn_of_buffered
from swap.patience import PatientSystemCalls
from swap.requests import Operation, Priority, Request, Span, part_of
from swap.settings import DirectoryStatistics, EngineSettings, SpaceStatistics
from swap.stripes import divide
from swap.syscalls import SystemCalls

if TYPE_CHECKING:
    from typing_extensions import Buffer


class SwapSpace:
    """Room on disk, handed out in extents. Made by `open`. Every method may be called from any thread."""

    def __init__(self, files: Sequence[SwapFile], engine: Engine, weights: Sequence[float]) -> None:
        self.engine = engine
        self.weights = tuple(weight / sum(weights) for weight in weights)
        self._files = tuple(files)
        self._named = False  # whether the files' names have been made durable
        self._allocators = tuple(ExtentAllocator(file.nbytes, start=DATA_OFFSET) for file in files)
        self._lock = threading.Lock()
        self._high_water = 0
        self._closed = False
        self.has_begun = True  # whether what an earlier run left has been forgotten, or was kept
        self._beginning: Callable[[], None] = lambda: None
        # By which others change these directories: the files stay locked until those have ended.
        self.company: set[SystemCalls] = set()

    @classmethod
    def open(
        cls,
        directories: Sequence[Path],
        *,
        name: str,
        nbytes: int,
        settings: EngineSettings | None = None,
        keep: bool = False,
        begin: bool = True,
        weights: Weights = None,
        system: SystemCalls | None = None,
        backend: Backend | None = None,
    ) -> Self:
        """Open a space of at least `nbytes` over existing directories.

        `weights` are the directories' bandwidths, to any scale: the files, and each extent, are divided in proportion
        (see `swap.stripes`). "measure" finds them by writing and reading a little in each directory. None means equal,
        or as in the run whose files are kept. A directory without room for its part leaves the rest to the others.
        `keep` insists on the files an earlier run left and keeps their data (see `claim`); otherwise they are forgotten
        with its commits, without `begin` only when that is called. `system` and `backend` replace the real ones in
        tests. Warns once, with DirectIOWarning, if O_DIRECT is wanted and refused. Raises SwapInUseError, FormatError,
        SwapFullError, SwapIOError, as `SwapFile.open`; ValueError for no directories, one twice, or weights that are
        not one positive number each.
        """
        settings = settings or EngineSettings()
        files, ratio = reserve_files(
            directories, name=name, nbytes=nbytes, keep=keep, weights=weights, settings=settings, system=system
        )
        try:
            if settings.direct:
                warn_of_buffered(files)  # before there is a backend to close: it raises where warnings are errors
            space = cls(files, Engine(settings, backend=backend or make_backend(settings.backend, system)), ratio)
        except BaseException:
            give_back(files)
            raise
        if not keep:
            patient = PatientSystemCalls(system, settings.stall_seconds)
            space.company.add(patient)
            space.has_begun = False
            space._beginning = partial(begin_files, files, ManifestFiles(os.fspath(directories[0]), name, patient))
        try:
            if begin:
                space.begin()
        except BaseException:
            space.close()
            raise
        return space

    def begin(self) -> None:
        """Forget what an earlier run left, its commits first. Idempotent. Nothing can be allocated before.

        After an error the space is fit for nothing but `close`. Raises SwapIOError, SwapFullError, and what
        `ManifestFiles.discard` raises.
        """
        if not self.has_begun:
            self._beginning()
            self.has_begun = True

    @property
    def run_id(self) -> bytes:
        """What the files of this space carry, and those of no other run."""
        return self._files[0].identity.run_id

    @property
    def file_sizes(self) -> tuple[int, ...]:
        """Bytes of data in each directory's file."""
        return tuple(file.nbytes for file in self._files)

    @property
    def direct(self) -> bool:
        """Whether the file in every directory is open with O_DIRECT."""
        return all(file.direct for file in self._files)

    def allocate(self, nbytes: int) -> Extent:
        """Take room for `nbytes`, 1 or more, rounded up to 4096; at most one piece a directory. Raises SwapFullError.

        After `close` SwapClosedError.
        """
        if nbytes <= 0:
            raise ValueError(f"expected a positive number of bytes, found {nbytes}")
        nbytes = align_up(nbytes)
        _require_home(self.engine)
        with self._lock:
            self._require_open()
            if not self.has_begun:
                raise SwapError("the swap space has not begun: what an earlier run left would be written over")
            parts = divide(
                nbytes,
                self.weights,
                room=[allocator.largest_hole for allocator in self._allocators],
                load=[allocator.allocated for allocator in self._allocators],
            )
            if parts is None:
                raise _full(self._allocators, nbytes)
            pieces = []
            for index, part in enumerate(parts):
                offset = self._allocators[index].allocate(part) if part else None
                if offset is not None:
                    pieces.append(Piece(index, offset, part))
            self._high_water = max(self._high_water, sum(a.allocated for a in self._allocators))
        return Extent(tuple(pieces))

    def claim(self, extent: Extent) -> None:
        """Take an extent that an earlier run had, in a space opened with `keep`. Raises SwapError if it is not free."""
        _require_home(self.engine)
        with self._lock:
            self._require_open()
            for count, piece in enumerate(extent.pieces):
                known = 0 <= piece.directory < len(self._allocators)
                if not known or not self._allocators[piece.directory].claim(piece.offset, piece.nbytes):
                    for done in extent.pieces[:count]:
                        self._allocators[done.directory].free(done.offset, done.nbytes)
                    raise SwapError(f"{extent} cannot be claimed: {piece} is in use, or outside this space")
            self._high_water = max(self._high_water, sum(a.allocated for a in self._allocators))

    def free(self, extent: Extent) -> None:
        """Give an extent back, of which no transfer may be in flight.

        Raises SwapError, and does nothing, if it is not allocated.
        """
        _require_home(self.engine)
        with self._lock:
            _require_allocated(extent, self._allocators)
            for piece in extent.pieces:
                self._allocators[piece.directory].free(piece.offset, piece.nbytes)

    def start_read(
        self,
        extent: Extent,
        buffer: Buffer,
        *,
        priority: Priority = Priority.DEMAND,
        on_done: OnDone | None = None,
        checksum: bool = False,
        expected: int | None = None,
        part: tuple[int, int] | None = None,
    ) -> Request:
        """Start reading an extent into a writable, aligned buffer of its length. Never waits; see `Engine.start`.

        `part`: only the bytes from one place to another, both aligned, into a buffer of that length.
        """
        spans = self._spans(extent)
        return self.engine.start(
            Operation.READ,
            spans if part is None else part_of(spans, *part),
            buffer,
            priority=priority,
            on_done=on_done,
            checksum=checksum,
            expected=expected,
        )

    def start_write(
        self,
        extent: Extent,
        buffer: Buffer,
        *,
        priority: Priority = Priority.WRITE_BACK,
        on_done: OnDone | None = None,
        checksum: bool = False,
    ) -> Request:
        """Start writing an aligned buffer to an extent of its length. Never waits; see `Engine.start`."""
        return self.engine.start(
            Operation.WRITE, self._spans(extent), buffer, priority=priority, on_done=on_done, checksum=checksum
        )

    def make_durable(self) -> None:
        """Wait until every write that was done before is durable, and waits for no other. All devices at once.

        Raises SwapIOError, and then whenever it is called: see `SwapFile.sync`.
        """
        _require_home(self.engine)
        with self._lock:
            self._require_open()
        sync_files(self._files, names=not self._named)  # a file's name is not part of the file
        self._named = True

    def statistics(self) -> SpaceStatistics:
        """The space at this instant."""
        _require_home(self.engine)
        with self._lock:
            directories = tuple(
                DirectoryStatistics(
                    path=os.path.dirname(file.path),
                    device=file.device,
                    direct=file.direct,
                    nbytes=allocator.nbytes,
                    allocated=allocator.allocated,
                    high_water=allocator.high_water,
                    largest_hole=allocator.largest_hole,
                    weight=weight,
                )
                for file, allocator, weight in zip(self._files, self._allocators, self.weights, strict=True)
            )
            high_water = self._high_water
        return SpaceStatistics(
            nbytes=sum(directory.nbytes for directory in directories),
            allocated=sum(directory.allocated for directory in directories),
            high_water=high_water,
            directories=directories,
            engine=self.engine.statistics(),
        )

    def close(self, *, remove: bool = False) -> None:
        """Close engine and files; remove the files if asked, before `begin` those that were made. Idempotent.

        Queued requests fail: wait for those to be kept. All files are closed even if something raises; the first
        error is raised at the end. Where the drive has not answered, nobody else gets the directories until it has, or
        the process has ended: what it does late would fall into the files of the next run.
        """
        if self.engine.is_foreign:  # before the lock is taken, see there
            self.close_files()
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self.engine.close()
        except BaseException:  # an interrupt, too: the next close finds the space closed, and the locks are to go
            with contextlib.suppress(SwapError):
                self.close_files(remove=remove)
            raise
        self.close_files(remove=remove)

    def close_files(self, *, remove: bool = False) -> None:
        """Close all files, of a space whose engine is another's; raise the first error at the end. Idempotent."""
        errors: list[BaseException] = []
        late = [*self.engine.backend.late(), *(thread for system in self.company for thread in system.late())]
        for file in self._files:
            try:
                file.close(remove=remove if self.has_begun else file.created, after=late)
            except BaseException as error:  # noqa: BLE001 - an interrupt, too, as in `close`
                errors.append(error)
        if errors:
            raise errors.pop(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise SwapClosedError("the swap space is closed")

    def _spans(self, extent: Extent) -> list[Span]:
        _require_home(self.engine)
        with self._lock:
            self._require_open()
            _require_allocated(extent, self._allocators)
        return [(self._files[piece.directory], piece.offset, piece.nbytes) for piece in extent.pieces]


def _require_allocated(extent: Extent, allocators: Sequence[ExtentAllocator]) -> None:
    for piece in extent.pieces:
        known = 0 <= piece.directory < len(allocators)
        if not known or not allocators[piece.directory].holds(piece.offset, piece.nbytes):
            raise SwapError(f"{extent} is not allocated in this space; it was freed, or belongs to another")


def _require_home(engine: Engine) -> None:
    """Raise SwapError in a forked child: before a lock is taken, which may never be given back there."""
    if engine.is_foreign:
        raise foreign()


def _full(allocators: Sequence[ExtentAllocator], nbytes: int) -> SwapFullError:
    free = sum(allocator.free_bytes for allocator in allocators)
    largest = max(allocator.largest_hole for allocator in allocators)
    return SwapFullError(
        f"the swap space has no room for an extent of {nbytes} bytes: {free} bytes are free, {largest} of them in "
        "one stretch; open a larger space or add a directory"
    )
