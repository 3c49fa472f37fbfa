"""An in-memory pager that honours the contract the update relies on: leases, a loop on a thread, one worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from tiermem.errors import InvariantError
from tiermem.optim.tiles import UnitState
from tiermem.pager.page import Intent, Kind, Lane, PageKey


class FakeLease:
    def __init__(self, pager: FakePager, keys: Sequence[PageKey], intent: Intent) -> None:
        self.pager, self.keys, self.intent, self.open = pager, list(keys), intent, True

    def tensor(self, key: PageKey) -> torch.Tensor:
        if not self.open or key not in self.keys:
            raise InvariantError(f"{key} is not held")
        return self.pager.bytes[key]

    def hand_over(self) -> None:
        pass

    def release(self) -> None:
        self.end(None)

    def fail(self, error: BaseException) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        if not self.open:
            return
        self.open = False
        with self.pager.changed:
            for key in self.keys:
                self.pager.holders[key].remove(self)
                if error is not None:
                    self.pager.failed[key] = error
            self.pager.held -= len(self.keys)
            self.pager.changed.notify_all()


class FakePager:
    """`faults` maps a page to the error of acquiring it; `log` lists what was leased, in order."""

    def __init__(self) -> None:
        self.bytes: dict[PageKey, torch.Tensor] = {}
        self.written: set[PageKey] = set()
        self.holders: dict[PageKey, list[FakeLease]] = {}
        self.failed: dict[PageKey, BaseException] = {}
        self.faults: dict[PageKey, BaseException] = {}
        self.log: list[tuple[PageKey, Intent]] = []
        self.held = self.most_held = 0
        self.gate = threading.Event()
        self.gate.set()
        self.changed = threading.Condition(threading.RLock())
        self.loop = asyncio.new_event_loop()
        self.worker = ThreadPoolExecutor(1)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def add_page(self, key: PageKey, nbytes: int) -> None:
        with self.changed:
            self.bytes[key] = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)  # undefined until written
            self.holders[key] = []

    def grant(self, keys: Sequence[PageKey], intent: Intent) -> FakeLease | None:
        with self.changed:
            for key in keys:
                for errors in (self.failed, self.faults):
                    if key in errors:
                        raise errors[key]
                if intent is not Intent.FRESH and key not in self.written:
                    raise InvariantError(f"{key} was never written")
                if any(h.intent is not Intent.READ or intent is not Intent.READ for h in self.holders[key]):
                    return None
            lease = FakeLease(self, keys, intent)
            for key in keys:
                self.holders[key].append(lease)
                self.log.append((key, intent))
                if intent is not Intent.READ:
                    self.written.add(key)
            self.held += len(keys)
            self.most_held = max(self.most_held, self.held)
            return lease

    def lease(self, keys: Sequence[PageKey], intent: Intent, *, lane: Lane = Lane.COMPUTE) -> FakeLease:
        with self.changed:
            while (lease := self.grant(keys, intent)) is None:
                if not self.changed.wait(60):
                    raise TimeoutError("lease")
            return lease

    async def acquire(self, keys: Sequence[PageKey], intent: Intent, *, lane: Lane = Lane.UPDATE) -> FakeLease:
        assert threading.current_thread() is self.thread
        while (lease := self.grant(keys, intent)) is None:  # noqa: ASYNC110 - leases end on any thread
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        return lease

    agenda: Any = ()

    def set_agenda(self, groups: Any) -> None:
        self.agenda = groups

    def extend_agenda(self, group: Any) -> None:
        self.agenda = [*self.agenda, group]

    async def run_worker(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            self.gate.wait(60)
            return function(*args, **kwargs)

        return await self.loop.run_in_executor(self.worker, run)

    def start_task(self, coroutine: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def wait_for(self, future: Future[Any]) -> Any:
        return future.result()

    def start_discard(self, keys: Sequence[PageKey]) -> None:
        with self.changed:
            for key in keys:
                self.written.discard(key)

    def is_written(self, key: PageKey) -> bool:
        with self.changed:
            return key in self.written

    def stop_loop(self) -> None:
        """As when the process is being torn down: tasks are cancelled under whoever waits."""

        async def cancel() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel(), self.loop).result()

    def close(self) -> None:
        self.gate.set()
        self.stop_loop()  # what has not begun yet would be a coroutine that nobody has awaited
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.worker.shutdown()
        self.loop.close()


def add_unit(pager: FakePager, state: UnitState, frozen_numel: int = 0) -> None:
    """Make the pages of a unit known, with room for frozen parameters behind the trainable ones."""
    pager.add_page(PageKey(state.unit, Kind.PARAM), (state.numel + frozen_numel) * state.dtype.itemsize)
    for tile in range(state.tiles):
        pager.add_page(PageKey(state.unit, Kind.GRAD, tile), state.tile_length(tile) * state.dtype.itemsize)
        pager.add_page(PageKey(state.unit, Kind.STATE, tile), state.state_nbytes(tile))


def write_parameter(pager: FakePager, state: UnitState, parameter: int, values: torch.Tensor) -> None:
    key, segment = PageKey(state.unit, Kind.PARAM), state.segment_of(parameter)
    with pager.changed:
        pager.written.add(key)
    flat = pager.bytes[key][: state.numel * state.dtype.itemsize].view(state.dtype)
    flat[segment.start : segment.stop] = values.reshape(-1).to(state.dtype)


def read_parameter(pager: FakePager, state: UnitState, parameter: int) -> torch.Tensor:
    segment = state.segment_of(parameter)
    flat = pager.bytes[PageKey(state.unit, Kind.PARAM)][: state.numel * state.dtype.itemsize].view(state.dtype)
    return flat[segment.start : segment.stop].clone()


def write_gradient(pager: FakePager, state: UnitState, parameter: int, values: torch.Tensor) -> None:
    flat = values.reshape(-1).to(state.dtype)
    for cut in state.cuts(state.segment_of(parameter)):
        key = PageKey(state.unit, Kind.GRAD, cut.tile)
        with pager.changed:
            pager.written.add(key)
        tile = pager.bytes[key].view(state.dtype)
        tile[cut.begin_in_tile : cut.begin_in_tile + cut.length] = flat[cut.begin : cut.begin + cut.length]


class FakeBook:
    """Keeps gradients as whole tensors beside the pages, as a runtime's bookkeeping would know of them."""

    def __init__(self, pager: FakePager, units: Sequence[UnitState]) -> None:
        self.pager = pager
        self.unit_of = {segment.parameter: state for state in units for segment in state.segments}
        self.gradients: dict[int, torch.Tensor] = {}
        self.used: dict[int, torch.Tensor] = {}
        self.lent: set[int] = set()
        self.unknown: set[int] = set()  # as if a device were not through with them

    def set(self, parameter: int, gradient: torch.Tensor) -> None:
        self.gradients[parameter] = gradient.clone()
        write_gradient(self.pager, self.unit_of[parameter], parameter, gradient)

    def present(self, unit: int) -> list[int]:
        return [p for p in self.gradients if self.unit_of[p].unit == unit and p not in self.lent]

    def norms(self, parameters: Sequence[int]) -> list[torch.Tensor]:
        known = self.used | self.gradients
        return [torch.linalg.vector_norm(known[p]) for p in parameters]

    def are_known(self, parameters: Sequence[int]) -> bool:
        return self.unknown.isdisjoint(parameters)

    def read_norms(self, parameters: Sequence[int]) -> list[torch.Tensor]:
        return self.norms(parameters)

    def claimed(self, parameters: Sequence[int]) -> None:
        self.lent.difference_update(parameters)
        for parameter in parameters:
            self.used[parameter] = self.gradients.pop(parameter)

    def borrowed(self, parameters: Sequence[int]) -> None:
        self.lent.update(parameters)

    def require_free(self, units: Iterable[int]) -> None:
        pass

    def catch_up(self) -> None:
        """Nothing is on its way."""

    def given_back(self, units: Collection[int], parameters: Sequence[int]) -> None:
        self.lent.difference_update(parameters)

    def drop(self, parameters: Sequence[int]) -> None:
        for parameter in parameters:
            del self.gradients[parameter]


class FakeProtection:
    """Remembers what protected pages held."""

    def __init__(self, pager: FakePager) -> None:
        self.pager, self.open = pager, True
        self.before: dict[PageKey, torch.Tensor | None] = {}
        self.discarded: list[PageKey] = []

    def prepare(self, keys: Sequence[PageKey]) -> None:
        assert not any(key.kind is Kind.GRAD for key in keys)

    async def protect(self, keys: Sequence[PageKey]) -> None:
        for key in keys if self.open else ():
            if key not in self.before:
                self.before[key] = self.pager.bytes[key].clone() if key in self.pager.written else None

    def discard(self, keys: Sequence[PageKey]) -> None:
        if self.open:
            self.discarded.extend(keys)
        else:
            self.pager.start_discard(keys)

    def confirm(self) -> None:
        self.open = False
        self.pager.start_discard(self.discarded)

    async def revert(self) -> None:
        self.open = False
        for key, values in self.before.items():
            assert not self.pager.holders[key]
            if values is None:
                self.pager.written.discard(key)
            else:
                self.pager.bytes[key].copy_(values)


class FakeUndo:
    """Undoes updates of a `FakePager`."""

    def __init__(self, pager: FakePager) -> None:
        self.pager, self.room, self.reverts = pager, True, 0

    def has_room(self) -> bool:
        return self.room

    def protection(self) -> FakeProtection:
        return FakeProtection(self.pager)

    def revert(self, protection: Any, running: Sequence[Future[None]]) -> None:
        self.reverts += 1
        for future in running:
            future.result()
        self.pager.start_task(protection.revert()).result()
