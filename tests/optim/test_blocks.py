"""8-bit moments: the code books are the published ones, and blocks keep what they promise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.optim.blocks import BLOCK_NUMEL, Blocks, BlockScratch, block_count
from tiermem.optim.codebook import CodeBook, signed_book, unsigned_book

# Values between 0 and 1 of the signed map that bitsandbytes' `create_dynamic_map(signed=True)` gives, in float32, by
# their place among its 128 positive values: all of the lower decades, the ends and some of the middle of the others.
PUBLISHED = {
    0: 5.499999815583578e-07,
    1: 3.2499999633728294e-06,
    2: 7.749999895168003e-06,
    3: 2.1249999917927198e-05,
    4: 4.374999844003469e-05,
    5: 6.625000241911039e-05,
    6: 8.874999912222847e-05,
    7: 0.00015624999650754035,
    8: 0.00026875000912696123,
    9: 0.00038124999264255166,
    14: 0.0009437499684281647,
    15: 0.0012812500353902578,
    16: 0.001843750011175871,
    30: 0.009718749672174454,
    31: 0.011406250298023224,
    32: 0.014218749478459358,
    45: 0.05078125,
    62: 0.09859374910593033,
    63: 0.10703125596046448,
    64: 0.12109375,
    65: 0.13515624403953552,
    90: 0.48671877384185790,
    95: 0.5570312738418579,
    120: 0.9085937738418579,
    125: 0.9789062738418579,
    126: 0.992968738079071,
    127: 1.0,
}
BOOKS = {"signed": signed_book, "unsigned": unsigned_book}


def test_the_signed_book_is_the_published_one() -> None:
    values = signed_book().values
    assert values.numel() == 256
    positive = values[128:].to(torch.float64)
    for place, value in PUBLISHED.items():
        # Theirs is rounded to float32 on the way: the last bit may differ.
        assert abs(float(positive[place]) - value) <= 2**-23 * value, place
    assert float(values[127]) == 0.0
    assert torch.equal(values[:127].flip(0), -values[128:255])  # 0.993 is the largest below zero, and 1 has no opposite


def test_the_unsigned_book_is_as_defined() -> None:
    """Twice as many values in each decade: 2, 4, ... 128, in the middles of equal parts."""
    values = unsigned_book().values.tolist()
    assert values[0] == 0.0
    assert values[-1] == 1.0
    assert values[1:7] == pytest.approx([3.25e-07, 7.75e-07, 2.125e-06, 4.375e-06, 6.625e-06, 8.875e-06], rel=1e-6)
    assert values[-2] == pytest.approx(1 - 0.45 / 128, rel=1e-7)
    for decade in range(7):
        inside = [value for value in values[1:-1] if 10.0 ** (decade - 7) < value < 10.0 ** (decade - 6)]
        assert len(inside) == 2 ** (decade + 1)


def code_of(book: CodeBook, numbers: torch.Tensor) -> torch.Tensor:
    codes = torch.empty(numbers.numel(), dtype=torch.uint8)
    scratch = BlockScratch(numbers.numel())
    book.encode(numbers.clone(), scratch.half, scratch.index, codes)
    return codes


@pytest.mark.parametrize("name", BOOKS)
def test_every_value_gets_its_own_code_and_every_number_the_nearest(name: str) -> None:
    book = BOOKS[name]()
    least = 1 if name == "unsigned" else 0
    assert torch.equal(book.values.sort().values, book.values)
    assert code_of(book, book.values)[least:].tolist() == list(range(least, 256))
    numbers = torch.cat([torch.linspace(-1 if name == "signed" else 0, 1, 40001), torch.logspace(-7, 0, 5000)])
    codes = code_of(book, numbers)
    found = (book.values[codes.int()] - numbers).abs()
    best = (book.values[None, least:] - numbers[:, None]).abs().min(dim=1).values
    # Rounding to eleven digits moves a number by 2**-11 of it, and counts twice.
    assert (found <= best + numbers.abs() * 2**-10 + 1e-11).all()
    if name == "unsigned":
        assert code_of(book, torch.tensor([0.0, 1e-30])).tolist() == [1, 1]


def store_and_load(book: CodeBook, values: torch.Tensor, blocks: Blocks | None = None) -> tuple[torch.Tensor, Blocks]:
    numel = values.numel()
    if blocks is None:
        blocks = Blocks(torch.empty(numel, dtype=torch.uint8), torch.empty(block_count(numel)))
    padded, scratch = torch.zeros(block_count(numel) * BLOCK_NUMEL), BlockScratch(numel)
    padded[:numel] = values
    blocks.store(book, padded, scratch)
    padded.fill_(7.0)
    blocks.load(book, padded, scratch)
    assert not padded[numel:].any()
    return padded[:numel].clone(), blocks


@given(
    numel=st.integers(1, 700),
    exponents=st.tuples(st.integers(-25, 15), st.integers(0, 9)),
    unsigned=st.booleans(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60)
def test_what_was_loaded_is_stored_with_the_same_bits(
    numel: int, exponents: tuple[int, int], unsigned: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(numel, generator=generator) * exponents[1]
    values = torch.randn(numel, generator=generator) * 10.0 ** (exponents[0] - spread)
    book = signed_book()
    if unsigned:
        book, values = unsigned_book(), values.square_().clamp_(min=1e-30)
    once, blocks = store_and_load(book, values)
    before = blocks.codes.clone(), blocks.scales.clone()
    twice, _ = store_and_load(book, once, blocks)
    assert torch.equal(once, twice)
    assert torch.equal(blocks.codes, before[0])
    assert torch.equal(blocks.scales, before[1])
    for start in range(0, numel, BLOCK_NUMEL):
        block, kept = values[start : start + BLOCK_NUMEL], once[start : start + BLOCK_NUMEL]
        largest = int(block.abs().argmax())
        assert kept[largest] == block[largest]
        # Half a step of the book next to 1, and rounding to float16.
        assert ((kept - block).abs() <= 0.0075 * block.abs().max()).all()


def test_blocks_do_not_depend_on_each_other() -> None:
    values = torch.randn(3 * BLOCK_NUMEL)
    whole, _ = store_and_load(signed_book(), values)
    values[:BLOCK_NUMEL] *= 1e20
    values[2 * BLOCK_NUMEL :] = 0.0
    other, _ = store_and_load(signed_book(), values)
    assert torch.equal(whole[BLOCK_NUMEL : 2 * BLOCK_NUMEL], other[BLOCK_NUMEL : 2 * BLOCK_NUMEL])
    assert not other[2 * BLOCK_NUMEL :].any()


def test_a_block_with_a_negative_extreme_does_not_shrink() -> None:
    values = torch.linspace(-1.0, 0.5, BLOCK_NUMEL)
    kept = values
    for _ in range(50):
        kept, _ = store_and_load(signed_book(), kept)
    assert kept.min() == -1.0


def test_bytes_of_nothing_are_zeros() -> None:
    blocks = Blocks(torch.zeros(300, dtype=torch.uint8), torch.zeros(2))
    for book in (signed_book(), unsigned_book()):
        out = torch.ones(512)
        blocks.load(book, out, BlockScratch(300))
        assert not out.any()


def test_a_moment_that_is_not_a_number_shows() -> None:
    values = torch.ones(2 * BLOCK_NUMEL)
    values[3] = float("nan")
    kept, _ = store_and_load(unsigned_book(), values)
    assert kept[:BLOCK_NUMEL].isnan().all()
    assert (kept[BLOCK_NUMEL:] == 1).all()
