"""Operations on numbers that numba has no word for, each of them one instruction where the processor has it.

Owns how LLVM is told. Does not know who uses them (`loops.py`; numba keeps what it compiled by the date of that file,
so whoever changes something here touches it).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def fused_multiply_add(_context: Any, _a: Any, _b: Any, _c: Any) -> Any:
    """a * b + c, rounded once. float32."""
    signature = types.float32(types.float32, types.float32, types.float32)

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.f32"), arguments)

    return signature, generate


@intrinsic
def half_bits_of(_context: Any, _number: Any) -> Any:
    """The 16 bits of the float16 nearest to a float32.

    In integers where the processor has no instruction for it (x86 without F16C, as many virtual ones): LLVM would call
    a function of the compiler's library there, and end the process if that is not loaded.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        triple, _, features = context.codegen().magic_tuple()
        if "+f16c" in features.split(",") or triple.startswith(("aarch64", "arm64")):
            return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))
        return _half_in_integers(builder, arguments[0])

    return types.uint16(types.float32), generate


def _half_in_integers(builder: Any, number: Any) -> Any:
    """Rounded to nearest, ties to even, by F. Giesen's `float_to_half_fast3_rtne`."""
    word = ir.IntType(32)

    def integer(value: int) -> Any:
        return ir.Constant(word, value)

    bits = builder.bitcast(number, word)
    sign = builder.and_(bits, integer(1 << 31))
    magnitude = builder.xor(bits, sign)
    # A mantissa of 10 bits instead of 23, and an exponent that counts from 15 instead of 127.
    odd = builder.and_(builder.lshr(magnitude, integer(13)), integer(1))
    rebased = builder.add(magnitude, integer(((15 - 127) << 23) + 0xFFF & 0xFFFFFFFF))
    half = builder.lshr(builder.add(rebased, odd), integer(13))
    # Where float16 has no exponent of its own left, adding 0.5 puts its last bit at the end of a float32's.
    offset = integer(126 << 23)
    moved = builder.fadd(builder.bitcast(magnitude, ir.FloatType()), ir.Constant(ir.FloatType(), 0.5))
    subnormal = builder.sub(builder.bitcast(moved, word), offset)
    half = builder.select(builder.icmp_unsigned("<", magnitude, integer(113 << 23)), subnormal, half)
    not_a_number = builder.icmp_unsigned(">", magnitude, integer(255 << 23))
    largest = builder.select(not_a_number, integer(0x7E00), integer(0x7C00))
    half = builder.select(builder.icmp_unsigned(">=", magnitude, integer(143 << 23)), largest, half)
    return builder.trunc(builder.or_(half, builder.lshr(sign, integer(16))), ir.IntType(16))
