"""What writing costs the drives: how much in a day, and how long they live at that rate.

Owns the arithmetic and the reading of an endurance ("600TB", "1DWPD@2TB"). Does not know drives; it is given bytes and
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


@dataclass(frozen=True, slots=True)
class Endurance:
    """What is known of the drives, all together: bytes they hold, and bytes that may be written in their life."""

    capacity: int | None = None
    nbytes: int | None = None


UNKNOWN = Endurance()


def measure_wear(bytes_written: int, *, paced_bytes: int, seconds: float, endurance: Endurance = UNKNOWN) -> Wear:
    """Return what writing comes to: `paced_bytes` of the `bytes_written` were written in `seconds`, and set the pace.

    What was never written wears nothing: there are no days of life then.
    """
    per_day = paced_bytes / seconds * SECONDS_PER_DAY if seconds > 0 else 0.0
    return Wear(
        bytes_written=bytes_written,
        bytes_per_day=per_day,
        drive_writes_per_day=per_day / endurance.capacity if endurance.capacity else None,
        life_days=endurance.nbytes / per_day if endurance.nbytes and per_day else None,
        used=bytes_written / endurance.nbytes if endurance.nbytes else None,
    )


def parse_endurance(text: str | None, capacity: int | None = None) -> Endurance:
    """Return what `text` says of drives; `capacity`, bytes, is theirs unless the text says otherwise.

    Terabytes written, such as "600TB" or "600TB@2TB" (the capacity), or drive writes per day, such as "1DWPD",
    "1DWPD@2TB" or "0.3DWPD/3y" (for how many years; five if not said), which need a capacity. None: only the capacity
    is known. Raises ConfigError for anything else, and for zero.
    """
    if text is None:
        return Endurance(capacity)
    amount, _, size = text.partition("@")
    match = _DWPD.fullmatch(amount)
    try:
        capacity = parse_bytes(size) if size else capacity
        nbytes = parse_bytes(amount) if match is None else 0
    except ConfigError as error:
        raise ConfigError(f"expected an endurance like '600TB' or '1DWPD@2TB', found {text!r}: {error}") from None
    if match is not None and not capacity:
        raise ConfigError(f"endurance {text!r} is in drive writes per day: say of what capacity, as in '1DWPD@2TB'")
    if match is not None and capacity:
        writes, years = match.groups()
        nbytes = round(float(writes) * capacity * 365 * int(years or WARRANTY_YEARS))
    if nbytes <= 0:
        raise ConfigError(f"expected an endurance like '600TB' or '1DWPD@2TB', found {text!r}")
    return Endurance(capacity, nbytes)
