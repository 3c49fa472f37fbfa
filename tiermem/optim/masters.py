"""Masters and moments, written and read parameter by parameter.

Owns what happens to optimizer state outside the update: when a model is materialized, when a checkpoint is written or
read, and in tests. Does not know models or files. Guarantees that a master read back has the bits of the one stored,
that moments are float32 for whoever asks, and that at no time more than one page is leased. The caller sees to it that
no update of the unit is pending. All functions wait for pages and raise their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from tiermem.errors import InvariantError
from tiermem.optim.planes import BlockPlanes, StatePlanes, tile_planes
from tiermem.optim.split import joined, split
from tiermem.optim.tiles import Segment, UnitState
from tiermem.optim.window import HeldPages
from tiermem.pager.page import Intent, Kind, Lane, PageKey
from tiermem.pager.tiling import TileRange

Planes = StatePlanes | BlockPlanes


class StatePager(Protocol):
    """The part of the pager that reads and writes state from a thread."""

    def lease(self, keys: Sequence[PageKey], intent: Intent, *, lane: Lane = Lane.COMPUTE) -> HeldPages:
        """Wait for a lease."""

    def is_written(self, key: PageKey) -> bool:
        """Whether the page has contents."""


class StateStore:
    """Access to the optimizer state of units, by unit number and global parameter index."""

    def __init__(self, pager: StatePager, units: Mapping[int, UnitState]) -> None:
        self._pager = pager
        self._units = units

    def store_master(self, unit: int, parameter: int, values: torch.Tensor) -> None:
        """Keep what the parameter itself cannot hold of `values` (any shape, the parameter's numel), with zero moments.

        The PARAM page must hold, or come to hold, `values` rounded to the unit's dtype. Nothing is written for
        float32 units, nor for bfloat16 tiles never written before whose remainders are all zero. In a float16 unit
        call it for every trainable parameter or for none: masters that were forgotten are NaN. None at all means that
        the masters are the parameters.
        """
        state, segment = self._find(unit, parameter)
        if state.dtype == torch.float32:
            return
        flat = _flat(values, segment)
        for cut in state.cuts(segment):
            master = flat[cut.begin : cut.begin + cut.length].to(torch.float32).contiguous()
            exact = state.dtype == torch.bfloat16 and torch.equal(master.to(torch.bfloat16).to(torch.float32), master)
            if not exact or self._pager.is_written(_state_key(unit, cut)):
                self._write(state, cut, partial(_begin, master))

    def read_master(self, unit: int, parameter: int) -> torch.Tensor:
        """The float32 master of a parameter, 1-D."""
        state, segment = self._find(unit, parameter)
        out = torch.empty(segment.numel, dtype=torch.float32)
        narrow = self._parameter(state, segment.start, segment.numel)
        for cut in state.cuts(segment):
            part = slice(cut.begin, cut.begin + cut.length)
            if not self._read(state, cut, partial(_copy_master, narrow[part], out[part])):
                out[part] = narrow[part]
        return out

    def read_moments(self, unit: int, parameter: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second moment of a parameter, float32, 1-D; zeros before its first update."""
        state, segment = self._find(unit, parameter)
        first, second = torch.zeros(segment.numel), torch.zeros(segment.numel)
        for cut in state.cuts(segment):
            part = slice(cut.begin, cut.begin + cut.length)
            self._read(state, cut, partial(_copy_moments, first[part], second[part]))
        return first, second

    def cuts(self, unit: int, parameter: int) -> list[TileRange]:
        """How a parameter falls into tiles: what `read_cut` and `store_cut` take."""
        state, segment = self._find(unit, parameter)
        return state.cuts(segment)

    def read_cut(self, unit: int, parameter: int, cut: TileRange) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Master and both moments of a part of a parameter, each float32 and 1-D; its tile is read once.

        A part of a cut begins at a multiple of 256 elements from its start, and ends at one or where the cut does.
        """
        state, segment = self._find(unit, parameter)
        narrow = self._parameter(state, segment.start + cut.begin, cut.length)
        master, first, second = (torch.zeros(cut.length) for _ in range(3))

        def copy(planes: Planes) -> None:
            _copy_master(narrow, master, planes)
            _copy_moments(first, second, planes)

        if not self._read(state, cut, copy):
            master.copy_(narrow)
        return master, first, second

    def store_cut(
        self, unit: int, parameter: int, cut: TileRange, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
    ) -> None:
        """Overwrite both moments of a part of a parameter; else as `store_moments`. Parts as for `read_cut`."""
        state, _ = self._find(unit, parameter)
        self._write(state, cut, partial(_set_moments, exp_avg, exp_avg_sq))

    def store_moments(self, unit: int, parameter: int, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
        """Overwrite both moments (any shape, the parameter's numel); the master stays.

        Where moments have 8 bits they are rounded; those that `read_moments` gave come back as they were. In a
        float16 unit store the master first.
        """
        state, segment = self._find(unit, parameter)
        first, second = _flat(exp_avg, segment), _flat(exp_avg_sq, segment)
        for cut in state.cuts(segment):
            part = slice(cut.begin, cut.begin + cut.length)
            self._write(state, cut, partial(_set_moments, first[part], second[part]))

    def _find(self, unit: int, parameter: int) -> tuple[UnitState, Segment]:
        state = self._units.get(unit)
        if state is None:
            raise InvariantError(f"unit {unit} has no optimizer state")
        return state, state.segment_of(parameter)

    def _parameter(self, state: UnitState, start: int, numel: int) -> torch.Tensor:
        """A copy of elements of the PARAM page, counted from the first that is updated here."""
        key = PageKey(state.unit, Kind.PARAM)
        held = self._pager.lease([key], Intent.READ, lane=Lane.UPDATE)
        try:
            begin, itemsize = state.param_start + start, state.dtype.itemsize
            return held.tensor(key)[begin * itemsize : (begin + numel) * itemsize].view(state.dtype).clone()
        finally:
            held.release()

    # Bytes are looked at inside an action only, so that no view of a frame outlives its lease.

    def _write(self, state: UnitState, cut: TileRange, action: Callable[[Planes], None]) -> None:
        key = _state_key(state.unit, cut)
        fresh = not self._pager.is_written(key)
        held = self._pager.lease([key], Intent.FRESH if fresh else Intent.WRITE, lane=Lane.UPDATE)
        try:
            if fresh:
                _forget(held.tensor(key), state, cut)
            action(_part(held.tensor(key), state, cut))
        except BaseException as error:
            held.fail(error)
            raise
        held.release()

    def _read(self, state: UnitState, cut: TileRange, action: Callable[[Planes], None]) -> bool:
        """False if the tile was never written."""
        key = _state_key(state.unit, cut)
        if not self._pager.is_written(key):
            return False
        held = self._pager.lease([key], Intent.READ, lane=Lane.UPDATE)
        try:
            action(_part(held.tensor(key), state, cut))
        finally:
            held.release()
        return True


def _begin(master: torch.Tensor, planes: Planes) -> None:
    planes.clear_moments()
    if planes.master is not None:
        planes.master.copy_(master)
    if planes.remainder is not None:
        narrow = torch.empty_like(master, dtype=torch.bfloat16)
        split(master, narrow, planes.remainder, planes.marks, torch.empty_like(master, dtype=torch.int32))


def _copy_master(narrow: torch.Tensor, out: torch.Tensor, planes: Planes) -> None:
    if planes.master is not None:
        out.copy_(planes.master)
    elif planes.remainder is not None:
        out.copy_(joined(narrow, planes.remainder, planes.marks))
    else:
        out.copy_(narrow)


def _copy_moments(first: torch.Tensor, second: torch.Tensor, planes: Planes) -> None:
    kept = planes.read_moments()
    first.copy_(kept[0])
    second.copy_(kept[1])


def _set_moments(first: torch.Tensor, second: torch.Tensor, planes: Planes) -> None:
    planes.store_moments(first, second)


def _forget(buffer: torch.Tensor, state: UnitState, cut: TileRange) -> None:
    buffer.zero_()
    planes = tile_planes(buffer, state, cut.tile)
    if planes.master is not None:
        planes.master.fill_(float("nan"))


def _state_key(unit: int, cut: TileRange) -> PageKey:
    return PageKey(unit, Kind.STATE, cut.tile)


def _part(buffer: torch.Tensor, state: UnitState, cut: TileRange) -> Planes:
    return tile_planes(buffer, state, cut.tile).part(cut.begin_in_tile, cut.length)


def _flat(values: torch.Tensor, segment: Segment) -> torch.Tensor:
    if values.numel() != segment.numel:
        raise InvariantError(f"{values.numel()} values for a parameter of {segment.numel} elements")
    return values.detach().reshape(-1)
