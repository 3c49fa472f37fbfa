"""Two bfloat16 gradients put into their place, or added to what it holds, in one pass and by all of torch's threads.

Owns the loop, and how GNU's OpenMP, which torch brings along, is asked to run it (`GOMP_parallel`: what GCC makes of
`#pragma omp parallel`; GCC's "libgomp ABI"). Does not know gradients or pages. Guarantees the bits that torch has when
it adds one after the other (but those of a NaN), and the squares of `squares.py`, with any number of threads.

`norms.py` imports this where numba is installed and torch has GNU's OpenMP, and tries it first. torch's own threads,
because a sum is little else than bandwidth, which one thread does not use up, and because threads of ours would make
OpenMP count more of them than there are cores (`optim/compiled.py`).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from tiermem.machine_code import callback, loop
from tiermem.zero3.squares import BLOCK, Halves, add_rounded, put_squares

_JOB = 8  # numbers that the threads are told
_ADDS, _MEASURES = 1, 2


def _openmp() -> ctypes.CDLL:
    """GNU's OpenMP as torch has it. Raises OSError where torch has none, or not one alone."""
    package = Path(torch.__file__).parent
    found = [*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*")]
    if len(found) != 1:
        raise OSError(f"expected one libgomp beside torch, found {[path.name for path in found]}")
    return ctypes.CDLL(str(found[0]))


_library = _openmp()
for _name in ("thread_num", "num_threads"):
    _address = ctypes.cast(getattr(_library, f"omp_get_{_name}"), ctypes.c_void_p).value
    llvmlite.binding.add_symbol(f"tiermem_omp_{_name}", _address)
_thread_num = types.ExternalFunction("tiermem_omp_thread_num", types.int32())
_num_threads = types.ExternalFunction("tiermem_omp_num_threads", types.int32())


@intrinsic
def _halves_at(_context: Any, _address: Any) -> Any:
    """A pointer to int16 numbers at an address."""
    pointer = ir.IntType(16).as_pointer()
    return types.CPointer(types.int16)(types.int64), lambda _c, builder, _s, given: builder.inttoptr(given[0], pointer)


@intrinsic
def _doubles_at(_context: Any, _address: Any) -> Any:
    """A pointer to float64 numbers at an address."""
    pointer = ir.DoubleType().as_pointer()
    return types.CPointer(types.float64)(types.int64), lambda _c, builder, _s, given: builder.inttoptr(
        given[0], pointer
    )


@loop()
def _put_both(earlier: Halves, later: Halves, target: Halves) -> None:
    for i in range(target.size):
        target[i] = add_rounded(earlier[i], later[i])


@loop()
def _add_both(earlier: Halves, later: Halves, target: Halves) -> None:
    for i in range(target.size):
        target[i] = add_rounded(add_rounded(target[i], earlier[i]), later[i])


@callback(types.void(types.CPointer(types.int64)))
def _share(told: Any) -> None:
    """What one thread of the team does: its share of the blocks."""
    job = carray(told, (_JOB,))
    numel = job[0]
    earlier = carray(_halves_at(job[1]), (numel,))
    later = carray(_halves_at(job[2]), (numel,))
    target = carray(_halves_at(job[3]), (numel,))
    count = (numel + BLOCK - 1) // BLOCK
    squares = carray(_doubles_at(job[4]), (count,))
    thread, threads = _thread_num(), _num_threads()
    for block in range(count * thread // threads, count * (thread + 1) // threads):
        begin, end = block * BLOCK, min(numel, (block + 1) * BLOCK)
        if job[5] & _ADDS:
            _add_both(earlier[begin:end], later[begin:end], target[begin:end])
        else:
            _put_both(earlier[begin:end], later[begin:end], target[begin:end])
        if job[5] & _MEASURES:
            put_squares(target[begin:end], squares, block)


@loop()
def _fold(total: float, squares: Any) -> float:
    """Add up in order."""
    for square in squares:
        total += square
    return total


def add_both(earlier: Halves, later: Halves, target: Halves, *, adds: bool, total: float | None = None) -> float | None:
    """Put the sums of two into `target`, or with `adds` add first the one to it and then the other: bits of bfloat16.

    Returns `total`, if it is given, and the squares of what is in `target` then, in blocks from its first element on.
    All are int16, 1-D, of one length, contiguous, and none overlaps another.
    """
    measures = total is not None
    squares = np.empty(-(-target.size // BLOCK) if measures else 0, np.float64)
    addresses = [array.ctypes.data for array in (earlier, later, target, squares)]
    job = np.zeros(_JOB, np.int64)
    job[:6] = [target.size, *addresses, _ADDS * adds + _MEASURES * measures]
    # 0 threads: as many as torch has told OpenMP. The interpreter lock is let go of meanwhile.
    _library.GOMP_parallel(
        ctypes.c_void_p(_share.address), ctypes.c_void_p(job.ctypes.data), ctypes.c_uint(0), ctypes.c_uint(0)
    )
    return None if total is None else _fold(total, squares)
