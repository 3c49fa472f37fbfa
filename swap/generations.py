"""Generations: which copy of each key is current, and which copies must not be touched.

Owns, for every key, its current copy (extent and checksum), and the marks that protect copies from being overwritten.
Does not move bytes, and does not know what a key means or how a mark becomes durable. Guarantees:

1. An extent that a live mark holds is never handed out for writing, never freed, never allocated to another.
2. A copy becomes current only when `written` says that all of it is on the device; a mark holds complete copies only.
3. Every extent is current, held by a mark, being written, or a spare; nothing leaks.

Copy on write. `extent_for_write` returns the current extent when no mark holds it, another one otherwise. With one
mark at a time that makes two slots per key, used in turn: the first write after a mark goes to the other slot, later
ones to the same again. The slot that a released mark gives up stays with its key as a spare, so that steady state
never allocates and never fragments; spares are given back when the space runs full.

Undo of some keys. `mark(empty=True)` holds nothing; `protect` adds the current copy of a key to it, before that key is
written again; `restore(mark, key)` makes that copy current again. `release` ends it either way.

Room needed. Keys that change between two marks need one extent for each copy alive: the current one and one for each
mark that holds another. One mark, renewed after it was released: twice the bytes of what changes. With another mark
beside it (a commit that runs beside the next step's writes, a step that may have to be undone) three times. Keys that
never change need one. `extent_for_write` raises SwapFullError where a copy does not fit; the rest stays as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from swap.blocks import align_up
from swap.errors import SwapError, SwapFullError
from swap.extents import Extent
from swap.manifest import Entry
from swap.space import SwapSpace
from swap.spares import Spares


@dataclass(slots=True, eq=False)
class Copy:
    """The bytes of a key at one time. Two copies are the same only if they are one object.

    `checksum`: None until somebody has taken it.
    """

    extent: Extent
    checksum: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """The current copies of all keys at one instant, or of those protected since. Live until released.

    Made by `Generations.mark`, and changed by nobody else.
    """

    copies: dict[Hashable, Copy]
    superseded: set[Hashable] = field(default_factory=set)  # keys whose copy here is current no more

    def entries(self, name: Callable[[Any], str] = str) -> list[Entry]:
        """What a manifest needs; `name` turns a key into text. Raises SwapError for a copy without a checksum."""
        found = []
        for key, copy in self.copies.items():
            if copy.checksum is None:
                raise SwapError(f"{key!r} cannot be committed: expected a checksum of its bytes, found none")
            found.append(Entry(name(key), copy.extent, copy.checksum))
        return found


@dataclass(frozen=True, slots=True)
class GenerationsStatistics:
    """Bytes by what they are for, and how many keys and marks there are."""

    keys: int
    marks: int
    current: int
    marked: int
    writing: int
    spare: int


class Generations:
    """The copies of every key in a space. Every method may be called from any thread; none waits for the device.

    The caller starts one write of a key at a time, ends each with `written` or `failed`, and reads no extent it is
    writing.
    """

    def __init__(self, space: SwapSpace) -> None:
        self._space = space
        self._lock = threading.RLock()
        self._current: dict[Hashable, Copy] = {}
        self._writing: dict[Hashable, Extent] = {}
        self._in_place: set[Hashable] = set()  # keys whose current copy is being overwritten
        self._lost: set[Hashable] = set()  # keys whose only copy was spoilt by a write that failed
        self._spares = Spares(space)
        self._marks: list[Mark] = []

    def extent_for_write(self, key: Hashable, nbytes: int) -> Extent:
        """The extent the next bytes of `key` go to: its current one, or another if a mark holds that. Never waits.

        Asked again before `written` or `failed`, it returns the same; for another size SwapError. Raises SwapFullError
        if a copy does not fit.
        """
        nbytes = align_up(nbytes)
        with self._lock:
            extent = self._writing.get(key)
            if extent is not None:
                if extent.nbytes != nbytes:
                    raise SwapError(f"a write of {extent.nbytes} bytes of {key!r} is not ended; found one of {nbytes}")
                return extent
            copy = self._current.get(key)
            if copy is not None and copy.extent.nbytes == nbytes and not self._holders(key, copy):
                extent = copy.extent
                self._in_place.add(key)
            else:
                slot = 1 - copy.extent.slot % 2 if copy is not None else 0
                extent = self._spares.take(key, nbytes) or replace(self.allocate(nbytes), slot=slot)
            self._writing[key] = extent
            return extent

    def written(self, key: Hashable, extent: Extent, checksum: int | None = None) -> None:
        """All bytes of the write to `extent` have been moved: they are the current copy of `key` now."""
        with self._lock:
            self._end_write(key, extent)
            old = self._current.get(key)
            self._current[key] = Copy(extent, checksum)
            self._lost.discard(key)
            if old is not None and old.extent != extent:
                self._supersede(key, old)

    def failed(self, key: Hashable, extent: Extent) -> None:
        """The write to `extent` failed. The copy before it is current still, unless it was being overwritten."""
        with self._lock:
            if self._end_write(key, extent):
                del self._current[key]
                self._lost.add(key)
            self._give_back(key, extent)

    def current(self, key: Hashable) -> Copy:
        """The current copy: extent and checksum. Raises SwapError if there is none."""
        with self._lock:
            copy = self._current.get(key)
            if copy is None or key in self._in_place:
                raise SwapError(
                    f"there is no whole copy of {key!r}: it was not written, or its last write has not ended"
                )
            return copy

    def mark(self, *, empty: bool = False) -> Mark:
        """Protect the current copies of all keys until `release`. Costs a copy of a dictionary.

        `empty`: of none yet, `protect` adds them. Otherwise it raises SwapError while a current copy is being
        overwritten, or if a failed write has spoilt one that has been neither rewritten nor forgotten.
        """
        with self._lock:
            unfit = self._in_place or self._lost
            if unfit and not empty:
                names = ", ".join(repr(key) for key in list(unfit)[:3])
                state = "being overwritten" if self._in_place else "spoilt by a write that failed"
                raise SwapError(f"no mark can be made: {len(unfit)} keys are {state}, such as {names}")
            mark = Mark({} if empty else self._current.copy())
            self._marks.append(mark)
            return mark

    def release(self, mark: Mark) -> None:
        """Protect these copies no longer; those that are neither current nor held by another mark are given up."""
        with self._lock:
            _require_live(mark, self._marks)
            self._marks.remove(mark)
            for key in mark.superseded:
                copy = mark.copies[key]
                if self._current.get(key) is not copy and not self._holders(key, copy):
                    self._give_back(key, copy.extent)

    def restore(self, mark: Mark, key: Hashable | None = None) -> None:
        """Make the marked copies current again, keys and all: undo. With `key`, only that one. The mark stays live.

        Raises SwapError while a write (of that key) has not ended, or if the mark holds no copy of it.
        """
        with self._lock:
            _require_live(mark, self._marks)
            writing = self._writing if key is None else {key} & self._writing.keys()
            if writing:
                raise SwapError(f"{len(writing)} writes have not ended, such as that of {next(iter(writing))!r}")
            if key is not None and key not in mark.copies:
                raise SwapError(f"{key!r} cannot be restored: the mark holds no copy of it")
            keys = {**self._current, **mark.copies} if key is None else [key]
            for each in keys:
                before, kept = self._current.pop(each, None), mark.copies.get(each)
                if kept is not None:
                    self._current[each] = kept
                    for holder in self._holders(each, kept):
                        holder.superseded.discard(each)
                self._lost.discard(each)
                if before is not None and before is not kept:
                    self._supersede(each, before)
            if key is None:
                self._lost.clear()

    def protect(self, mark: Mark, key: Hashable) -> None:
        """Add the current copy of `key` to an open mark, once. Raises SwapError if there is no whole copy."""
        with self._lock:
            _require_live(mark, self._marks)
            copy = self.current(key)
            if mark.copies.setdefault(key, copy) is not copy:
                raise SwapError(f"the mark holds an earlier copy of {key!r}; expected it to be protected once")

    def alive(self) -> int:
        """The most copies that any one key may have now: the current one, and one in each mark that holds another."""
        with self._lock:
            return 1 + sum(bool(mark.superseded) for mark in self._marks)

    def forget(self, key: Hashable) -> None:
        """The key is no longer there; marks still hold what they held. Raises SwapError while a write has not ended."""
        with self._lock:
            if key in self._writing:
                raise SwapError(f"{key!r} cannot be forgotten: a write of it has not ended")
            copy = self._current.pop(key, None)
            self._lost.discard(key)
            self._spares.forget(key)
            if copy is not None:
                self._supersede(key, copy)

    def spares(self, mark: Mark) -> list[tuple[Hashable, Extent]]:
        """The extents that marked keys will have to spare when `mark` is the only one left, each with its key.

        Kept with a commit and claimed again when it is adopted, they leave the space as it was: no fragments.
        """
        with self._lock:
            found = [(key, extent) for key, extent in self._spares.items() if key in mark.copies]
            for older in self._marks:
                given_up = older.superseded & mark.copies.keys() if older is not mark else ()
                found += [(k, older.copies[k].extent) for k in given_up if older.copies[k] is not mark.copies[k]]
            return list(dict.fromkeys(found))  # two marks may hold the same copy

    def adopt(
        self,
        entries: Iterable[Entry],
        key: Callable[[str], Hashable] = str,
        *,
        spares: Iterable[tuple[str, Extent]] = (),
    ) -> Mark:
        """Claim the extents of a commit in a space opened with `keep`, make them current, and return a mark on them.

        `key` turns the text of an entry back into its key. `spares` are extents that keys have to spare, see `spares`.
        Raises SwapError if any of the extents is in use, outside the files, or there twice, and what `key` raises;
        claims nothing then.
        """
        copies: dict[Hashable, Copy] = {}
        extra: list[tuple[Hashable, Extent]] = []
        with self._lock:
            if self._current or self._writing:
                raise SwapError("a commit can only be adopted by generations that hold nothing yet")
            try:
                for entry in entries:
                    own = key(entry.key)
                    if own in copies:
                        raise SwapError(f"{own!r} is there twice")
                    self._space.claim(entry.extent)
                    copies[own] = Copy(entry.extent, entry.checksum)
                for name, extent in spares:
                    own = key(name)  # first: what it raises must find nothing claimed that is not noted
                    self._space.claim(extent)
                    extra.append((own, extent))
            except BaseException:
                for claimed in (*(copy.extent for copy in copies.values()), *(extent for _, extent in extra)):
                    self._space.free(claimed)
                raise
            self._current = copies
            for own, extent in extra:
                self._spares.give(own, extent)
            mark = Mark(copies.copy())
            self._marks.append(mark)
            return mark

    def trim(self) -> int:
        """Give all spares back to the space; return their bytes."""
        with self._lock:
            return self._spares.trim()

    def statistics(self) -> GenerationsStatistics:
        """Where the bytes are."""
        with self._lock:
            current = {id(copy): copy.extent.nbytes for copy in self._current.values()}
            marked = {
                id(copy): copy.extent.nbytes
                for mark in self._marks
                for copy in mark.copies.values()
                if id(copy) not in current
            }
            fresh = [extent for key, extent in self._writing.items() if key not in self._in_place]
            return GenerationsStatistics(
                keys=len(self._current),
                marks=len(self._marks),
                current=sum(current.values()),
                marked=sum(marked.values()),
                writing=sum(extent.nbytes for extent in fresh),
                spare=self._spares.nbytes,
            )

    def allocate(self, nbytes: int) -> Extent:
        """Room in the space for what is kept in no generations; spares are given up for it. Raises SwapFullError.

        `nbytes`: a multiple of `ALIGNMENT`. It is given back to the space itself.
        """
        with self._lock:
            while True:
                try:
                    return self._space.allocate(nbytes)
                except SwapFullError as error:
                    if not self.trim():
                        raise SwapFullError(
                            f"{error}; {len(self._marks)} marks hold copies, each for a commit or a snapshot: commit "
                            "before more is written, which releases the one before, or make room for another copy"
                        ) from error

    def _end_write(self, key: Hashable, extent: Extent) -> bool:
        """Take the write off the list; return whether it was in place."""
        expected = self._writing.get(key)
        if expected is None or expected != extent:
            raise SwapError(f"expected the end of the write of {key!r} to {expected}, found {extent}")
        del self._writing[key]
        in_place = key in self._in_place
        self._in_place.discard(key)
        return in_place

    def _supersede(self, key: Hashable, copy: Copy) -> None:
        """A copy is current no more: note it in all marks that hold it, or give it up."""
        holders = self._holders(key, copy)
        for mark in holders:
            mark.superseded.add(key)
        if not holders:
            self._give_back(key, copy.extent)

    def _holders(self, key: Hashable, copy: Copy) -> list[Mark]:
        return [mark for mark in self._marks if mark.copies.get(key) is copy]

    def _give_back(self, key: Hashable, extent: Extent) -> None:
        if key in self._current:
            self._spares.give(key, extent)
        else:
            self._space.free(extent)


def _require_live(mark: Mark, marks: Iterable[Mark]) -> None:
    if not any(mark is live for live in marks):
        raise SwapError("the mark has been released, or belongs to other generations")
