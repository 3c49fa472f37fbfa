"""A pager in memory that keeps the rules of the real one and makes every stale read visible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Self

import torch

from tiermem.errors import InvariantError
from tiermem.memory.arena import Frame
from tiermem.pager.page import Intent, Kind, Lane, PageKey
from tiermem.pager.pager import Pager
from tiermem.zero3.engine import viewers

ROUND = 4096
POISON = 0xFF  # a NaN in every floating-point dtype
UNVIEWED = viewers(torch.empty(1))


class MemoryFrame:
    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.full((-(-nbytes // ROUND) * ROUND,), POISON, dtype=torch.uint8)


class MemoryLease:
    def __init__(self, pager: MemoryPager, keys: tuple[PageKey, ...], intent: Intent) -> None:
        self.pager, self.keys, self.intent, self.released = pager, keys, intent, False

    def tensor(self, key: PageKey) -> torch.Tensor:
        if self.released or key not in self.keys:
            raise InvariantError(f"{key} is not leased here")
        return self.pager.frames[key].tensor[: self.pager.sizes[key]]

    def release(self) -> None:
        if not self.released:
            self.released = True
            self.pager.give_back(self)

    def fail(self, error: BaseException) -> None:
        for key in self.keys:
            self.pager.errors[key] = error
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class PromptLease:
    """What was asked for is there at once; what nobody takes, and was to be written anew, has no contents."""

    def __init__(self, pager: MemoryPager, keys: tuple[PageKey, ...], intent: Intent) -> None:
        self._lease = pager.lease(keys, intent)

    def wait(self) -> MemoryLease:
        return self._lease

    def has_raised(self, _: BaseException) -> bool:
        return False  # what it is refused with is raised where it is asked for

    def give_up(self) -> None:
        if not self._lease.released:
            self._lease.release()
            if self._lease.intent is Intent.FRESH:
                self._lease.pager.start_discard(self._lease.keys)


class MemoryPager:
    """Pages live in `home`; a lease copies them into a fresh frame, which is poisoned when the last lease goes."""

    def __init__(self) -> None:
        self.sizes: dict[PageKey, int] = {}
        self.home: dict[PageKey, torch.Tensor] = {}
        self.frames: dict[PageKey, MemoryFrame] = {}
        self.leases: dict[PageKey, list[MemoryLease]] = {}
        self.errors: dict[PageKey, BaseException] = {}
        self.graveyard: list[MemoryFrame] = []
        self.grants: Counter[tuple[Kind, Intent]] = Counter()
        self.most_units = 0
        self.asked_ahead: list[tuple[PageKey, ...]] = []

    def add_page(self, key: PageKey, nbytes: int) -> None:
        if key in self.sizes:
            raise InvariantError(f"{key} exists")
        self.sizes[key] = nbytes

    def lease(self, keys: Sequence[PageKey], intent: Intent, *, lane: Lane = Lane.COMPUTE) -> MemoryLease:
        for key in keys:
            if key in self.errors:
                raise self.errors[key]
            if key not in self.sizes:
                raise InvariantError(f"{key} is unknown")
            if intent is not Intent.FRESH and key not in self.home:
                raise InvariantError(f"{key} was never written")
            held = self.leases.get(key, [])
            if held and (intent is not Intent.READ or any(lease.intent is not Intent.READ for lease in held)):
                raise InvariantError(f"{key} is leased: this would wait for ever")
        lease = MemoryLease(self, tuple(keys), intent)
        for key in keys:
            self.leases.setdefault(key, []).append(lease)
            self.grants[key.kind, intent] += 1
            if key not in self.frames:
                self.frames[key] = MemoryFrame(self.sizes[key])
                if intent is not Intent.FRESH:
                    self.frames[key].tensor[: self.sizes[key]] = self.home[key]
            if intent is Intent.FRESH:
                self.frames[key].tensor.fill_(POISON)
            if intent is not Intent.READ:
                self.home[key] = self.frames[key].tensor[: self.sizes[key]]
        self.most_units = max(self.most_units, len(self.leased(Kind.PARAM)))
        return lease

    def start_lease(self, keys: Sequence[PageKey], intent: Intent) -> PromptLease:
        self.asked_ahead.append(tuple(keys))
        return PromptLease(self, tuple(keys), intent)

    def give_back(self, lease: MemoryLease) -> None:
        for key in lease.keys:
            self.leases[key].remove(lease)
            if self.leases[key]:
                continue
            frame = self.frames.pop(key)
            if lease.intent is not Intent.READ and key in self.home:
                self.home[key] = frame.tensor[: self.sizes[key]].clone()
            frame.tensor.fill_(POISON)
            self.graveyard.append(frame)  # the address is not used again, as if the arena were large

    def leased(self, kind: Kind) -> list[PageKey]:
        return [key for key, leases in self.leases.items() if leases and key.kind is kind]

    def start_discard(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self.home.pop(key, None)

    def is_written(self, key: PageKey) -> bool:
        return key in self.home


def save_all(pager: Pager) -> None:
    """Wait until SWAP holds every page."""
    pager.wait_for(pager.start_save(list(Kind), lambda: None))


def is_viewed(frame: Frame) -> bool:
    """Whether a tensor other than the frame's own (a view, or autograd's copy of one) looks at the frame."""
    return viewers(frame.tensor) > UNVIEWED
