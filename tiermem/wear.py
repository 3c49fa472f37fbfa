"""What writing costs the drives: how much in a day, and how long they live at that rate.

Owns the arithmetic and the reading of an endurance ("600TB", "1DWPD"). Does not know drives; it is given bytes and
seconds. Guarantees plain division: no write amplification inside the drive is guessed, makers state endurance for the
writes of the host. Numbers that need what was not given are None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tiermem.errors import ConfigError
from tiermem.memory.sizes import parse_bytes

SECONDS_PER_DAY = 86_400
WARRANTY_YEARS = 5
"""For how long drive writes per day are promised, unless said otherwise."""

_DWPD = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*DWPD(?:\s*/\s*([0-9]+)\s*y)?\s*", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class Wear:
    """Bytes written so far, and what the pace of `seconds` comes to.

    `drive_writes_per_day`: how often the capacity is written in a day. `life_days`: days until the endurance is used
    up at this pace, from new. `used`: share of the endurance that was used by what was written.
    """

    bytes_written: int
    bytes_per_day: float
    drive_writes_per_day: float | None = None
    life_days: float | None = None
    used: float | None = None


def measure_wear(
    bytes_written: int,
    *,
    paced_bytes: int,
    seconds: float,
    endurance: int | None = None,
    capacity: int | None = None,
) -> Wear:
    """Return what writing comes to: `paced_bytes` of the `bytes_written` were written in `seconds`, and set the pace.

    `endurance` and `capacity`: bytes, of all drives together; None if unknown. What was never written wears nothing.
    """
    per_day = paced_bytes / seconds * SECONDS_PER_DAY if seconds > 0 else 0.0
    return Wear(
        bytes_written=bytes_written,
        bytes_per_day=per_day,
        drive_writes_per_day=per_day / capacity if capacity else None,
        life_days=endurance / per_day if endurance and per_day else None,
        used=bytes_written / endurance if endurance else None,
    )


def parse_endurance(text: str, capacity: int | None) -> int:
    """Return the bytes that may be written in a drive's life.

    From terabytes written, such as "600TB", or from drive writes per day, such as "1DWPD" or "0.3DWPD/3y" (for how many
    years; five if not said), which need the `capacity` in bytes. Raises ConfigError for anything else, and for zero.
    """
    match = _DWPD.fullmatch(text)
    if match is None:
        nbytes = parse_bytes(text)
    elif capacity is None:
        raise ConfigError(f"endurance {text!r} is in drive writes per day: give the drives' capacity, too")
    else:
        writes, years = match.groups()
        nbytes = round(float(writes) * capacity * 365 * int(years or WARRANTY_YEARS))
    if nbytes <= 0:
        raise ConfigError(f"expected an endurance like '600TB' or '1DWPD', found {text!r}")
    return nbytes
