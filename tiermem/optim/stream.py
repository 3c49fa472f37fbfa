"""The streaming update of one unit, tile by tile.

Owns which tiles of a unit are touched and how many are held at once. Does not know the queue of units, nor where the
bytes live: it leases pages and runs the kernel on the pager's worker. Guarantees that a half-updated tile is never
taken for a good one, that tiles without gradients are not read, and that every lease is given back, however it ends.

A unit is one straight line: lease its PARAM page, then for each tile lease, run the kernel, release. Up to `depth`
tiles are held at once, so that with 2 the next tile is being read while the kernel runs; written tiles go back to
their home by the pager's own doing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from tiermem.errors import ConfigError, InvariantError
from tiermem.optim.kernels import Run, Workspace, adamw_tile
from tiermem.optim.planes import tile_planes
from tiermem.optim.shares import Shares, update_threads
from tiermem.optim.tiles import UnitState
from tiermem.optim.updates import UnitUpdate
from tiermem.pager.page import Intent, Kind, Lane, PageKey

P = ParamSpec("P")
T = TypeVar("T")


class HeldPages(Protocol):
    """A lease, as far as the update needs it."""

    def tensor(self, key: PageKey) -> torch.Tensor:
        """The bytes of a page."""

    def release(self) -> None:
        """Give the hold back."""

    def fail(self, error: BaseException) -> None:
        """Give the hold back and declare the contents garbage."""


class UpdatePager(Protocol):
    """The part of the pager that the update uses."""

    async def acquire(self, keys: Sequence[PageKey], intent: Intent, *, lane: Lane = Lane.UPDATE) -> HeldPages:
        """A lease, awaited on the loop."""

    def set_agenda(self, groups: Sequence[Sequence[PageKey]]) -> None:
        """Say what the update does next, unit by unit. On the loop only."""

    def extend_agenda(self, group: Sequence[PageKey]) -> None:
        """Say that the update will do one more unit. Any thread."""

    async def run_worker(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a kernel on the update worker."""

    def start_task(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop."""

    def wait_for(self, future: Future[T]) -> T:
        """Wait for a future on behalf of the computation."""

    def start_discard(self, keys: Sequence[PageKey]) -> None:
        """Forget the contents of pages."""

    def is_written(self, key: PageKey) -> bool:
        """Whether the page has contents."""


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """What the updates have done: counts, and the seconds the kernels ran."""

    units: int = 0
    tiles: int = 0
    elements: int = 0
    kernel_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Work:
    """One tile of one unit's update."""

    tile: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A tile whose pages are leased; `fresh` state has undefined contents and begins as zeros."""

    work: _Work
    state: HeldPages
    grad: HeldPages
    fresh: bool

    def release(self) -> None:
        self.grad.release()
        self.state.release()

    def fail(self, error: BaseException) -> None:
        self.grad.release()
        self.state.fail(error)


class UnitStream:
    """Updates units, one at a time, on the pager's loop."""

    def __init__(
        self,
        pager: UpdatePager,
        units: Mapping[int, UnitState],
        *,
        depth: int = 2,
        workspace: Workspace | None = None,
    ) -> None:
        if depth < 1:
            raise ConfigError(f"an update holds at least one tile at a time, found depth={depth}")
        self.pager = pager
        self.units = units
        self._depth = depth
        self._workspace = workspace if workspace is not None else Workspace(shares=Shares(update_threads()))
        self._lock = threading.Lock()
        self._done = StreamStatistics()

    def statistics(self) -> StreamStatistics:
        """What has been done so far. Any thread."""
        with self._lock:
            return self._done

    def close(self) -> None:
        """End the threads that share the kernel's work; call it when no update runs any more."""
        self._workspace.shares.close()

    def keys(self, update: UnitUpdate) -> list[PageKey]:
        """The pages that an update touches, in order."""
        state = self.units[update.unit]
        tiles = sorted({cut.tile for item in update.segments for cut in state.cuts(item.segment)})
        kinds = (Kind.GRAD, Kind.STATE)
        return [PageKey(update.unit, Kind.PARAM)] + [PageKey(update.unit, kind, t) for t in tiles for kind in kinds]

    async def run(self, update: UnitUpdate) -> None:
        """Update one unit. Raises the error of a page, of the kernel, or `InvariantError` for a missing gradient."""
        state = self.units[update.unit]
        work = self._plan(state, update)
        if work:
            key = PageKey(update.unit, Kind.PARAM)
            if update.protection is not None:
                update.protection.prepare([page for page in self.keys(update) if page.kind is not Kind.GRAD])
                await update.protection.protect([key])
            param = await self.pager.acquire([key], Intent.WRITE)
            try:
                begin, nbytes = state.param_start * state.dtype.itemsize, state.numel * state.dtype.itemsize
                flat = param.tensor(key)[begin : begin + nbytes].view(state.dtype)
                await self._update_tiles(state, update, flat, work)
                del flat
            except BaseException as error:
                param.fail(error)
                raise
            param.release()
        self._discard(update, range(state.tiles))
        self._count(units=1)

    def _plan(self, state: UnitState, update: UnitUpdate) -> list[_Work]:
        """The tiles in which some parameter has a gradient. A tile in which none has is skipped entirely."""
        runs: dict[int, list[Run]] = {}
        for item in update.segments:
            for cut in state.cuts(item.segment):
                runs.setdefault(cut.tile, []).append(Run(cut.begin_in_tile, cut.length, item.settings))
        for tile in runs:
            if not self.pager.is_written(PageKey(state.unit, Kind.GRAD, tile)):
                raise InvariantError(
                    f"unit {state.unit} is to be updated, but its gradient tile {tile} was never written"
                )
        return [_Work(tile, tuple(runs[tile])) for tile in sorted(runs)]

    async def _update_tiles(
        self, state: UnitState, update: UnitUpdate, flat: torch.Tensor, work: Sequence[_Work]
    ) -> None:
        if len(work) == 1:
            await self._use(state, update, flat, await self._load(state, update, work[0]))
            return
        window = _Window(self._depth)
        loader = asyncio.ensure_future(self._load_all(state, update, work, window))
        try:
            for _ in work:
                await self._use(state, update, flat, await window.next())
                window.leave()
        except BaseException as error:
            window.close()
            # Not cancelled: a lease granted to a cancelled wait would be held for ever.
            await asyncio.wait([loader])
            window.fail_waiting(error)
            raise

    async def _use(self, state: UnitState, update: UnitUpdate, flat: torch.Tensor, loaded: _Loaded) -> None:
        """Run the kernel on a tile that is held, and give it back."""
        try:
            seconds = await self.pager.run_worker(self._run_kernel, state, update, flat, loaded)
        except BaseException as error:
            loaded.fail(error)
            raise
        loaded.release()
        self._discard(update, [loaded.work.tile])
        self._count(tiles=1, elements=sum(run.length for run in loaded.work.runs), seconds=seconds)

    def _discard(self, update: UnitUpdate, tiles: Iterable[int]) -> None:
        """Forget gradient tiles that nobody wants any more."""
        keys = [PageKey(update.unit, Kind.GRAD, tile) for tile in tiles if update.discard_gradients]
        written = [key for key in keys if self.pager.is_written(key)]
        if update.protection is not None:
            update.protection.discard(written)
        elif written:
            self.pager.start_discard(written)

    async def _load_all(self, state: UnitState, update: UnitUpdate, work: Sequence[_Work], window: _Window) -> None:
        for item in work:
            if not await window.enter():
                return
            try:
                window.put(await self._load(state, update, item))
            except Exception as error:  # noqa: BLE001 - raised by the consumer, `window.next`
                window.put(error)
                return

    async def _load(self, state: UnitState, update: UnitUpdate, work: _Work) -> _Loaded:
        grad = await self.pager.acquire([PageKey(state.unit, Kind.GRAD, work.tile)], Intent.READ)
        try:
            key = PageKey(state.unit, Kind.STATE, work.tile)
            if update.protection is not None:
                await update.protection.protect([key])
            fresh = not self.pager.is_written(key)
            held = await self.pager.acquire([key], Intent.FRESH if fresh else Intent.WRITE)
        except BaseException:
            grad.release()
            raise
        return _Loaded(work, held, grad, fresh)

    def _run_kernel(self, state: UnitState, update: UnitUpdate, flat: torch.Tensor, loaded: _Loaded) -> float:
        """On the worker: the only place where bytes change. Returns the seconds it took."""
        started = time.perf_counter()
        tile, length = loaded.work.tile, state.tile_length(loaded.work.tile)
        begin = tile * state.tile_numel
        parameter = flat[begin : begin + length]
        grad = loaded.grad.tensor(PageKey(state.unit, Kind.GRAD, tile))[: length * state.dtype.itemsize]
        buffer = loaded.state.tensor(PageKey(state.unit, Kind.STATE, tile))
        planes = tile_planes(buffer, state, tile)
        if loaded.fresh:
            buffer.zero_()
            if planes.master is not None:
                planes.master.copy_(parameter)
        adamw_tile(parameter, grad.view(state.dtype), planes, loaded.work.runs, self._workspace, update.grad_scale)
        return time.perf_counter() - started

    def _count(self, *, units: int = 0, tiles: int = 0, elements: int = 0, seconds: float = 0.0) -> None:
        with self._lock:
            done = self._done
            self._done = StreamStatistics(
                done.units + units, done.tiles + tiles, done.elements + elements, done.kernel_seconds + seconds
            )


class _Window:
    """Hands loaded tiles from the loader to the kernel; lets the loader hold at most `depth`. On the loop only."""

    def __init__(self, depth: int) -> None:
        self._room = asyncio.Semaphore(depth)
        self._loaded: asyncio.Queue[_Loaded | Exception] = asyncio.Queue()
        self._closed = False

    async def enter(self) -> bool:
        """Wait for room for one more tile; False when no more are wanted."""
        await self._room.acquire()
        return not self._closed

    def put(self, item: _Loaded | Exception) -> None:
        """Hand over a tile, or the error that ends loading."""
        self._loaded.put_nowait(item)

    async def next(self) -> _Loaded:
        """The next tile. Raises the loader's error."""
        item = await self._loaded.get()
        if isinstance(item, Exception):
            raise item
        return item

    def leave(self) -> None:
        """A tile has been given back."""
        self._room.release()

    def close(self) -> None:
        """No more tiles are wanted."""
        self._closed = True
        self._room.release()

    def fail_waiting(self, error: BaseException) -> None:
        """Give back what was loaded and never used; state that was never filled in is garbage."""
        while not self._loaded.empty():
            item = self._loaded.get_nowait()
            if isinstance(item, _Loaded):
                if item.fresh:
                    item.fail(error)
                else:
                    item.release()
