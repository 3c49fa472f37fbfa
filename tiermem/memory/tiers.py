"""The tiers a page may live on.

Owns the order of the tiers and nothing else. Does not know sizes or devices. Guarantees that a larger value is
nearer to the computation, and that neighbours in a chain are one edge apart.
"""

from __future__ import annotations

import enum


class Tier(enum.IntEnum):
    """Where bytes live, ordered from far to near."""

    SWAP = 0
    HOST = 1
    DEVICE = 2

    __hash__ = int.__hash__  # that of `Enum` is slow, and tiers are the keys of everything
