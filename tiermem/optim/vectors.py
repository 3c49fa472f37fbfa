"""Codes to numbers and back in vectors of 512 bits, for processors of the x86 kind that have AVX-512 with VBMI.

Owns what no compiler makes of a look into a table for each element: a book's 256 values lie in sixteen registers, a
byte of each value to four of them, and one instruction looks 64 codes up in two; the table of codes is the straight
lines of `lines.py`. Does not know the update. Guarantees the codes and values of `codebook.py`, bit for bit, of numbers
in [-1, 1] times a scale that is not NaN.

numba keeps what it compiled by the date of `loops.py`, where this ends up. Whoever changes something here touches that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tiermem.optim.blocks import BLOCK_NUMEL
from tiermem.optim.codebook import UNIT, CodeBook
from tiermem.optim.lines import EXPONENTS, LINES, straight_lines

Bytes = npt.NDArray[np.uint8]

_NEEDED = ("avx512f", "avx512bw", "avx512vbmi")
_BYTE, _WORD, _INT, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_REGISTER = 64  # bytes
_FLOATS = _REGISTER // 4
_WORDS = _REGISTER // 2


def usable() -> bool:
    """Whether numba compiles for this very processor, and it has the instructions."""
    if numba.config.CPU_NAME not in (None, "", "host") or numba.config.CPU_FEATURES:
        return False
    try:
        features = llvmlite.binding.get_host_cpu_features()
    except RuntimeError:  # of processors that LLVM cannot tell about
        return False
    return all(features.get(name, False) for name in _NEEDED)


def tables(book: CodeBook) -> tuple[Bytes, npt.NDArray[np.uint16]]:
    """What `decode` and `encode_*` look into: the values byte by byte, [4, 256] in a row, and lines."""
    values = book.values.numpy().view(np.uint8).reshape(256, 4)
    return np.ascontiguousarray(values.T).ravel(), straight_lines(book.table.numpy())


@intrinsic
def decode(_context: Any, _codes: Any, _values: Any, _scale: Any, _out: Any) -> Any:
    """Write the values of a block's codes, times the scale. Addresses: uint8[256], `tables`, float32, float32[256]."""
    signature = types.void(types.intp, types.intp, types.float32, types.intp)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        codes, values, scale, out = arguments
        v = _Vectors(builder)
        table = [v.load(values, _REGISTER * part, _BYTE) for part in range(16)]
        scales = v.splat(scale)
        # Interleaving bytes works within quarters of a register: what ends up side by side begins four apart.
        apart = [4 * (i % 4) + i // 4 for i in range(_FLOATS)]
        for begin in range(0, BLOCK_NUMEL, _REGISTER):
            looked = v.load(codes, begin, _INT)
            looked = builder.bitcast(v.shuffle(looked, looked, apart), ir.VectorType(_BYTE, _REGISTER))
            upper = builder.icmp_signed("<", looked, v.all(looked.type, 0))
            planes = []
            for plane in range(0, 16, 4):
                low, high = (v.look_up_bytes(looked, *table[half : half + 2]) for half in (plane, plane + 2))
                planes.append(builder.select(upper, high, low))
            for place, number in enumerate(v.interleaved(planes)):
                v.store(builder.fmul(number, scales), out, 4 * begin + _REGISTER * place)
        return context.get_dummy_value()

    return signature, generate


def _encode(signed: bool) -> Any:
    @intrinsic
    def encode(_context: Any, _moments: Any, _scale: Any, _lines: Any, _codes: Any) -> Any:
        """Write the codes of a block's numbers divided by the scale. Addresses: float32[256], `tables`, uint8[256]."""
        signature = types.void(types.intp, types.float32, types.intp, types.intp)

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            moments, scale, lines, codes = arguments
            v = _Vectors(builder)
            edges = v.load(lines, 0, _WORD)
            halves = [v.load(lines, 2 * (EXPONENTS + part * _WORDS), _WORD) for part in range(3 * LINES // _WORDS)]
            scales = v.splat(scale)
            for begin in range(0, BLOCK_NUMEL, _WORDS):
                pair = [v.load(moments, 4 * begin + _REGISTER * k, _FLOAT) for k in (0, 1)]
                pair = [builder.fmul(builder.fdiv(one, scales), v.all(one.type, UNIT)) for one in pair]
                half = v.rounded(pair)
                place = v.place(half, edges, halves)
                if signed:
                    place = v.signed(place, half)
                v.store(builder.trunc(place, ir.VectorType(_BYTE, _WORDS)), codes, begin)
            return context.get_dummy_value()

        return signature, generate

    return encode


encode_signed = _encode(True)
encode_unsigned = _encode(False)  # of numbers that are not negative


class _Vectors:
    """The operations on registers that both need, as LLVM writes them."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def load(self, address: Any, offset: int, kind: Any) -> Any:
        """The register at an address, as elements of `kind`."""
        loaded = self._builder.load(self._pointer(address, offset, ir.VectorType(kind, _REGISTER * 8 // _bits(kind))))
        loaded.align = 1
        return loaded

    def store(self, vector: Any, address: Any, offset: int) -> None:
        stored = self._builder.store(vector, self._pointer(address, offset, vector.type))
        stored.align = 1

    def _pointer(self, address: Any, offset: int, kind: Any) -> Any:
        moved = self._builder.add(address, ir.Constant(address.type, offset))
        return self._builder.inttoptr(moved, kind.as_pointer())

    def all(self, kind: Any, number: float) -> Any:
        """A vector with one number, a constant, in all places."""
        return ir.Constant(kind, [number] * kind.count)

    def splat(self, number: Any) -> Any:
        """A register with one float32 in all places."""
        empty = ir.Constant(ir.VectorType(_FLOAT, _FLOATS), ir.Undefined)
        first = self._builder.insert_element(empty, number, ir.Constant(_INT, 0))
        return self.shuffle(first, empty, [0] * _FLOATS)

    def shuffle(self, left: Any, right: Any, places: Sequence[int]) -> Any:
        """The elements at these places of both vectors in a row."""
        mask = ir.Constant(ir.VectorType(_INT, len(places)), list(places))
        return self._builder.shuffle_vector(left, right, mask)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        """What an instruction gives that has no other name in LLVM."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self._builder.call(cgutils.get_or_insert_function(self._builder.module, kind, name), arguments)

    def look_up_bytes(self, codes: Any, low: Any, high: Any) -> Any:
        """The bytes at the places that the lower seven bits of codes say."""
        return self.call("llvm.x86.avx512.vpermi2var.qi.512", codes.type, low, codes, high)

    def interleaved(self, planes: Sequence[Any]) -> list[Any]:
        """The float32 whose lowest bytes are in the first plane, whose highest in the last."""
        builder, numbers = self._builder, []
        for half in (False, True):
            zipped = [self._zip(planes[p], planes[p + 1], 16, half) for p in (0, 2)]
            low, high = (builder.bitcast(one, ir.VectorType(_WORD, _WORDS)) for one in zipped)
            for quarter in (False, True):
                whole = self._zip(low, high, 8, quarter)
                numbers.append(builder.bitcast(whole, ir.VectorType(_FLOAT, _FLOATS)))
        return numbers

    def _zip(self, left: Any, right: Any, quarter: int, upper: bool) -> Any:
        """Elements of both in turn, of the lower or upper half of each quarter of the register."""
        count, begin = left.type.count, quarter // 2 if upper else 0
        firsts = [q + begin + i for q in range(0, count, quarter) for i in range(quarter // 2)]
        return self.shuffle(left, right, [place for first in firsts for place in (first, count + first)])

    def rounded(self, pair: Sequence[Any]) -> Any:
        """The bits of the float16 nearest to 32 float32 in two registers."""
        half, words = ir.VectorType(ir.HalfType(), _FLOATS), ir.VectorType(_WORD, _FLOATS)
        parts = [self._builder.bitcast(self._builder.fptrunc(one, half), words) for one in pair]
        return self.shuffle(parts[0], parts[1], list(range(_WORDS)))

    def place(self, half: Any, edges: Any, lines: Sequence[Any]) -> Any:
        """What the lines say of the magnitudes of float16."""
        builder, kind = self._builder, half.type
        magnitude = builder.and_(half, self.all(kind, 0x7FFF))
        exponent = builder.lshr(magnitude, self.all(kind, 10))
        edge = self.call("llvm.x86.avx512.permvar.hi.512", kind, edges, exponent)
        above = builder.add(exponent, self.all(kind, EXPONENTS))
        line = builder.select(builder.icmp_unsigned(">", magnitude, edge), above, exponent)
        slope, offset, cap = (
            self.call("llvm.x86.avx512.vpermi2var.hi.512", kind, lines[p], line, lines[p + 1]) for p in (0, 2, 4)
        )
        wide = ir.VectorType(_INT, kind.count)
        mantissa = builder.zext(builder.shl(half, self.all(kind, 6)), wide)
        product = builder.lshr(builder.mul(mantissa, builder.zext(slope, wide)), self.all(wide, 16))
        found = builder.lshr(builder.add(builder.trunc(product, kind), offset), self.all(kind, 8))
        return builder.select(builder.icmp_unsigned("<", found, cap), found, cap)

    def signed(self, place: Any, half: Any) -> Any:
        """The codes of a signed book: 127 is zero, 255 is 1, and 0 the least that is above -1."""
        builder, kind = self._builder, half.type
        negative = builder.ashr(half, self.all(kind, 15))  # all bits, or none
        most = builder.add(self.all(kind, 128), negative)
        place = builder.select(builder.icmp_signed("<", place, most), place, most)
        turned = builder.sub(builder.xor(place, negative), negative)
        return builder.add(turned, self.all(kind, 127))


def _bits(kind: Any) -> int:
    return 32 if kind is _FLOAT else int(kind.width)
