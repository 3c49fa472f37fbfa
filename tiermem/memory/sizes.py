"""Sizes as people write them.

Owns the translation between byte counts and text such as "20GiB". Does not know what the bytes are for. Guarantees
that `parse_bytes(exact_bytes(n)) == n`, and that text whose meaning would have to be guessed is refused.
"""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np

from tiermem.errors import ConfigError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB")
_FACTORS = {
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY)},
    **{unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL)},
}
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(size: int | str, of: str = "") -> int:
    """Return a number of bytes from an int, or from text such as "20GiB", "512 MiB", "1.5GB" or "4096".

    Units are powers of 1024 with an "i" and powers of 1000 without; upper and lower case mean the same. A fraction of a
    byte is dropped. An int of numpy's is one. Raises ConfigError for anything else, negative numbers, floats and a bare
    "20G" included; `of` begins what it says.
    """
    if isinstance(size, bool) or not isinstance(size, (int, np.integer, str)):
        whole = ", as a whole number" if isinstance(size, float) else ""
        raise ConfigError(
            f"{of}expected a size in bytes{whole}, or as text like '20GiB', found {size!r} ({type(size).__name__})"
        )
    if not isinstance(size, str):
        if size < 0:
            raise ConfigError(f"{of}expected a size of zero bytes or more, found {size}")
        return int(size)
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ConfigError(f"{of}expected a size like '20GiB', '512 MiB', '1.5GB' or '4096', found {size!r}")
    number, unit = match.groups()
    factor = _FACTORS.get(unit.lower()) if unit else 1
    if factor is None:
        units = ", ".join(dict.fromkeys(_BINARY + _DECIMAL))
        raise ConfigError(f"{of}expected one of the units {units} in {size!r}, found {unit!r}")
    return int(Fraction(number) * factor)


def format_bytes(nbytes: int) -> str:
    """Return `nbytes` for people to read, such as "1.50 GiB": two decimals, at most half a percent off."""
    magnitude = abs(nbytes)
    if magnitude < 1024:
        return f"{nbytes} B"
    power = min((magnitude.bit_length() - 1) // 10, len(_BINARY) - 1)
    return f"{nbytes / 1024**power:.2f} {_BINARY[power]}"


def exact_bytes(nbytes: int) -> str:
    """Return text that `parse_bytes` turns into exactly `nbytes`, such as "8MiB" or "1000B": units with an "i" only.

    Raises ConfigError for a negative number.
    """
    if nbytes < 0:
        raise ConfigError(f"expected a size of zero bytes or more, found {nbytes}")
    power = 0
    while nbytes and nbytes % 1024 ** (power + 1) == 0 and power + 1 < len(_BINARY):
        power += 1
    return f"{nbytes // 1024**power}{_BINARY[power]}"
