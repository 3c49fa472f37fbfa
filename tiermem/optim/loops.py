"""The update in single loops, compiled by numba to machine code.

Owns the same arithmetic as `kernels.py` does with torch's operations, in one pass over memory and without the
interpreter lock. Does not know whether it may be used: `compiled.py` imports it where numba is installed, and compares
its bits with those of torch first. Guarantees nothing about what lies beyond whole blocks of 256 elements
(`update_coded*`), and nothing for tails that torch updates one element at a time ("Slicing and bits" in `kernels.py`):
callers keep these to torch.

Where multiplications and additions are fused
---------------------------------------------
`fused_multiply_add` stands exactly where torch's vectorised AdamW has one instruction for both: in the first moment
by its own wish (`vec::fmadd`), in the second because its compiler contracted it. Everything else is rounded after every
operation, which is what numba does unless told otherwise.

Codes of 8-bit moments are looked up one by one, or, where the processor can, in `vectors.py`; `tables` gives what
the one or the other looks into.

Why the loads and stores of coded moments stand in two functions: taken out into one, with slices of the codes made
there, both loops took a quarter longer, for the compiler then no longer knew which arrays overlap.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from tiermem.machine_code import bits_of, float_of, loop
from tiermem.optim import vectors
from tiermem.optim.codebook import UNIT, CodeBook, signed_book, unsigned_book
from tiermem.optim.intrinsics import fused_multiply_add, half_bits_of

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.int16]
Bytes = npt.NDArray[np.uint8]
# What one run shares: decay, weight of the gradient in the first moment, beta2, 1 - beta2, root of the second bias
# correction, eps, minus the step size, scale of the gradient.
Constants = tuple[Any, Any, Any, Any, Any, Any, Any, Any]

_BLOCK = 256
_SIGN = np.int32(-0x80000000)
_STEP = np.int32(0x10000)
_TIE = np.int32(-0x8000)
_NAN = np.int32(0x7FC0)
_HALF_STEP = np.int32(0x7FFF)
_SIXTEEN = np.int32(16)
_ONE = np.int32(1)
_ZERO = np.int32(0)
_EVEN = np.float32(0.5)
_UNIT = np.float32(1.0)
_FULL = np.float32(UNIT)

_compile = loop()


@_compile
def _rounded(bits: Any) -> Any:
    """The upper half of a float32, rounded to nearest, ties to even: a bfloat16. Not for NaN."""
    return np.int32(np.int32(bits + _HALF_STEP) + np.int32(np.int32(bits >> _SIXTEEN) & _ONE)) >> _SIXTEEN


@_compile
def _wide(half: Any) -> Any:
    """The float32 of a bfloat16's bits."""
    return float_of(np.int32(np.int32(half) << _SIXTEEN))


@_compile
def _scaled(half: Any, scale: Any) -> Any:
    """A bfloat16 gradient, scaled and rounded in bfloat16 as `clip_grad_norm_` does, in float32."""
    return float_of(np.int32(_rounded(bits_of(_wide(half) * scale)) << _SIXTEEN))


@_compile
def _first(exp_avg: Any, grad: Any, weight: Any) -> Any:
    """`lerp`, which measures from the end that is nearer."""
    if weight < _EVEN:
        return fused_multiply_add(weight, grad - exp_avg, exp_avg)
    return fused_multiply_add(weight - _UNIT, grad - exp_avg, grad)


@_compile
def _second(exp_avg_sq: Any, grad: Any, c: Any) -> Any:
    return fused_multiply_add(c[3] * grad, grad, exp_avg_sq * c[2])


@_compile
def _moved(master: Any, exp_avg: Any, exp_avg_sq: Any, c: Any) -> Any:
    return master * c[0] + c[6] * exp_avg / (np.sqrt(exp_avg_sq) / c[4] + c[5])


@_compile
def _kept(bits: Any, number: Any) -> Any:
    """The bfloat16 bits of a master that may be NaN."""
    return _NAN if number != number else np.int32(_rounded(bits))


@_compile
def _missing(bits: Any, number: Any) -> Any:
    """The remainder of a master; a NaN has none that could be taken for a tie."""
    low = np.int32(np.int16(bits))
    return _ZERO if number != number and low == _TIE else low


@_compile
def update_split(
    parameter: Halves, remainder: Halves, grad: Halves, exp_avg: Floats, exp_avg_sq: Floats, c: Constants
) -> None:
    """AdamW on bfloat16 parameters whose masters are split, with float32 moments.

    All 1-D and of one length, a multiple of 64: `parameter` and `grad` the bits of bfloat16 as int16, `remainder`
    int16, moments float32, the sign of `exp_avg_sq` being the mark of a tie ("Ties" in `split.py`).
    """
    for i in range(parameter.size):
        marked = exp_avg_sq[i]
        step = _STEP if bits_of(marked) < _ZERO else _ZERO
        master = float_of(np.int32((np.int32(parameter[i]) << _SIXTEEN) + np.int32(remainder[i]) + step))
        gradient = _scaled(grad[i], c[7])
        first = _first(exp_avg[i], gradient, c[1])
        second = _second(abs(marked), gradient, c)
        moved = _moved(master, first, second, c)
        bits = bits_of(moved)
        low = _missing(bits, moved)
        tie = low == _TIE and np.int32(bits & _STEP) == _ZERO
        exp_avg[i] = first
        parameter[i] = np.int16(_kept(bits, moved))
        remainder[i] = np.int16(low)
        exp_avg_sq[i] = float_of(np.int32(bits_of(second) | (_SIGN if tie else _ZERO)))


@_compile
def _scale(moments: Floats) -> Any:
    """The element of largest magnitude, with its sign; of two the positive one. NaN if there is one."""
    up, down = _ZERO, _ZERO
    for j in range(_BLOCK):  # bits of numbers of one sign are in the order of magnitudes, NaN beyond infinity
        bits = bits_of(moments[j])
        up = max(up, bits)
        down = max(down, np.int32(bits ^ _SIGN))
    return float_of(up) if up >= down else float_of(np.int32(down ^ _SIGN))


@_compile
def _advance(master: Floats, grad: Floats, first: Floats, second: Floats, c: Constants) -> None:
    for j in range(_BLOCK):
        moment = _first(first[j], grad[j], c[1])
        square = _second(second[j], grad[j], c)
        first[j] = moment
        second[j] = square
        master[j] = _moved(master[j], moment, square, c)


@_compile
def decode_each(codes: Bytes, scale: Any, values: Floats, out: Floats) -> None:
    """The numbers of a block's codes."""
    for j in range(_BLOCK):
        out[j] = values[codes[j]] * scale


@_compile
def encode_each(moments: Floats, scale: Any, table: Bytes, halves: Any, codes: Bytes) -> None:
    """The codes of a block's numbers. `halves`: scratch, uint16."""
    for j in range(_BLOCK):
        halves[j] = half_bits_of(moments[j] / scale * _FULL)
    for j in range(_BLOCK):
        codes[j] = table[halves[j]]


@_compile
def decode_at_once(codes: Bytes, scale: Any, values: Bytes, out: Floats) -> None:
    """`decode_each` in vectors."""
    vectors.decode(codes.ctypes.data, values.ctypes.data, scale, out.ctypes.data)


@_compile
def encode_signed_at_once(moments: Floats, scale: Any, lines: Any, _halves: Any, codes: Bytes) -> None:
    """`encode_each` by the signed book, in vectors."""
    vectors.encode_signed(moments.ctypes.data, scale, lines.ctypes.data, codes.ctypes.data)


@_compile
def encode_unsigned_at_once(moments: Floats, scale: Any, lines: Any, _halves: Any, codes: Bytes) -> None:
    """`encode_each` by the unsigned book, in vectors, of numbers that are not negative."""
    vectors.encode_unsigned(moments.ctypes.data, scale, lines.ctypes.data, codes.ctypes.data)


AT_ONCE = vectors.usable()
_decode = decode_at_once if AT_ONCE else decode_each
_encode_first = encode_signed_at_once if AT_ONCE else encode_each
_encode_second = encode_unsigned_at_once if AT_ONCE else encode_each


def tables(book: CodeBook) -> tuple[Any, Any]:
    """What numbers of codes, and codes of numbers, are looked up in."""
    return vectors.tables(book) if AT_ONCE else (book.values.numpy(), book.table.numpy())


@functools.cache
def books() -> tuple[Any, Any, Any, Any]:
    """`tables` of the signed and of the unsigned code book."""
    return *tables(signed_book()), *tables(unsigned_book())


@_compile
def update_coded(
    master: Floats,
    grad: Floats,
    codes: tuple[Bytes, Bytes],
    scales: tuple[Floats, Floats],
    books: tuple[Any, Any, Any, Any],
    c: Constants,
) -> None:
    """AdamW on float32 masters with 8-bit moments.

    `master` and `grad`: float32, whole blocks. `codes` and `scales`: of both moments. `books`: as the function
    of this name has them. The gradient's scale in `c` is not applied.
    """
    first, second = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    halves = np.empty(_BLOCK, np.uint16)
    for block in range(master.size // _BLOCK):
        begin = block * _BLOCK
        own_first, own_second = codes[0][begin : begin + _BLOCK], codes[1][begin : begin + _BLOCK]
        _decode(own_first, scales[0][block], books[0], first)
        _decode(own_second, scales[1][block], books[2], second)
        _advance(master[begin : begin + _BLOCK], grad[begin : begin + _BLOCK], first, second, c)
        scales[0][block], scales[1][block] = _scale(first), _scale(second)
        _encode_first(first, scales[0][block], books[1], halves, own_first)
        _encode_second(second, scales[1][block], books[3], halves, own_second)


@_compile
def _take_marks(marks: Bytes, steps: Any) -> bool:
    """Write what marks add to a master's bits to `steps`, and clear them; False, and nothing, if there are none."""
    found = np.uint8(0)
    for k in range(_BLOCK // 8):
        found |= marks[k]
    if found == 0:
        return False
    for j in range(_BLOCK):
        steps[j] = _STEP if (marks[j >> 3] >> (j & 7)) & 1 else _ZERO
    marks[:] = 0
    return True


@_compile
def _join(narrow: Halves, missing: Halves, steps: Any, master: Floats) -> None:
    for j in range(_BLOCK):
        master[j] = float_of(np.int32((np.int32(narrow[j]) << _SIXTEEN) + np.int32(missing[j]) + steps[j]))


@_compile
def _split(master: Floats, narrow: Halves, missing: Halves) -> bool:
    """Write parameters and remainders of masters; whether any remainder is a tie's."""
    for j in range(_BLOCK):
        bits = bits_of(master[j])
        narrow[j] = np.int16(_kept(bits, master[j]))
        missing[j] = np.int16(_missing(bits, master[j]))
    least = _ZERO
    for j in range(_BLOCK):
        least = min(least, np.int32(missing[j]))
    return bool(least == _TIE)


@_compile
def _put_marks(master: Floats, missing: Halves, marks: Bytes) -> None:
    for j in range(_BLOCK):
        if np.int32(missing[j]) == _TIE and np.int32(bits_of(master[j]) & _STEP) == _ZERO:
            marks[j >> 3] |= np.uint8(1 << (j & 7))


@_compile
def _scale_grad(grad: Halves, scale: Any, out: Floats) -> None:
    for j in range(_BLOCK):
        out[j] = _scaled(grad[j], scale)


@_compile
def update_coded_split(
    parameter: Halves,
    remainder: Halves,
    marks: Bytes,
    grad: Halves,
    codes: tuple[Bytes, Bytes],
    scales: tuple[Floats, Floats],
    books: tuple[Any, Any, Any, Any],
    c: Constants,
) -> None:
    """AdamW on bfloat16 parameters whose masters are split, with 8-bit moments: whole blocks.

    As `update_split` and `update_coded`; `marks` holds a bit per element ("Ties" in `split.py`).
    """
    first, second = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    master, grad32 = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    halves, steps = np.empty(_BLOCK, np.uint16), np.zeros(_BLOCK, np.int32)
    for block in range(parameter.size // _BLOCK):
        begin = block * _BLOCK
        own_first, own_second = codes[0][begin : begin + _BLOCK], codes[1][begin : begin + _BLOCK]
        narrow, missing = parameter[begin : begin + _BLOCK], remainder[begin : begin + _BLOCK]
        own_marks = marks[begin // 8 : (begin + _BLOCK) // 8]
        _decode(own_first, scales[0][block], books[0], first)
        _decode(own_second, scales[1][block], books[2], second)
        marked = _take_marks(own_marks, steps)
        _join(narrow, missing, steps, master)
        if marked:
            steps[:] = _ZERO
        _scale_grad(grad[begin : begin + _BLOCK], c[7], grad32)
        _advance(master, grad32, first, second, c)
        if _split(master, narrow, missing):
            _put_marks(master, missing, own_marks)
        scales[0][block], scales[1][block] = _scale(first), _scale(second)
        _encode_first(first, scales[0][block], books[1], halves, own_first)
        _encode_second(second, scales[1][block], books[3], halves, own_second)
