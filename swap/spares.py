"""Spare extents: room that a key has given up and will want again.

Owns, for each key, the few extents set aside for it. Does not know copies or marks. Guarantees that an extent is spare
for one key only, that more than a key can use go back to the space, and that all can be given back when the space runs
full. Used under the lock of `Generations`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from swap.extents import Extent
from swap.space import SwapSpace

# A key with three copies alive (committed, current, and one that may be taken back) has two to spare in the end.
_MOST = 2


class Spares:
    """The spare extents of all keys."""

    def __init__(self, space: SwapSpace) -> None:
        self._space = space
        self._of_key: dict[Hashable, list[Extent]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all spares."""
        return sum(extent.nbytes for _, extent in self.items())

    def items(self) -> Iterator[tuple[Hashable, Extent]]:
        """Every spare with its key."""
        return ((key, extent) for key, extents in self._of_key.items() for extent in extents)

    def take(self, key: Hashable, nbytes: int) -> Extent | None:
        """A spare of `key` with that many bytes, if it has one; those of another size go back to the space."""
        extents = self._of_key.get(key, [])
        while extents:
            extent = extents.pop()
            if extent.nbytes == nbytes:
                return extent
            self._space.free(extent)
        return None

    def give(self, key: Hashable, extent: Extent) -> None:
        """Set an extent aside for `key`, or give it back to the space if the key has enough."""
        extents = self._of_key.setdefault(key, [])
        if len(extents) < _MOST:
            extents.append(extent)
        else:
            self._space.free(extent)

    def forget(self, key: Hashable) -> None:
        """Give the spares of `key` back to the space."""
        for extent in self._of_key.pop(key, []):
            self._space.free(extent)

    def trim(self) -> int:
        """Give all spares back to the space; return their bytes."""
        nbytes = self.nbytes
        for key in list(self._of_key):
            self.forget(key)
        return nbytes
