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
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tiermem.errors import ConfigError, InvariantError
from tiermem.optim.kernels import Run, Workspace, adamw_tile
from tiermem.optim.planes import tile_planes
from tiermem.optim.shares import Shares, update_threads
from tiermem.optim.tiles import UnitState, aligned
from tiermem.optim.updates import UnitUpdate
from tiermem.optim.window import Loaded, Window, Work
from tiermem.pager.lease import Lease
from tiermem.pager.page import Intent, Kind, PageKey
from tiermem.pager.pager import Pager


@functools.lru_cache(maxsize=1 << 12)
def _keys(unit: int, tiles: tuple[int, ...]) -> tuple[PageKey, ...]:
    kinds = (Kind.GRAD, Kind.STATE)
    return PageKey(unit, Kind.PARAM), *(PageKey(unit, kind, tile) for tile in tiles for kind in kinds)


def begin_thread() -> None:
    """Do nothing: the first kernel, with which the worker's thread begins."""


@dataclass(frozen=True, slots=True)
class DeviceKernels:
    """Which units are updated on a device.

    Attributes:
        units: their numbers.
        device: where their pages are while they are updated.
        enter: called once by the thread that runs kernels, before it asks anything of the device.
        slice_numel: elements that are updated at a time, at most.
    """

    units: frozenset[int]
    device: torch.device
    enter: Callable[[], None]
    slice_numel: int


@dataclass(frozen=True, slots=True)
class UpdateStatistics:
    """How many units and tiles were updated; `device_tiles`: those of the tiles that were updated on a device.

    `queued`: how many updates are queued or running.
    """

    units: int = 0
    tiles: int = 0
    device_tiles: int = 0
    queued: int = 0


class UnitStream:
    """Updates units, one at a time, on the pager's loop."""

    def __init__(
        self,
        pager: Pager,
        units: Mapping[int, UnitState],
        *,
        depth: int = 2,
        workspace: Workspace | None = None,
        on_device: DeviceKernels | None = None,
    ) -> None:
        """`depth`: tiles held at once of a unit that is updated in host memory. `on_device`: which units are not."""
        if depth < 1:
            raise ConfigError(f"an update holds at least one tile at a time, found depth={depth}")
        self.pager = pager
        self.units = units
        self._depth = depth
        self._workspace = workspace if workspace is not None else Workspace(shares=Shares(update_threads()))
        self._on_device = on_device
        self._device_workspace: Workspace | None = None  # made on the worker, whose stream its memory then belongs to
        self.done = UpdateStatistics()
        """What has been done so far (`queued` is not known here); replaced as a whole, on the loop only."""

    def close(self) -> None:
        """End the threads that share the kernel's work; call it when no update runs any more."""
        self._workspace.shares.close()
        self._device_workspace = None  # memory of a device, and an optimizer that is kept keeps this

    def prepare(self) -> None:
        """Have the thread begun that runs kernels, and the kernel compiled, if some unit has use for that. Waits.

        Raises TiermemError where the system allows no more threads: now, while no page is leased that would be lost.
        """
        self.pager.start_task(self.pager.run_worker(begin_thread)).result()
        self._workspace.prepare(state for state in self.units.values() if not self._is_on_device(state.unit))

    def keys(self, update: UnitUpdate) -> list[PageKey]:
        """The pages that an update touches, in order."""
        state = self.units[update.unit]
        if state.tiles == 1:
            return list(_keys(update.unit, (0,) if any(item.segment.numel for item in update.segments) else ()))
        tiles = sorted({cut.tile for item in update.segments for cut in state.cuts(item.segment)})
        return list(_keys(update.unit, tuple(tiles)))

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
                await self._update_tiles(state, update, param, work)
            except BaseException as error:
                param.fail(error)
                raise
            param.release()
        self._discard(update, range(state.tiles))
        self._count(units=1)

    def _plan(self, state: UnitState, update: UnitUpdate) -> list[Work]:
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
        return [Work(tile, tuple(runs[tile])) for tile in sorted(runs)]

    async def _update_tiles(self, state: UnitState, update: UnitUpdate, param: Lease, work: Sequence[Work]) -> None:
        if len(work) == 1 or self._is_on_device(state.unit):
            # On a device a tile in hand is enough: a kernel is asked for and not waited for.
            for item in work:
                await self._use(state, update, await self._load(state, update, param, item))
            return
        window = Window(self._depth)
        tasks = [asyncio.ensure_future(self._load_all(state, update, param, work, window))]
        try:
            for number in range(len(work)):
                loaded = await window.next()
                tasks.append(asyncio.ensure_future(self._use_and_leave(state, update, loaded, window)))
                # A kernel is asked for before the one before it is through: the worker goes from one to the other.
                if number:
                    await tasks[-2]
            await tasks[-1]
        except BaseException as error:
            window.close()
            # Not cancelled: a lease granted to a cancelled wait would be held for ever.
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()  # looked at: the first one is raised
            window.fail_waiting(error)
            raise

    async def _use_and_leave(self, state: UnitState, update: UnitUpdate, loaded: Loaded, window: Window) -> None:
        try:
            await self._use(state, update, loaded)
        except BaseException as error:
            window.put(error)  # whoever waits for the next tile may do so for want of this one's room
            raise
        window.leave()

    async def _use(self, state: UnitState, update: UnitUpdate, loaded: Loaded) -> None:
        """Run the kernel on a tile that is held, and give it back."""
        on_device = self._is_on_device(state.unit)
        try:
            kernel = self._run_on_device if on_device else self._run_kernel
            await self.pager.run_worker(kernel, state, update, loaded)
        except BaseException as error:
            loaded.fail(error)
            raise
        loaded.release()
        self._discard(update, [loaded.work.tile])
        self._count(tiles=1, device_tiles=int(on_device))

    def _discard(self, update: UnitUpdate, tiles: Iterable[int]) -> None:
        """Forget gradient tiles that nobody wants any more."""
        keys = [PageKey(update.unit, Kind.GRAD, tile) for tile in tiles if update.discard_gradients]
        written = [key for key in keys if self.pager.is_written(key)]
        if update.protection is not None:
            update.protection.discard(written)
        elif written:
            self.pager.start_discard(written)

    async def _load_all(
        self, state: UnitState, update: UnitUpdate, param: Lease, work: Sequence[Work], window: Window
    ) -> None:
        for item in work:
            if not await window.enter():
                return
            try:
                window.put(await self._load(state, update, param, item))
            except Exception as error:  # noqa: BLE001 - raised by the consumer, `window.next`
                window.put(error)
                return

    async def _load(self, state: UnitState, update: UnitUpdate, param: Lease, work: Work) -> Loaded:
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
        return Loaded(work, param, held, grad, fresh)

    def _is_on_device(self, unit: int) -> bool:
        """Whether the unit is updated on a device."""
        return self._on_device is not None and unit in self._on_device.units

    def _run_on_device(self, state: UnitState, update: UnitUpdate, loaded: Loaded) -> None:
        """As `_run_kernel`, on the device: whoever has the frames next, on whatever thread, comes after it."""
        device = self._on_device
        if device is not None and self._device_workspace is None:
            device.enter()
            states = [self.units[unit] for unit in device.units & self.units.keys()]
            numel = aligned(max(min(state.tile_numel, state.numel) for state in states))  # 0: all is with other ranks
            numel = min(numel, device.slice_numel)
            self._device_workspace = Workspace(numel, device=device.device)
        try:
            self._run_kernel(state, update, loaded, self._device_workspace)
        finally:
            loaded.hand_over()

    def _run_kernel(
        self, state: UnitState, update: UnitUpdate, loaded: Loaded, workspace: Workspace | None = None
    ) -> None:
        """On the worker: the only place where bytes change."""
        tile, length = loaded.work.tile, state.tile_length(loaded.work.tile)
        begin = (state.param_start + tile * state.tile_numel) * state.dtype.itemsize
        whole = loaded.param.tensor(PageKey(state.unit, Kind.PARAM))
        parameter = whole[begin : begin + length * state.dtype.itemsize].view(state.dtype)
        grad = loaded.grad.tensor(PageKey(state.unit, Kind.GRAD, tile))[: length * state.dtype.itemsize]
        buffer = loaded.state.tensor(PageKey(state.unit, Kind.STATE, tile))
        planes = tile_planes(buffer, state, tile)
        if loaded.fresh:
            buffer.zero_()
            if planes.master is not None:
                planes.master.copy_(parameter)
        workspace = workspace if workspace is not None else self._workspace
        adamw_tile(parameter, grad.view(state.dtype), planes, loaded.work.runs, workspace, update.grad_scale)

    def _count(self, *, units: int = 0, tiles: int = 0, device_tiles: int = 0) -> None:
        done = self.done
        self.done = UpdateStatistics(done.units + units, done.tiles + tiles, done.device_tiles + device_tiles)
