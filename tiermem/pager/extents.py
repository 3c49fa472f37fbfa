"""Where on disk each page lies: extents kept in generations for what a commit covers, plain ones for the rest.

Owns the map from pages to extents and checksums. Does not know leases, moves or when a commit is made. Guarantees that
a write never goes to bytes that a commit still needs, that a copy counts as written only when all of it is on the
device, and that what was written can be read back, compared with its checksum where that is wanted. Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from swap.blocks import align_up
from swap.errors import SwapError
from swap.extents import Extent, Piece
from swap.generations import Copy, Generations, Mark
from swap.scratch import ScratchSpace
from swap.space import SwapSpace
from tiermem.errors import InvariantError
from tiermem.pager.page import Kind, PageKey

# What a commit covers; gradients and activations are gone when the step is over.
DURABLE = frozenset({Kind.PARAM, Kind.STATE})


class Extents:
    """The extents of all pages in one space."""

    def __init__(
        self,
        space: SwapSpace,
        generations: Generations | None = None,
        *,
        likely: Callable[[], bool] = lambda: False,
        compare: bool = False,
        plain: Mapping[PageKey, Extent] | None = None,
    ) -> None:
        """`likely()`: whether what is written now will be committed; `compare`: check checksums at every read.

        `generations` and `plain` are what an earlier run left, claimed already.
        """
        self.space = space
        self.scratch = ScratchSpace(space)  # activations: nobody knows beforehand how many there will be
        self.generations = generations or Generations(space)
        self._likely = likely
        self._compare = compare
        self._lock = threading.Lock()
        self._plain = {key: Copy(extent, None) for key, extent in (plain or {}).items()}
        self._scratched: dict[PageKey, tuple[SwapSpace, Extent]] = {}

    def space_of(self, key: PageKey) -> SwapSpace:
        """The space by which the page's extent is read and written; ask after `for_write` or `for_read`."""
        if key.kind is not Kind.ACTIVATION:
            return self.space
        with self._lock:
            return self._scratched[key][0]

    def forget(self, key: PageKey) -> None:
        """The page is no more: give its scratch extent back, if it has one. No transfer of it may be in flight."""
        with self._lock:
            found = self._scratched.pop(key, None)
        if found is not None:
            self.scratch.free(*found)

    def for_write(self, key: PageKey, nbytes: int) -> Extent:
        """The extent the next write of a page goes to; end it with `written` or `failed`. Raises SwapFullError."""
        if key.kind in DURABLE:
            return self.generations.extent_for_write(key, nbytes)
        with self._lock:
            if key.kind is Kind.ACTIVATION:
                if key not in self._scratched:
                    self._scratched[key] = self.scratch.allocate(nbytes)
                return self._scratched[key][1]
            if key not in self._plain:
                self._plain[key] = Copy(self.generations.allocate(align_up(nbytes)), None)
            return self._plain[key].extent

    def takes_checksum(self, key: PageKey) -> bool:
        """Whether a write of the page is to take the checksum of its bytes, which costs a pass over memory.

        A commit needs one of each durable page, and reads again those that have none (`swap.take_checksums`).
        """
        return self._compare or (key.kind in DURABLE and self._likely())

    def written(self, key: PageKey, extent: Extent, checksum: int | None) -> None:
        """All of the page is in `extent` now."""
        if key.kind in DURABLE:
            self.generations.written(key, extent, checksum)
        elif key.kind is not Kind.ACTIVATION:
            with self._lock:
                self._plain[key] = Copy(extent, checksum)

    def failed(self, key: PageKey, extent: Extent) -> None:
        """The write to `extent` failed."""
        if key.kind in DURABLE:
            self.generations.failed(key, extent)

    def for_read(self, key: PageKey) -> tuple[Extent, int | None]:
        """Where the page lies, and the checksum to expect (None: do not compare)."""
        try:
            if key.kind is Kind.ACTIVATION:
                return self._scratched[key][1], None
            copy = self.generations.current(key) if key.kind in DURABLE else self._plain[key]
        except (SwapError, KeyError) as error:
            raise InvariantError(f"{key}: expected an extent to read from; this is a bug in tiermem") from error
        return copy.extent, copy.checksum if self._compare else None

    def keep(self) -> KeptCopies:
        """Copies of durable pages that stay as they are until released; none at first."""
        return KeptCopies(self.generations)

    def beside(self, mark: Mark) -> tuple[list[tuple[Hashable, Extent]], list[tuple[PageKey, Extent]]]:
        """What is in use beside the copies of a mark: spare extents, and those outside the generations. None is both.

        Writes may go on meanwhile.
        """
        # Plain ones first: they stay what they are, while a spare one may become plain at any time.
        with self._lock:
            plain = [(key, copy.extent) for key, copy in self._plain.items()]
        return list(self.generations.spares(mark)), plain


class KeptCopies:
    """Copies that a later write does not overwrite (`pager.protection.Copies`). Any thread."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._mark = generations.mark(empty=True)

    def protect(self, key: PageKey) -> None:
        """The current copy stays as it is, and the next write goes elsewhere. Raises SwapError if there is none."""
        self._generations.protect(self._mark, key)

    def restore(self, key: PageKey) -> None:
        """The copy that was protected is current again; without one, the page has no copy."""
        if key in self._mark.copies:
            self._generations.restore(self._mark, key)
        else:
            self._generations.forget(key)

    def release(self) -> None:
        """Nothing is kept any more."""
        self._generations.release(self._mark)


def page_name(key: PageKey) -> str:
    """The key as manifests have it, such as "param/3/0"."""
    return f"{key.kind.value}/{key.unit}/{key.tile}"


def page_key(name: str) -> PageKey:
    """The key of a name that `page_name` made. Raises ValueError for anything else."""
    kind, unit, tile = name.split("/")
    return PageKey(int(unit), Kind(kind), int(tile))


def to_rows(extents: Iterable[tuple[Any, Extent]]) -> list[list[Any]]:
    """Pages and extents as JSON holds them; `from_rows` reads them."""
    return [
        [page_name(key), extent.slot, [[piece.directory, piece.offset, piece.nbytes] for piece in extent.pieces]]
        for key, extent in extents
    ]


def from_rows(rows: Iterable[Any]) -> list[tuple[str, Extent]]:
    """What `to_rows` made, with names. Raises ValueError or TypeError for anything else."""
    return [
        (str(name), Extent(tuple(Piece(int(where), int(offset), int(nbytes)) for where, offset, nbytes in each), slot))
        for name, slot, each in rows
    ]
