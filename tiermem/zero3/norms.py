"""The norm of a gradient.

Owns in which dtype, and by what, the squares of one parameter's gradient are added up, and whether compiled loops
(`squares.py`, `team.py`) can be had for that and for adding gradients. Does not know pages, ranks or clipping.
Guarantees a norm that is finite wherever every element is (in host memory), as exact as float32 whatever the gradient's
dtype, and that nobody waits for a device.

bfloat16, in host memory, is added up by a compiled loop (`squares.py`), which copies it as well: torch would first make
float32 of all of it, and does so piece by piece. On the thread that computes, for 168 M parameters, copies included:
50 ms instead of 125. So are the last of several that are added up: with the sum and its copy in one pass.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tiermem.errands import elsewhere
from tiermem.errors import InvariantError, TiermemError
from tiermem.memory.heap import release_library
from tiermem.memory.rounding import round_down, round_up

_PIECE = 3 << 16  # elements whose squares torch adds at once: their bytes and their float32 stay in the cache


def gradient_norm(flat: torch.Tensor, squares: float | None = None) -> torch.Tensor:
    """The L2 norm of a gradient, [n] of any floating dtype: 0-d, in `norm_dtype`, without waiting for a device.

    In host memory it is finite where every element is, also where the squares are too large for float32. `squares`:
    what a `MeasuringCopy` of it has added up.
    """
    if not flat.is_cpu:
        return _vector_norm(flat, norm_dtype(flat.dtype))
    if squares is not None:
        norm = torch.tensor(math.sqrt(squares), dtype=torch.float32, device=flat.device)
    elif norm_dtype(flat.dtype) == flat.dtype:
        norm = _vector_norm(flat, flat.dtype)
    else:
        norm = _norm_of_halves(flat)
    if math.isinf(norm):  # of a number: two operations of torch's less
        exact = _vector_norm(flat, torch.float64)
        largest = math.inf if math.isinf(exact) else torch.finfo(norm.dtype).max
        norm = exact.clamp(max=largest).to(norm.dtype)
    return norm


def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what a norm of gradients of `dtype` is kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(slots=True, eq=False)
class MeasuringCopy:
    """Copies a bfloat16 gradient in host memory, stretch by stretch from its first element on, and adds its squares up.

    Made by `measuring_copy`. `squares`: the sum so far; of the whole once all of it is copied. Or it adds the gradient
    to others, each stretch with `add`: then it is the squares of what comes of that.
    """

    loops: ModuleType
    bits: Any
    squares: float = 0.0
    block: Any = None

    def copy(self, begin: int, target: torch.Tensor) -> None:
        """Copy what begins at `begin`, where the stretch before ended, to all of `target`."""
        self.squares = self.loops.copy_and_add(self.bits, begin, _bits(target), self.squares)

    def add(self, begin: int, target: torch.Tensor) -> None:
        """Add what begins at `begin`, where the stretch before ended, to all of `target`."""
        self._add(begin, _bits(target))

    def add_pair(self, earlier: torch.Tensor, begin: int, target: torch.Tensor, *, adds: bool) -> None:
        """As `copy`, or with `adds` as `add`, of `earlier`, [n], and then `add`; with `team_loops` alone.

        Blocks that a stretch cuts are added up as `add` does it.
        """
        team, block = _team(), self.loops.BLOCK
        others, place, end = _bits(earlier), _bits(target), begin + target.numel()
        first = min(end, round_up(begin, block))
        last = end if end == self.bits.size else max(first, round_down(end, block))
        for cut in (slice(begin, first), slice(first, last), slice(last, end)):
            here = place[cut.start - begin : cut.stop - begin]
            if cut.start == first < last:
                self.squares = team.add_both(others[cut], self.bits[cut], here, adds=adds, total=self.squares)
            elif here.size:
                self.loops.put(others[cut], here, adds)
                self._add(cut.start, here)

    def _add(self, begin: int, target: Any) -> None:
        if self.block is None:
            self.block = np.empty(self.loops.BLOCK, np.int16)
        self.squares = self.loops.sum_and_add(self.bits, begin, target, self.squares, self.block)


def measuring_copy(flat: torch.Tensor) -> MeasuringCopy | None:
    """What copies this gradient, [n], and measures it; None if torch has to."""
    loops = squares_loops() if _is_narrow(flat) else None
    return None if loops is None else MeasuringCopy(loops, _bits(flat))


def add_pair(earlier: torch.Tensor, later: torch.Tensor, target: torch.Tensor, *, adds: bool) -> None:
    """Put the sum of two bfloat16 gradients into `target`, or with `adds` add one after the other; all [n].

    With `team_loops` alone.
    """
    _team().add_both(_bits(earlier), _bits(later), _bits(target), adds=adds)


def may_pair(flat: torch.Tensor) -> bool:
    """Whether this gradient, [n], can be added together with another one."""
    return _is_narrow(flat) and flat.is_contiguous() and team_loops() is not None


@functools.cache
def team_loops() -> ModuleType | None:
    """`team.py`, or None where it has no use. Compiles at the first call: two seconds, once."""
    loops = squares_loops()
    return None if loops is None else _tried("tiermem.zero3.team", lambda team: _are_right_in_pairs(team, loops))


def _team() -> ModuleType:
    team = team_loops()
    if team is None:
        raise InvariantError("two gradients are to be added by loops that cannot be had; this is a bug in tiermem")
    return team


def _are_right_in_pairs(team: ModuleType, loops: ModuleType) -> bool:
    """Whether pairs have the sums that torch has, and the squares of these."""
    bits = np.random.default_rng(11).integers(-0x8000, 0x8000, (3, 5 * loops.BLOCK + 7)).astype(np.int16)
    bits &= np.int16(-0x4001)
    one, other, place = (torch.from_numpy(row).view(torch.bfloat16) for row in bits)
    for adds in (False, True):
        found, expected = place.clone(), place.add(one).add_(other) if adds else one.add(other)
        total = team.add_both(bits[0], bits[1], _bits(found), adds=adds, total=0.0)
        if not torch.equal(found, expected) or total != loops.sum_of_squares(_bits(expected)):
            return False
    return True


@functools.cache
def squares_loops() -> ModuleType | None:
    """`squares.py`, or None where it has no use. Compiles at the first call: a second, once."""
    return _tried("tiermem.zero3.squares", _are_right)


def _tried(name: str, is_right: Callable[[ModuleType], bool]) -> ModuleType | None:
    """A module of loops, if they can be compiled and are right; as torch can do without, it is no matter why not."""

    def find() -> ModuleType | None:
        try:
            loops = importlib.import_module(name)
            found = loops if is_right(loops) else None
        except Exception:  # noqa: BLE001  no such OpenMP, or a compiler, which has many ways to fail
            return None
        release_library("libllvmlite")  # the compiler is through
        return found

    try:
        return elsewhere("tiermem-trial", find)
    except TiermemError:  # there is no thread to be had for it
        return None


def _are_right(loops: ModuleType) -> bool:
    """Whether the loops have the sum that numpy has, copy and add as they should, and tell infinity and NaN."""
    bits = np.random.default_rng(7).integers(-0x8000, 0x8000, 3 * 4096 + 5).astype(np.int16)
    bits &= np.int16(-0x4001)  # exponents below that of 1: squares can be added in float32
    exact = float(np.square((bits.astype(np.int32) << 16).view(np.float32).astype(np.float64)).sum())
    copy, total = np.zeros_like(bits), 0.0
    for begin, end in ((0, 5000), (5000, bits.size)):
        total = loops.copy_and_add(bits, begin, copy[begin:end], total)
    if not (math.isclose(total, exact, rel_tol=1e-6) and total == loops.sum_of_squares(bits) and (copy == bits).all()):
        return False
    sums = copy[::-1].copy()
    expected = torch.from_numpy(sums.copy()).view(torch.bfloat16).add_(torch.from_numpy(bits).view(torch.bfloat16))
    block, total = np.empty(loops.BLOCK, np.int16), 0.0
    for begin, end in ((0, 5000), (5000, bits.size)):
        total = loops.sum_and_add(bits, begin, sums[begin:end], total, block)
    if total != loops.sum_of_squares(sums) or not (sums == expected.view(torch.int16).numpy()).all():
        return False
    for special in (0x7F80, 0x7FC0):
        bits[-1] = special
        if math.isfinite(loops.sum_of_squares(bits)):
            return False
    return True


def _is_narrow(flat: torch.Tensor) -> bool:
    """Whether these are bfloat16 numbers in host memory, and nothing that only acts as if."""
    return type(flat) is torch.Tensor and flat.is_cpu and flat.dtype == torch.bfloat16


def _bits(flat: torch.Tensor) -> Any:
    return flat.detach().view(torch.int16).numpy()


def _norm_of_halves(flat: torch.Tensor) -> torch.Tensor:
    loops = squares_loops() if _is_narrow(flat) else None
    if loops is None:
        return _norm_by_pieces(flat)
    return torch.tensor(math.sqrt(loops.sum_of_squares(_bits(flat))), dtype=torch.float32, device=flat.device)


def _vector_norm(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(flat, dtype=dtype)
    return norm


def _norm_by_pieces(flat: torch.Tensor) -> torch.Tensor:
    # Here torch would widen all of it first: a copy twice its size, whose memory is new to the process every time
    # (beyond malloc's limit), which takes up to ten times as long as adding up. So piece by piece, in the cache.
    wide = torch.empty(min(_PIECE, flat.numel()), dtype=torch.float32, device=flat.device)
    squares = torch.zeros(max(1, -(-flat.numel() // _PIECE)), dtype=torch.float32, device=flat.device)
    for square, narrow in zip(squares, torch.split(flat, _PIECE), strict=True):
        piece = wide[: narrow.numel()].copy_(narrow)
        torch.dot(piece, piece, out=square)
    return squares.sum().sqrt()
