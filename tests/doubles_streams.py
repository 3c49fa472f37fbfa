"""A device on which threads have streams of their own, and that notices what is used without being waited for.

A thread has one, until it takes another (`Streams.enter`). Nothing really runs late. Each counts what it is asked for,
and knows how far each other had come according to the fences it has been held by. Whoever uses bytes that another
stream used, and does not know of that use, would on a real device have used them too early, unless both only read. What
the host itself has waited for (a copy that ended) is known to everybody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tiermem.memory.arena import Frame
from tiermem.memory.copies import Copy, CopyLine, Done, Flight
from tiermem.memory.devices import SimulatedDevice, copy_whole
from tiermem.memory.links import Link
from tiermem.memory.slab import SlabArena, TensorSlab
from tiermem.memory.tiers import Tier
from tiermem.pager.lease import Lease
from tiermem.pager.page import PageKey


class Streams:
    """Who has asked for what, and who knows."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entered = threading.local()
        self.known: dict[int, dict[int, int]] = {}
        # First and last byte of what was used: by thread and whether it wrote, its count and what it did.
        self.used: dict[tuple[int, int], dict[tuple[int, bool], tuple[int, str]]] = {}
        self.checks = 0
        self.early: list[str] = []

    def current(self) -> int:
        """The calling thread's stream."""
        return getattr(self.entered, "stream", threading.get_ident())

    def enter(self, stream: int) -> None:
        """Have the calling thread on this stream from now on."""
        self.entered.stream = stream

    def wait_for(self, stream: int) -> None:
        """Have the calling thread's stream wait for all that was asked of another one."""
        with self.lock:
            self.hold(dict(self.known.get(stream, {})))

    def own(self) -> dict[int, int]:
        return self.known.setdefault(self.current(), {})

    def hold(self, known: dict[int, int]) -> None:
        """Wait for what was known somewhere."""
        own = self.own()
        for stream, count in known.items():
            own[stream] = max(own.get(stream, 0), count)

    def use(self, values: torch.Tensor, what: str, *, writes: bool = True) -> None:
        me, begin = self.current(), values.data_ptr()
        end = begin + values.numel() * values.element_size()
        with self.lock:
            own = self.own()
            for (low, high), users in self.used.items():
                if low < end and begin < high:
                    for (user, wrote), (count, before) in users.items():
                        if user == me or not (writes or wrote):
                            continue
                        self.checks += 1
                        if own.get(user, 0) < count:
                            self.early.append(f"{what} did not wait for {before}")
            own[me] = own.get(me, 0) + 1
            self.used.setdefault((begin, end), {})[me, writes] = (own[me], what)

    def forget(self, values: torch.Tensor) -> None:
        """The host has waited for everything that was done to these bytes."""
        begin = values.data_ptr()
        with self.lock:
            for low, high in [span for span in self.used if begin <= span[0] and span[1] <= begin + values.numel()]:
                del self.used[low, high]


class StreamFence:
    """What the calling thread has asked for, and what that has waited for."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        with streams.lock:
            self.known = dict(streams.own())

    def passed(self) -> bool:
        return False

    def hold(self) -> None:
        with self.streams.lock:
            self.streams.hold(self.known)


class StreamSlab(TensorSlab):
    def __init__(self, tensor: torch.Tensor, streams: Streams) -> None:
        super().__init__(tensor)
        self.streams = streams

    def fence(self) -> StreamFence:
        return StreamFence(self.streams)


class _Arrived:
    def __init__(self, copy: Copy, then: Callable[[], None]) -> None:
        self.copy, self.then = copy, then

    def remaining(self) -> float:
        return 0.0

    def land(self) -> None:
        copy_whole(self.copy)
        self.then()


class StreamDevice(SimulatedDevice):
    """See above. `streams.early`: what came too early."""

    def __init__(self) -> None:
        super().__init__(Link())
        self.streams = Streams()
        self.followed: int | None = None
        self.lines = [CopyLine(f"copy-{up}", partial(self._launch, bool(up))) for up in range(2)]

    def make_arena(self, nbytes: int, *, poison: bool) -> SlabArena:
        return SlabArena(StreamSlab(torch.empty(nbytes, dtype=torch.uint8), self.streams), Tier.DEVICE, poison=poison)

    def start_copy(self, source: Frame, target: Frame, nbytes: int, *, up: bool, urgent: bool, done: Done) -> Copy:
        return self.lines[up].start(source, target, nbytes, urgent=urgent, done=done)

    def follow(self) -> None:
        before, self.followed = self.followed, self.streams.current()
        if before is not None:
            self.streams.wait_for(before)

    def close(self) -> None:
        super().close()
        for line in self.lines:
            line.close()

    def _launch(self, up: bool, copy: Copy) -> Flight:
        for fence in (*copy.source.fences, *copy.target.fences):
            fence.hold()
        frame = copy.target if up else copy.source
        self.streams.use(frame.tensor, "a copy up" if up else "a copy down", writes=up)
        return _Arrived(copy, partial(self.streams.forget, frame.tensor))

    def watch_leases(self, arena: SlabArena) -> Callable[[Lease, PageKey], torch.Tensor]:
        """To be put in the place of `Lease.tensor`: notes the use of frames in `arena`, as the lease allows."""
        whole, begin = Lease.tensor, arena._slab._tensor.data_ptr()

        def tensor(lease: Lease, key: PageKey) -> torch.Tensor:
            found = whole(lease, key)
            if begin <= found.data_ptr() < begin + arena.capacity:
                leased = next(page for page in lease.pages if page.key == key)
                self.streams.use(found, f"{key}", writes=leased.exclusive)
            return found

        return tensor

    def watch(self, owner: Any, name: str, *places: int) -> Callable[..., Any]:
        """A method of `owner` that notes the use of the tensors among its arguments before it does its work."""
        method = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            for place in places:
                self.streams.use(arguments[place], f"{name} ({place})")
            return method(*arguments)

        return watched
