"""Whole numbers rounded to multiples.

Owns nothing but the arithmetic, for bytes, elements and addresses alike. Does not know which multiples there are.
Guarantees exactness at any size: no floating-point number is involved.
"""

from __future__ import annotations


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


def round_down(number: int, multiple: int) -> int:
    """The largest multiple of `multiple` that is not above `number`."""
    return number // multiple * multiple
