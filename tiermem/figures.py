"""Numbers as people read them.

Owns the text of figures whose size nobody knows before: seconds of a step, tokens a second, days. Does not know what
they are of; bytes are written by `memory.sizes`. Guarantees that no figure has an exponent, and that none is written as
zero unless it is less than a millionth.
"""

from __future__ import annotations

import math

_DIGITS = 3
_MOST_DECIMALS = 6
_LONG = 120
_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def format_number(value: float) -> str:
    """Return `value` with three digits, or with all of those before the point: "10,432", "12.3", "0.104"."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    decimals = _DIGITS - 1 - math.floor(math.log10(abs(value)))
    text = f"{value:,.{min(max(decimals, 0), _MOST_DECIMALS)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_seconds(seconds: float) -> str:
    """Return a span of time: "0.104 s", "12.3 s", and from two minutes on in two units: "2 h 53 min"."""
    if not _LONG <= seconds < math.inf:
        return f"{format_number(seconds)} s"
    whole = round(seconds)
    large = next(index for index, (_, size) in enumerate(_UNITS) if whole >= size)
    (name, size), (smaller_name, smaller) = _UNITS[large : large + 2]
    count, rest = divmod(round(whole / smaller), size // smaller)
    return f"{count:,} {name}" + (f" {rest} {smaller_name}" if rest else "")


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or f'{noun}s'}"
