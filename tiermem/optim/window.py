"""A tile of a unit on its way through the update, and the queue between who leases tiles and who works on them.

Owns the records of a tile that is leased (`Loaded`) and the window that limits how many are held. Does not
know pages, kernels or which tiles there are. Guarantees that what was loaded and never used is given back, and that
state which was never filled in is then declared garbage.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tiermem.optim.kernels import Run
from tiermem.pager.lease import Lease


@dataclass(frozen=True, slots=True)
class Work:
    """One tile of one unit's update."""

    tile: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A tile whose pages are leased; `fresh` state has undefined contents and begins as zeros.

    `param` is held until the last tile is through.
    """

    work: Work
    param: Lease
    state: Lease
    grad: Lease
    fresh: bool

    def release(self) -> None:
        """Give the tile back."""
        self.grad.release()
        self.state.release()

    def fail(self, error: BaseException) -> None:
        """Give the tile back and declare its state garbage."""
        self.grad.release()
        self.state.fail(error)

    def hand_over(self) -> None:
        """See `Lease`, for all of its pages."""
        for held in (self.param, self.grad, self.state):
            held.hand_over()


class Window:
    """Hands loaded tiles from the loader to the kernel; lets the loader hold at most `depth`. On the loop only."""

    def __init__(self, depth: int) -> None:
        self._room = asyncio.Semaphore(depth)
        self._loaded: asyncio.Queue[Loaded | BaseException] = asyncio.Queue()
        self._closed = False

    async def enter(self) -> bool:
        """Wait for room for one more tile; False when no more are wanted."""
        await self._room.acquire()
        return not self._closed

    def put(self, item: Loaded | BaseException) -> None:
        """Hand over a tile, or the error that ends loading or use."""
        self._loaded.put_nowait(item)

    async def next(self) -> Loaded:
        """The next tile. Raises the error that was put."""
        item = await self._loaded.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def leave(self) -> None:
        """A tile has been given back."""
        self._room.release()

    def close(self) -> None:
        """Want no more tiles: `enter` is False from now on."""
        self._closed = True
        self._room.release()

    def fail_waiting(self, error: BaseException) -> None:
        """Give back what was loaded and never used; state that was never filled in is garbage."""
        while not self._loaded.empty():
            item = self._loaded.get_nowait()
            if isinstance(item, Loaded):
                if item.fresh:
                    item.fail(error)
                else:
                    item.release()
