"""Functions compiled to machine code by numba, which those who import this need.

Owns whether what was compiled is kept for the next process, and how bits become a number and back, for which numba has
no word. Does not know what is compiled. Guarantees that where it cannot be kept (a read-only installation of a user
without a home, as in many containers) it is compiled anew each time. What is kept is so by the date of the file that is
compiled: whoever changes the operations here touches those that use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])


def loop(*, fastmath: set[str] | bool = False) -> Callable[[F], F]:
    """Compile a function at its first call; it runs without the interpreter lock.

    `fastmath`: what LLVM may do that IEEE 754 does not, by its names for it.
    """
    return _kept(numba.njit, nogil=True, error_model="numpy", fastmath=fastmath)


def callback(signature: Any) -> Callable[[Any], Any]:
    """Compile a function now, for C to call; its `address` is where."""
    return _kept(numba.cfunc, signature)


@intrinsic
def float_of(_context: Any, _bits: Any) -> Any:
    """The float32 with these 32 bits."""
    return types.float32(types.int32), lambda _c, builder, _s, arguments: builder.bitcast(arguments[0], ir.FloatType())


@intrinsic
def bits_of(_context: Any, _number: Any) -> Any:
    """The 32 bits of a float32, as int32."""
    return types.int32(types.float32), lambda _c, builder, _s, arguments: builder.bitcast(arguments[0], ir.IntType(32))


def _kept(compiler: Any, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
    def compile_function(function: Any) -> Any:
        try:
            return compiler(*arguments, cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):  # numba has no type of its own for it
                raise
            return compiler(*arguments, **options)(function)

    return compile_function
