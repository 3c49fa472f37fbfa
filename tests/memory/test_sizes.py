"""Sizes as text: what is understood, what is refused, what comes back."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tiermem.errors import ConfigError
from tiermem.memory.sizes import exact_bytes, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("20GiB", 20 << 30),
        ("512 MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1.5gib", 3 << 29),
        (" 4096 ", 4096),
        ("7 B", 7),
        ("0", 0),
        ("2TiB", 2 << 40),
        (12345, 12345),
        (np.int64(12345), 12345),
        ("0.1KiB", 102),
    ],
)
def test_parses(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes
    assert type(parse_bytes(text)) is int


def test_a_float_is_refused_as_one() -> None:
    with pytest.raises(
        ConfigError, match=r"^shard: expected a size in bytes, as a whole number, or as text .*found 1e\+30 \(float\)"
    ):
        parse_bytes(1e30, "shard: ")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1,5GB", "20G", "3 apples", "1e9", "0x10", "\u0661GiB", "nan", -1, True, None, 1.5]
)
def test_refuses_nonsense(text: object) -> None:
    with pytest.raises(ConfigError, match="expected"):
        parse_bytes(text)  # type: ignore[arg-type]


@given(st.integers(0, 1 << 60))
def test_exact_text_round_trips(nbytes: int) -> None:
    assert parse_bytes(exact_bytes(nbytes)) == nbytes


@example(1023)
@given(st.integers(0, 1 << 60))
def test_readable_text_is_close(nbytes: int) -> None:
    assert abs(parse_bytes(format_bytes(nbytes)) - nbytes) <= nbytes * 0.006
    assert nbytes >= 1024 or format_bytes(nbytes) == f"{nbytes} B"


def test_exact_text_is_short() -> None:
    assert [exact_bytes(n) for n in (0, 1000, 1024, 8 << 20, 3 << 40)] == ["0B", "1000B", "1KiB", "8MiB", "3TiB"]
    with pytest.raises(ConfigError):
        exact_bytes(-1)
