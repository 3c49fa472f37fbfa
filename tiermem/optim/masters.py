"""Masters and moments, written and read parameter by parameter.

Owns what happens to optimizer state outside the update: when a model is materialized, when a checkpoint is written or
read, and in tests. Does not know models or files. Guarantees that a master read back has the bits of the one stored,
that moments are float32 for whoever asks, that at no time more than one page is leased, and that what is changed of a
unit is written tile by tile, however many parameters lie in one. The caller sees to it that
no update of the unit is pending. All functions wait for pages and raise their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from tiermem.errors import InvariantError
from tiermem.optim.blocks import HOST, BlockScratch
from tiermem.optim.planes import BlockPlanes, StatePlanes, tile_planes
from tiermem.optim.split import complete, split
from tiermem.optim.tiles import Segment, UnitState
from tiermem.pager.page import Intent, Kind, Lane, PageKey
from tiermem.pager.tiling import TileRange

Planes = StatePlanes | BlockPlanes
Action = Callable[[Planes], None]
Pair = tuple[torch.Tensor, torch.Tensor]

SLICE_NUMEL = 1 << 18  # elements whose master is put together, or whose moments are translated, at one time

MomentsOf = Callable[[TileRange], Pair | None]
"""Both moments of a part of a parameter, float32 and 1-D; None: zeros."""


class HeldPages(Protocol):
    """A lease, as far as it is needed here."""

    def tensor(self, key: PageKey) -> torch.Tensor:
        """The bytes of a page."""

    def release(self) -> None:
        """Give the hold back."""

    def fail(self, error: BaseException) -> None:
        """Give the hold back and declare the contents garbage."""


class StatePager(Protocol):
    """The part of the pager that reads and writes state from a thread; who reads what a mark protects has it, too."""

    def lease(self, keys: Sequence[PageKey], intent: Intent, *, lane: Lane = Lane.COMPUTE) -> HeldPages:
        """Wait for a lease."""

    def is_written(self, key: PageKey) -> bool:
        """Whether the page has contents."""


class CutBuffers:
    """Memory for what `read_cut` gives, `SLICE_NUMEL` elements at most, used again by each call.

    Not taken anew each time: blocks of this size are aligned, and glibc seldom finds room for one where another of the
    same size was freed as long as anything small is allocated in between. A thread's heap then grows with the bytes
    that have gone through it, up to its 64 MiB.
    """

    def __init__(self) -> None:
        self.master, self.first, self.second = (_floats(SLICE_NUMEL) for _ in range(3))
        self.scratch = BlockScratch(SLICE_NUMEL)


class StateStore:
    """Access to the optimizer state of units, by unit number and global parameter index."""

    def __init__(self, pager: StatePager, units: Mapping[int, UnitState]) -> None:
        self._pager = pager
        self._units = units

    def store_master(self, unit: int, parameter: int, values: torch.Tensor, moments: MomentsOf | None = None) -> None:
        """Keep what the parameter itself cannot hold of `values` (any shape, the parameter's numel), with zero moments.

        The PARAM page must hold, or come to hold, `values` rounded to the unit's dtype. Nothing is written for
        float32 units, nor for bfloat16 tiles never written before whose remainders are all zero. In a float16 unit
        call it for every trainable parameter or for none: masters that were forgotten are NaN. None at all means that
        the masters are the parameters.

        `moments`: asked for once for each of `cuts`, in order, and kept with it.
        """
        state, segment = self._find(unit, parameter)
        if state.dtype == torch.float32 and moments is None:
            return
        flat = _flat(values, segment)
        for cut in state.cuts(segment):
            part, given = flat[cut.begin : cut.begin + cut.length], None if moments is None else moments(cut)
            if given is not None or not _is_kept(state, part) or self._pager.is_written(_state_key(unit, cut.tile)):
                self._write(state, cut.tile, [(cut, partial(_begin, part, given))])

    def change_masters(self, unit: int, values: Mapping[int, torch.Tensor]) -> None:
        """As `store_master`, of several parameters, which may have had updates: their moments stay."""
        state = self._state(unit)
        if state.dtype == torch.float32:
            return
        actions = []
        for parameter, given in values.items():
            segment = state.segment_of(parameter)
            flat = _flat(given, segment)
            for cut in state.cuts(segment):
                part = flat[cut.begin : cut.begin + cut.length]
                if self._pager.is_written(_state_key(unit, cut.tile)):
                    actions.append((cut, partial(_change, part)))
                elif not _is_kept(state, part):
                    actions.append((cut, partial(_begin, part, None)))
        self._write_all(state, actions)

    def read_master(self, unit: int, parameter: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The float32 master of a parameter, 1-D; written to `out` (float32, 1-D) if there is one."""
        state, segment = self._find(unit, parameter)
        out = _floats(segment.numel) if out is None else out
        scratch = _scratch_for(segment.numel)
        self._read_parameter(state, segment.start, out)
        for cut in state.cuts(segment):
            self._read(state, cut, partial(_complete, out[cut.begin : cut.begin + cut.length], scratch))
        return out

    def read_moments(
        self, unit: int, parameter: int, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second moment of a parameter, float32, 1-D; zeros before its first update. `out`: written to."""
        state, segment = self._find(unit, parameter)
        moments = (_floats(segment.numel), _floats(segment.numel)) if out is None else out
        scratch = _scratch_for(segment.numel)
        for cut in state.cuts(segment):
            first, second = (each[cut.begin : cut.begin + cut.length] for each in moments)
            if not self._read(state, cut, partial(_copy_moments, first, second, scratch)):
                first.zero_()
                second.zero_()
        return moments

    def cuts(self, unit: int, parameter: int) -> Sequence[TileRange]:
        """How a parameter falls into tiles: what `read_cut` takes."""
        state, segment = self._find(unit, parameter)
        return state.cuts(segment)

    def read_cut(
        self, unit: int, parameter: int, cut: TileRange, buffers: CutBuffers
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Master and both moments of a part of a parameter, each float32 and 1-D; its tile is read once.

        They lie in `buffers`, until these are used again. A part of a cut begins at a multiple of 256 elements from its
        start, and ends at one or where the cut does.
        """
        state, segment = self._find(unit, parameter)
        master, first, second = (each[: cut.length] for each in (buffers.master, buffers.first, buffers.second))
        self._read_parameter(state, segment.start + cut.begin, master)

        def copy(planes: Planes) -> None:
            _complete(master, buffers.scratch, planes)
            _copy_moments(first, second, buffers.scratch, planes)

        if not self._read(state, cut, copy):
            first.zero_()
            second.zero_()
        return master, first, second

    def store_moments(
        self, unit: int, given: Mapping[int, Pair], masters: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Overwrite both moments (any shape, the parameter's numel) of these parameters; the masters stay.

        Where moments have 8 bits they are rounded; those that `read_moments` gave come back as they were. `masters`
        are kept with them: in a float16 unit, of every trainable parameter, as for `store_master`.
        """
        state, actions = self._state(unit), []
        for parameter, (exp_avg, exp_avg_sq) in given.items():
            segment = state.segment_of(parameter)
            first, second = _flat(exp_avg, segment), _flat(exp_avg_sq, segment)
            master = None if masters is None else _flat(masters[parameter], segment)
            for cut in state.cuts(segment):
                part = slice(cut.begin, cut.begin + cut.length)
                own = None if master is None else master[part]
                actions.append((cut, partial(_store, own, (first[part], second[part]))))
        self._write_all(state, actions)

    def _state(self, unit: int) -> UnitState:
        state = self._units.get(unit)
        if state is None:
            raise InvariantError(f"unit {unit} has no optimizer state")
        return state

    def _find(self, unit: int, parameter: int) -> tuple[UnitState, Segment]:
        state = self._state(unit)
        return state, state.segment_of(parameter)

    def _read_parameter(self, state: UnitState, start: int, out: torch.Tensor) -> None:
        """Fill `out` with elements of the PARAM page, `start` counted from the first that is updated here."""
        key = PageKey(state.unit, Kind.PARAM)
        held = self._pager.lease([key], Intent.READ, lane=Lane.UPDATE)
        try:
            begin, itemsize = (state.param_start + start) * state.dtype.itemsize, state.dtype.itemsize
            out.copy_(held.tensor(key)[begin : begin + out.numel() * itemsize].view(state.dtype))
        finally:
            held.release()

    # Bytes are looked at inside an action only, so that no view of a frame outlives its lease.

    def _write_all(self, state: UnitState, actions: Iterable[tuple[TileRange, Action]]) -> None:
        """Each tile once: one that nobody holds may be written down at once, and was for each of its parameters."""
        of_tiles: dict[int, list[tuple[TileRange, Action]]] = {}
        for each in actions:
            of_tiles.setdefault(each[0].tile, []).append(each)
        for tile, its in of_tiles.items():
            self._write(state, tile, its)

    def _write(self, state: UnitState, tile: int, actions: Iterable[tuple[TileRange, Action]]) -> None:
        key = _state_key(state.unit, tile)
        fresh = not self._pager.is_written(key)
        held = self._pager.lease([key], Intent.FRESH if fresh else Intent.WRITE, lane=Lane.UPDATE)
        try:
            if fresh:
                _forget(held.tensor(key), state, tile)
            for cut, action in actions:
                action(_part(held.tensor(key), state, cut))
        except BaseException as error:
            held.fail(error)
            raise
        held.release()

    def _read(self, state: UnitState, cut: TileRange, action: Action) -> bool:
        """False if the tile was never written."""
        key = _state_key(state.unit, cut.tile)
        if not self._pager.is_written(key):
            return False
        held = self._pager.lease([key], Intent.READ, lane=Lane.UPDATE)
        try:
            action(_part(held.tensor(key), state, cut))
        finally:
            held.release()
        return True


def _is_kept(state: UnitState, master: torch.Tensor) -> bool:
    """Whether the parameters hold all of a master, for whom a tile that was never written need not be."""
    return state.dtype == torch.bfloat16 and _is_bfloat16(master)


def _is_bfloat16(values: torch.Tensor) -> bool:
    """Whether bfloat16 holds all of these (1-D); of random numbers it does not, which the first slice shows."""
    if values.dtype == torch.bfloat16:
        return True
    masters = (part.to(torch.float32) for part in torch.split(values, SLICE_NUMEL))
    return all(torch.equal(master.to(torch.bfloat16).to(torch.float32), master) for master in masters)


def _store(master: torch.Tensor | None, moments: Pair, planes: Planes) -> None:
    if master is None:
        planes.store_moments(*moments)
    else:
        _begin(master, moments, planes)


def _change(master: torch.Tensor, planes: Planes) -> None:
    first, second = _floats(planes.numel), _floats(planes.numel)
    _copy_moments(first, second, _scratch_for(planes.numel), planes)
    _begin(master, (first, second), planes)


def _begin(values: torch.Tensor, moments: Pair | None, planes: Planes) -> None:
    planes.clear_moments()
    scratch = _scratch_for(planes.numel)
    for piece, part in _slices(planes, scratch):
        master = values[piece].to(torch.float32).contiguous()
        if part.master is not None:
            part.master.copy_(master)
        if part.remainder is not None:
            narrow, index = torch.empty_like(master, dtype=torch.bfloat16), scratch.index.view(torch.int32)
            split(master, narrow, part.remainder, part.marks, index[: part.numel])
    if moments is not None:
        planes.store_moments(*moments)


def _complete(master: torch.Tensor, scratch: BlockScratch, planes: Planes) -> None:
    """Turn parameters in float32 into masters, in place."""
    for piece, part in _slices(planes, scratch):
        if part.master is not None:
            master[piece].copy_(part.master)
        elif part.remainder is not None:
            complete(master[piece], part.remainder, part.marks, scratch.index.view(torch.int32)[: part.numel])


def _copy_moments(first: torch.Tensor, second: torch.Tensor, scratch: BlockScratch, planes: Planes) -> None:
    for piece, part in _slices(planes, scratch):
        part.read_moments(first[piece], second[piece], scratch)


def _slices(planes: Planes, scratch: BlockScratch) -> Iterator[tuple[slice, Planes]]:
    """The planes in parts that fit the scratch, which is whole blocks or as long as all there is."""
    for begin in range(0, planes.numel, scratch.index.numel()):
        length = min(scratch.index.numel(), planes.numel - begin)
        yield slice(begin, begin + length), planes.part(begin, length)


def _floats(numel: int) -> torch.Tensor:
    """Room in host memory, whatever torch's defaults are."""
    return torch.empty(numel, dtype=torch.float32, device=HOST)


def _scratch_for(numel: int) -> BlockScratch:
    return BlockScratch(min(numel, SLICE_NUMEL))


def _forget(buffer: torch.Tensor, state: UnitState, tile: int) -> None:
    buffer.zero_()
    planes = tile_planes(buffer, state, tile)
    if planes.master is not None:
        planes.master.fill_(float("nan"))


def _state_key(unit: int, tile: int) -> PageKey:
    return PageKey(unit, Kind.STATE, tile)


def _part(buffer: torch.Tensor, state: UnitState, cut: TileRange) -> Planes:
    return tile_planes(buffer, state, cut.tile).part(cut.begin_in_tile, cut.length)


def _flat(values: torch.Tensor, segment: Segment) -> torch.Tensor:
    if values.numel() != segment.numel:
        raise InvariantError(f"{values.numel()} values for a parameter of {segment.numel} elements")
    return values.detach().reshape(-1)
