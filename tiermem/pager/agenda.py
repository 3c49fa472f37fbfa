"""What the update has said that it does next, unit by unit.

Owns the announced groups of pages and which of their pages the update has not come to yet. Does not know the schedule,
nor where a page is. Guarantees that asking whether a page is announced, and ticking one off, cost the same however
many units are announced, and that an agenda which moves on by a unit costs the pages of a unit.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence

from tiermem.pager.page import PageKey

# Pages of a unit in the course of its update that go before the computation's next unit; the rest comes after it.
_FIRST = 16


class _Group:
    """A unit on the agenda: its pages as they were given, and those that the update has not come to yet, in order."""

    __slots__ = ("left", "nbegun", "pages")

    def __init__(self, pages: Sequence[PageKey]) -> None:
        self.pages = pages
        self.left: dict[PageKey, None] = dict.fromkeys(pages)
        self.nbegun = len(self.left)

    def is_just(self, pages: Sequence[PageKey]) -> bool:
        """Whether it is of these very pages, and none of them has been ticked off."""
        return self.pages is pages and len(self.left) == self.nbegun


class Agenda:
    """Groups of pages in the order in which the update comes to them. Used on the pager's loop only."""

    def __init__(self) -> None:
        self._groups: deque[_Group] = deque()
        # The groups in which a page is, in order: so that asking does not depend on how many there are.
        self._groups_of: dict[PageKey, tuple[_Group, ...]] = {}
        self.pages: Container[PageKey] = self._groups_of  # those that the update has still to come to

    def set(self, groups: Sequence[Sequence[PageKey]]) -> set[PageKey]:
        """Announce these groups instead; returns the pages that were announced and are not now, and the reverse.

        Groups announced before, as the same objects in the same order, stay as they are.
        """
        agenda, removed, added = self._groups, set[PageKey](), set[PageKey]()
        while agenda and not (groups and agenda[0].is_just(groups[0])):
            removed.update(self._remove(agenda.popleft()))
        same = 0
        for known, pages in zip(agenda, groups, strict=False):
            if not known.is_just(pages):
                break
            same += 1
        while len(agenda) > same:
            removed.update(self._remove(agenda.pop()))
        for group in groups[same:]:
            added.update(key for key in group if key not in self._groups_of and key not in removed)
            self.extend(group)
        return added.union(key for key in removed if key not in self._groups_of)

    def extend(self, pages: Sequence[PageKey]) -> None:
        """Announce one more group at the end."""
        group = _Group(pages)
        self._groups.append(group)
        for key in group.left:
            self._groups_of[key] = (*self._groups_of.get(key, ()), group)

    def tick_off(self, key: PageKey) -> None:
        """The update has come to this page, if it was announced."""
        groups = self._groups_of.get(key)
        if groups is not None:
            del groups[0].left[key]
            self._put(key, groups[1:])
        while self._groups and not self._groups[0].left:
            self._groups.popleft()

    def portions(self) -> Iterator[Iterable[PageKey]]:
        """The pages left of each group, the first one in two: what goes first, and the rest of it."""
        for index, group in enumerate(self._groups):
            if index == 0:
                yield itertools.islice(group.left, _FIRST)
                yield itertools.islice(group.left, _FIRST, None)
            else:
                yield group.left

    def _remove(self, group: _Group) -> Iterable[PageKey]:
        """Forget a group that is off the agenda; returns the pages that the update had not come to."""
        for key in group.left:
            self._put(key, tuple(other for other in self._groups_of[key] if other is not group))
        return group.left

    def _put(self, key: PageKey, groups: tuple[_Group, ...]) -> None:
        if groups:
            self._groups_of[key] = groups
        else:
            del self._groups_of[key]
