"""Codes and numbers in vectors: the bits of looking them up one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.optim import compiled
from tiermem.optim.codebook import CodeBook, signed_book, unsigned_book
from tiermem.optim.lines import EXPONENTS, LINES, straight_lines

pytestmark = pytest.mark.timeout(200)  # the first call compiles

BOOKS = {"signed": signed_book, "unsigned": unsigned_book}
BLOCK = 256


def codes_by_lines(book: CodeBook, halves: Any) -> Any:
    """The codes of float16 as `lines.py` describes their arithmetic, in wider integers."""
    words = straight_lines(book.table.numpy()).astype(np.int64)
    edges, (slopes, offsets, caps) = words[:EXPONENTS], words[EXPONENTS:].reshape(3, LINES)
    magnitudes = halves & 0x7FFF
    line = (magnitudes >> 10) + EXPONENTS * (magnitudes > edges[magnitudes >> 10])
    sums = (((magnitudes & 0x3FF) << 6) * slopes[line] >> 16) + offsets[line]
    assert sums.max() < 1 << 16, "does not fit in a register's part"
    places = np.minimum(sums >> 8, caps[line])
    if not book.signed:
        return places
    return np.where(halves >= 1 << 15, 127 - np.minimum(places, 127), 127 + places)


@pytest.mark.parametrize("name", BOOKS)
def test_the_lines_give_every_code_of_the_table(name: str) -> None:
    book = BOOKS[name]()
    halves = np.arange(1 << 16 if book.signed else 1 << 15)
    assert (codes_by_lines(book, halves) == book.table.numpy()[halves]).all()


def test_a_table_that_is_not_on_lines_is_refused() -> None:
    """Three distances of values within a factor of two."""
    table = signed_book().table.numpy().copy()
    exponent = 29 * 1024
    steps = np.repeat([1, 0, 2, 0], 256) * (np.arange(1024) % 16 == 0)
    table[exponent : exponent + 1024] = table[exponent] + np.cumsum(steps)
    with pytest.raises(ValueError, match="exponent 29 are not on two lines"):
        straight_lines(table)


def vector_loops() -> Any:
    loops = pytest.importorskip("tiermem.optim.loops", reason="numba is not installed")
    if not loops.AT_ONCE:
        pytest.skip("this processor has no AVX-512 with VBMI, or numba compiles for another one")
    return loops


def in_blocks(numbers: Any) -> Any:
    return np.resize(numbers.astype(np.float32), (-(-numbers.size // BLOCK), BLOCK))


def looked_up(loops: Any, book: CodeBook) -> tuple[Any, Any]:
    """`tables`, which take longer to make than a block takes to update: those that the loops have made once."""
    made = loops.books()
    return made[:2] if book.signed else made[2:]


def codes_both_ways(loops: Any, book: CodeBook, block: Any, scale: Any) -> tuple[Any, Any]:
    values, table, (bytewise, lines) = book.values.numpy(), book.table.numpy(), looked_up(loops, book)
    each, at_once, halves = (np.zeros(BLOCK, kind) for kind in (np.uint8, np.uint8, np.uint16))
    loops.encode_each(block, scale, table, halves, each)
    encode = loops.encode_signed_at_once if book.signed else loops.encode_unsigned_at_once
    encode(block, scale, lines, halves, at_once)
    left, right = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
    loops.decode_each(each, scale, values, left)
    loops.decode_at_once(each, scale, bytewise, right)
    assert left.tobytes() == right.tobytes()
    return each, at_once


@pytest.mark.parametrize("name", BOOKS)
def test_every_float16_gets_the_same_code_and_every_code_the_same_number(name: str) -> None:
    loops, book = vector_loops(), BOOKS[name]()
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    known = np.abs(halves) <= 32768
    if not book.signed:
        known &= ~np.signbit(halves)
    for block in in_blocks(halves[known] / 32768):
        each, at_once = codes_both_ways(loops, book, block, np.float32(1))
        assert (each == at_once).all()
    codes = np.arange(BLOCK, dtype=np.uint8)
    for scale in np.float32([1.0, -3.7, 1e-38, 3e38]):
        left, right = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
        loops.decode_each(codes, scale, book.values.numpy(), left)
        loops.decode_at_once(codes, scale, looked_up(loops, book)[0], right)
        assert left.tobytes() == right.tobytes()


@pytest.mark.parametrize("name", BOOKS)
@given(spread=st.integers(0, 40), exponent=st.integers(-38, 37), seed=st.integers(0, 10**6))
@settings(max_examples=60)
def test_blocks_of_any_magnitude_get_the_same_codes(name: str, spread: int, exponent: int, seed: int) -> None:
    loops, book = vector_loops(), BOOKS[name]()
    random = np.random.default_rng(seed)
    numbers = random.standard_normal(BLOCK) * 10.0 ** (exponent - spread * random.random(BLOCK))
    numbers[random.random(BLOCK) < 0.1] = 0.0
    block = (numbers if book.signed else np.abs(numbers)).astype(np.float32)
    each, at_once = codes_both_ways(loops, book, block, loops._scale(block))
    assert (each == at_once).all()


@pytest.mark.parametrize("name", BOOKS)
def test_a_block_of_zeros_and_one_with_a_number_that_is_none_get_the_same_codes(name: str) -> None:
    loops, book = vector_loops(), BOOKS[name]()
    for number in (0.0, float("nan"), float("inf")):
        block = np.zeros(BLOCK, np.float32)
        block[5] = number
        each, at_once = codes_both_ways(loops, book, block, loops._scale(block))
        assert (each == at_once).all()


_ONE_BY_ONE = """
import llvmlite.binding
from tiermem.optim import compiled, loops
print(loops.AT_ONCE, compiled.why_not())
"""


def test_processors_without_these_vectors_look_codes_up_one_by_one() -> None:
    """As numba sees the processor, which can be told what it has; and torch is matched as well as with them."""
    binding = pytest.importorskip("llvmlite.binding", reason="numba is not installed")
    found = binding.get_host_cpu_features()
    if not any(value and name.startswith("avx512") for name, value in found.items()):
        loops = pytest.importorskip("tiermem.optim.loops")
        assert (loops.AT_ONCE, compiled.why_not()) == (False, None), "this processor is one of them"
        return
    less = {name: value and not name.startswith("avx512") for name, value in found.items()}
    told = ",".join(("+" if value else "-") + name for name, value in less.items())
    run = subprocess.run(
        [sys.executable, "-c", _ONE_BY_ONE],
        env={**os.environ, "NUMBA_CPU_FEATURES": told},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split(maxsplit=1) == ["False", f"{compiled.why_not()}\n"], run.stdout


_WITHOUT_HALVES = """
import sys, types
import numba, numpy as np
for name in ("tiermem", "tiermem.optim"):  # the packages without what they import: torch takes seconds
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [name.replace(".", "/")]
from tiermem.optim.intrinsics import half_bits_of
convert = numba.vectorize(["uint16(float32)"], nopython=True)(lambda number: half_bits_of(number))
bits = np.arange(0, 1 << 32, 4093, dtype=np.uint64).astype(np.uint32)
halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
with np.errstate(over="ignore", invalid="ignore"):
    between = (halves[1:] + halves[:-1]) / 2  # ties
numbers = np.concatenate([bits.view(np.float32), halves, between, np.nextafter(between, 9), np.nextafter(between, -9)])
numbers = numbers[~np.isnan(numbers)].astype(np.float32)
with np.errstate(over="ignore", under="ignore"):
    expected = numbers.astype(np.float16).view(np.uint16)
print((convert(numbers) == expected).all(), convert(np.float32(np.nan)) & 0x7FFF > 0x7C00)
"""


def test_processors_without_halves_round_in_integers() -> None:
    """Left to LLVM, which calls a function for it there that is not found, this ended the process."""
    pytest.importorskip("numba", reason="numba is not installed")
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT_HALVES],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "True True\n"
