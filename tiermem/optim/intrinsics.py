"""Operations on numbers that numba has no word for, each of them one instruction.

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
def float_of(_context: Any, _bits: Any) -> Any:
    """The float32 with these 32 bits."""
    return types.float32(types.int32), lambda _c, builder, _s, arguments: builder.bitcast(arguments[0], ir.FloatType())


@intrinsic
def bits_of(_context: Any, _number: Any) -> Any:
    """The 32 bits of a float32, as int32."""
    return types.int32(types.float32), lambda _c, builder, _s, arguments: builder.bitcast(arguments[0], ir.IntType(32))


@intrinsic
def half_bits_of(_context: Any, _number: Any) -> Any:
    """The 16 bits of the float16 nearest to a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate
