"""The streaming update: units in order, each tile by tile, beside the computation.

Owns the queue of requested updates and the worker's scratch. Does not know when updates are asked for, how the
gradients came about, or where the bytes live. Guarantees that updates of one unit run in the order they were asked
for, that an error fails that unit only and is raised to whoever waits for it, that a half-updated tile is never taken
for a good one, and that no wait outlives the pager's loop.

A unit is one straight line: lease its PARAM page, then for each tile lease, run the kernel on the worker, release. Up
to `depth` tiles are held at once, so that with 2 the next tile is being read while the kernel runs; written tiles
go back to their home by the pager's own doing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from tiermem.errors import ConfigError, InvariantError, TiermemError
from tiermem.optim.kernels import Run, Workspace, adamw_tile
from tiermem.optim.tiles import UnitState, state_planes
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
class UpdaterStatistics:
    """What an updater has done: counts, and the seconds its kernels ran."""

    units: int
    tiles: int
    elements: int
    kernel_seconds: float
    queued: int


@dataclass(slots=True)
class _Entry:
    update: UnitUpdate
    future: Future[None]


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


class Updater:
    """Runs unit updates in order. `start`, `pending` and `hurry` never wait; the waits may come from any thread but the loop's."""

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
        self._pager = pager
        self._units = units
        self._depth = depth
        self._workspace = workspace if workspace is not None else Workspace()
        self._lock = threading.Lock()
        self._queue: deque[_Entry] = deque()
        self._unfinished: dict[int, list[_Entry]] = {}
        self._failed: dict[int, BaseException] = {}
        self._running = False
        self._loop_thread: int | None = None
        self._done = UpdaterStatistics(0, 0, 0, 0.0, 0)

    def start(self, update: UnitUpdate) -> None:
        """Queue an update. Raises the error of an earlier update that failed, of whatever unit."""
        if update.unit not in self._units:
            raise InvariantError(f"unit {update.unit} has no optimizer state")
        self._raise_failed()
        entry = _Entry(update, Future())
        with self._lock:
            self._queue.append(entry)
            self._unfinished.setdefault(update.unit, []).append(entry)
            must_run = not self._running
            self._running = True
        if must_run:
            self._start_running()

    def pending(self, unit: int) -> bool:
        """Whether an update of the unit is queued or running, or has failed, so that `wait` has something to say."""
        with self._lock:
            return unit in self._unfinished or unit in self._failed

    def hurry(self, unit: int) -> None:
        """Move the unit's queued updates to the front, in their order."""
        with self._lock:
            wanted = [entry for entry in self._queue if entry.update.unit == unit]
            others = [entry for entry in self._queue if entry.update.unit != unit]
            self._queue = deque(wanted + others)

    def wait(self, unit: int) -> None:
        """Wait for the unit's updates. Raises the error of one that failed, every time."""
        with self._lock:
            entries = list(self._unfinished.get(unit, ()))
        self._wait_for(entries)
        with self._lock:
            error = self._failed.get(unit)
        if error is not None:
            raise error

    def wait_all(self) -> None:
        """Wait for all updates. Raises the first error, after all have ended."""
        with self._lock:
            entries = [entry for entries in self._unfinished.values() for entry in entries]
        self._wait_for(entries)
        self._raise_failed()

    def statistics(self) -> UpdaterStatistics:
        """What has been done so far."""
        with self._lock:
            done = self._done
            queued = sum(len(entries) for entries in self._unfinished.values())
        return UpdaterStatistics(done.units, done.tiles, done.elements, done.kernel_seconds, queued)

    # The queue

    def _wait_for(self, entries: Sequence[_Entry]) -> None:
        if entries and threading.get_ident() == self._loop_thread:
            raise InvariantError("an update was waited for on the pager's loop, which has to carry it out")
        for entry in entries:
            self._pager.wait_for(entry.future)

    def _raise_failed(self) -> None:
        with self._lock:
            error = next(iter(self._failed.values()), None)
        if error is not None:
            raise error

    def _start_running(self) -> None:
        try:
            task = self._pager.start_task(self._run_queue())
        except BaseException as error:
            self._end_all(error)
            raise
        task.add_done_callback(self._run_ended)

    def _run_ended(self, task: Future[None]) -> None:
        """The runner ends by itself only with an empty queue; otherwise the loop was stopped under it."""
        error = TiermemError("the pager ended before the queued updates") if task.cancelled() else task.exception()
        if error is not None:
            self._end_all(error)

    def _end_all(self, error: BaseException) -> None:
        with self._lock:
            entries = [entry for entries in self._unfinished.values() for entry in entries]
            self._queue.clear()
            self._running = False
        for entry in entries:
            self._end(entry, error)

    def _end(self, entry: _Entry, error: BaseException | None) -> None:
        unit = entry.update.unit
        with self._lock:
            entries = self._unfinished.get(unit, [])
            if entry in entries:
                entries.remove(entry)
            if not entries:
                self._unfinished.pop(unit, None)
            if error is not None:
                self._failed.setdefault(unit, error)
        # Never with the error: whoever waits reads it from `_failed`, however many wait and however late.
        if not entry.future.done():
            entry.future.set_result(None)

    async def _run_queue(self) -> None:
        self._loop_thread = threading.get_ident()
        while True:
            with self._lock:
                if not self._queue:
                    self._running = False
                    return
                entry = self._queue.popleft()
                error = self._failed.get(entry.update.unit)
            if error is None:
                try:
                    await self._update_unit(entry.update)
                except Exception as raised:  # noqa: BLE001 - recorded, and raised to whoever waits for the unit
                    error = raised
            self._end(entry, error)

    # One unit

    async def _update_unit(self, update: UnitUpdate) -> None:
        state = self._units[update.unit]
        work = self._plan(state, update)
        if work:
            key = PageKey(update.unit, Kind.PARAM)
            param = await self._pager.acquire([key], Intent.WRITE)
            try:
                nbytes = state.numel * state.dtype.itemsize
                flat = param.tensor(key)[:nbytes].view(state.dtype)
                await self._update_tiles(state, update, flat, work)
                del flat
            except BaseException as error:
                param.fail(error)
                raise
            param.release()
        if update.discard_gradients:
            keys = [PageKey(update.unit, Kind.GRAD, tile) for tile in range(state.tiles)]
            self._pager.start_discard([key for key in keys if self._pager.is_written(key)])
        with self._lock:
            done = self._done
            self._done = UpdaterStatistics(done.units + 1, done.tiles, done.elements, done.kernel_seconds, 0)

    def _plan(self, state: UnitState, update: UnitUpdate) -> list[_Work]:
        """The tiles in which some parameter has a gradient. A tile in which none has is skipped entirely."""
        runs: dict[int, list[Run]] = {}
        for item in update.segments:
            for cut in state.cuts(item.segment):
                runs.setdefault(cut.tile, []).append(Run(cut.begin_in_tile, cut.length, item.settings))
        for tile in runs:
            if not self._pager.is_written(PageKey(state.unit, Kind.GRAD, tile)):
                raise InvariantError(f"unit {state.unit} is to be updated, but its gradient tile {tile} was never written")
        return [_Work(tile, tuple(runs[tile])) for tile in sorted(runs)]

    async def _update_tiles(
        self, state: UnitState, update: UnitUpdate, flat: torch.Tensor, work: Sequence[_Work]
    ) -> None:
        window = _Window(self._depth)
        loader = asyncio.ensure_future(self._load_all(state, work, window))
        try:
            for _ in work:
                loaded = await window.next()
                try:
                    seconds = await self._pager.run_worker(self._run_kernel, state, update, flat, loaded)
                except BaseException as error:
                    loaded.fail(error)
                    raise
                loaded.release()
                if update.discard_gradients:
                    self._pager.start_discard([PageKey(state.unit, Kind.GRAD, loaded.work.tile)])
                window.leave()
                self._count(loaded.work, seconds)
        except BaseException as error:
            window.close()
            # Not cancelled: a lease granted to a cancelled wait would be held for ever.
            await loader
            window.fail_waiting(error)
            raise

    async def _load_all(self, state: UnitState, work: Sequence[_Work], window: _Window) -> None:
        for item in work:
            if not await window.enter():
                return
            try:
                window.put(await self._load(state, item))
            except Exception as error:  # noqa: BLE001 - raised by the consumer, `window.next`
                window.put(error)
                return

    async def _load(self, state: UnitState, work: _Work) -> _Loaded:
        grad = await self._pager.acquire([PageKey(state.unit, Kind.GRAD, work.tile)], Intent.READ)
        try:
            key = PageKey(state.unit, Kind.STATE, work.tile)
            fresh = not self._pager.is_written(key)
            held = await self._pager.acquire([key], Intent.FRESH if fresh else Intent.WRITE)
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
        planes = state_planes(buffer, state.dtype, length)
        if loaded.fresh:
            buffer.zero_()
            if planes.master is not None:
                planes.master.copy_(parameter)
        adamw_tile(parameter, grad.view(state.dtype), planes, loaded.work.runs, self._workspace, update.grad_scale)
        return time.perf_counter() - started

    def _count(self, work: _Work, seconds: float) -> None:
        elements = sum(run.length for run in work.runs)
        with self._lock:
            done = self._done
            self._done = UpdaterStatistics(
                done.units, done.tiles + 1, done.elements + elements, done.kernel_seconds + seconds, 0
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
