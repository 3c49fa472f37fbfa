"""Amounts of bytes as people write and read them.

Owns the conversion between text such as "512MiB" and whole bytes, both ways, for the command line. Does not know what
the bytes are for. Guarantees that anything that is not a positive amount is refused with the accepted forms named.
"""

from __future__ import annotations

import re

from tiermem.errors import ConfigError

BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
FACTORS = {
    "": 1,
    "b": 1,
    **{unit.lower(): 1024**power for power, unit in enumerate(BINARY_UNITS)},
    **{unit.lower(): 1000**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB", "PB"))},
}


def parse_amount(text: str) -> int:
    """Return the bytes that `text` means: a number and an optional unit (MiB = 1024^2, MB = 1000^2).

    Raises `ConfigError` if it is not a positive amount.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    factor = FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None or float(match[1]) * factor < 1:
        raise ConfigError(f'"{text}" is not an amount of memory; write for example 512MiB, 1.5GiB or 2000000000')
    return int(float(match[1]) * factor)


def format_amount(nbytes: float) -> str:
    """Return bytes as short text, such as "1.50 GiB"."""
    power = 0
    while abs(nbytes) >= 1024 and power < len(BINARY_UNITS) - 1:
        nbytes /= 1024
        power += 1
    return f"{nbytes:.0f} B" if power == 0 else f"{nbytes:.{1 if nbytes >= 100 else 2}f} {BINARY_UNITS[power]}"
