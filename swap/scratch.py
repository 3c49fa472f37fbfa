"""Room on disk for what nobody needs after the process: no size in advance, no name, nothing left behind.

Owns files beside those of a space, opened when room is first asked for and one larger set at a time from then on; they
go through that space's engine. Does not know what an extent holds, and takes no part in commits. Guarantees that the
files have lost their names before anything is written to them, so that whatever ends the process ends them too, and
that a full disk is a SwapFullError which leaves what is there as it is. Any thread.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from swap.blocks import align_up
from swap.errors import SwapClosedError, SwapFullError
from swap.extents import Extent
from swap.opening import give_back, reserve_files
from swap.space import SwapSpace
from swap.syscalls import SystemCalls

NAME = "tiermem-scratch"
_FIRST = 64 << 20  # bytes of the first set of files; each further one doubles what there is
_LESS = 4  # where the disk has no room for a set, one of this part of it is tried


class ScratchSpace:
    """Extents beside `space`, in its directories and by its engine."""

    def __init__(self, space: SwapSpace, *, first: int = _FIRST, system: SystemCalls | None = None) -> None:
        """`first`: bytes of the first set of files. Opens nothing yet. `system` as in `SwapSpace.open`."""
        self._space = space
        self._first = first
        self._system = system
        self._sets: list[SwapSpace] = []
        self._lock = threading.Lock()
        self._high_water = 0
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of all files; after `close` what they had been, as of the space beside which they are."""
        return sum(space.statistics().nbytes for space in self._sets)

    @property
    def allocated(self) -> int:
        """Bytes of extents handed out."""
        return sum(space.statistics().allocated for space in self._sets)

    @property
    def high_water(self) -> int:
        """Most bytes ever handed out at once."""
        return self._high_water

    def allocate(self, nbytes: int) -> tuple[SwapSpace, Extent]:
        """Take room for `nbytes`, rounded up to 4096; the space to transfer it by, and the extent.

        Opens more files if there is no room. Raises SwapFullError if the disk has none either, SwapIOError, and
        SwapClosedError after `close`.
        """
        with self._lock:
            if self._closed:
                raise SwapClosedError("the scratch space is closed")
            found = self._find(nbytes)
            if found is None:
                grown = self._grow(align_up(nbytes))
                found = grown, grown.allocate(nbytes)
            self._high_water = max(self._high_water, self.allocated)
            return found

    def free(self, space: SwapSpace, extent: Extent) -> None:
        """Give an extent of `space` back. No transfer of it may be in flight."""
        space.free(extent)

    def close(self) -> None:
        """Close the files, which ends them. Idempotent. Transfers must have ended: close the engine's space after."""
        with self._lock:
            self._closed = True
        with contextlib.ExitStack() as stack:  # all of them, whatever one raises
            for space in self._sets:
                stack.callback(space.close_files)

    def _find(self, nbytes: int) -> tuple[SwapSpace, Extent] | None:
        for space in self._sets:
            try:
                return space, space.allocate(nbytes)
            except SwapFullError:
                continue
        return None

    def _grow(self, nbytes: int) -> SwapSpace:
        """Open as much again as there is, or, where the disk has no room for that, less: at least what is asked for."""
        least = nbytes * len(self._space.weights)  # a set has to hold the extent in one stretch wherever weights put it
        wanted = max(self._first, self.nbytes, least)
        while True:
            try:
                return self._open(wanted)
            except SwapFullError:
                if wanted == least:
                    raise
                wanted = max(least, align_up(wanted // _LESS))

    def _open(self, nbytes: int) -> SwapSpace:
        files, weights = reserve_files(
            [Path(directory.path) for directory in self._space.statistics().directories],
            name=NAME,
            nbytes=nbytes,
            keep=False,
            weights=self._space.weights,
            settings=self._space.engine.settings,
            system=self._system,
        )
        try:
            for file in files:
                file.begin()
                file.forget_name()
        except BaseException:
            give_back(files)
            raise
        self._sets.append(SwapSpace(files, self._space.engine, weights))
        return self._sets[-1]
