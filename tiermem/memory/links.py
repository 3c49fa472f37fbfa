"""How fast bytes go between host memory and a device that is played by the processor.

Owns the two numbers of each direction (bytes per second, seconds until the first byte) and their text, such as
"simulated:bandwidth=12GB/s,latency=10us". Does not know who copies. Guarantees that text which is not understood is
refused with the part that was not, and that what is accepted means the same everywhere.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tiermem.errors import ConfigError
from tiermem.memory.sizes import parse_bytes

SIMULATED = "simulated"
_EXPONENTS = {"s": "e0", "ms": "e-3", "us": "e-6"}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(s|ms|us)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Link:
    """Both directions between HOST and DEVICE. The default is as fast as memory is.

    Attributes:
        up: bytes per second from HOST to DEVICE.
        down: bytes per second from DEVICE to HOST.
        latency: seconds each copy takes besides.
    """

    up: float = math.inf
    down: float = math.inf
    latency: float = 0.0


def parse_link(device: str) -> Link | None:
    """The link of a simulated device; None if `device` names another one.

    The text is "simulated", or "simulated:" and, separated by commas, `bandwidth=12GB/s` (both directions), `up=`,
    `down=` (one of them), `latency=10us`. Raises ConfigError for anything else that begins with "simulated".
    """
    name, colon, settings = device.partition(":")
    if name != SIMULATED:
        return None
    numbers = {"up": math.inf, "down": math.inf, "latency": 0.0}
    for setting in settings.split(",") if colon else ():
        key, _, value = setting.partition("=")
        if key == "latency":
            numbers[key] = _seconds(value)
        elif key == "bandwidth":
            numbers["up"] = numbers["down"] = _bytes_per_second(value)
        elif key in numbers:
            numbers[key] = _bytes_per_second(value)
        else:
            raise ConfigError(
                f"device: expected bandwidth=, up=, down= or latency= after 'simulated:', found {setting!r}"
            )
    return Link(**numbers)


def _bytes_per_second(text: str) -> float:
    if not text.endswith("/s"):
        raise ConfigError(f"device: expected a bandwidth like '12GB/s', found {text!r}")
    speed = parse_bytes(text.removesuffix("/s"), "device: ")
    if speed < 1:
        raise ConfigError(f"device: expected a byte per second or more, found {text!r}")
    return float(speed)


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"device: expected a latency like '10us', '1.5ms' or '0s', found {text!r}")
    return float(match[1] + _EXPONENTS[match[2]])
