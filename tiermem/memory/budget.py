"""The hard limit on what one tier may hold.

Owns three numbers per tier: capacity, bytes reserved, and the most that was ever reserved. Does not know frames,
pages or addresses. Guarantees `0 <= reserved <= capacity` at every instant. Not thread-safe: it belongs to the one
thread that owns residency.
"""

from __future__ import annotations

from tiermem.errors import ConfigError, InvariantError
from tiermem.memory.tiers import Tier


class Budget:
    """Bytes of one tier: reserved before they are used, released after.

    Raises ConfigError if `capacity` (bytes) is negative.
    """

    __slots__ = ("_capacity", "_high_water", "_reserved", "_tier")

    def __init__(self, tier: Tier, capacity: int) -> None:
        if capacity < 0:
            raise ConfigError(f"expected a {tier.name} budget of zero bytes or more, found {capacity}")
        self._tier = tier
        self._capacity = capacity
        self._reserved = 0
        self._high_water = 0

    @property
    def capacity(self) -> int:
        """Bytes that may be reserved at one time."""
        return self._capacity

    @property
    def reserved(self) -> int:
        """Bytes reserved now."""
        return self._reserved

    @property
    def high_water(self) -> int:
        """Most bytes ever reserved."""
        return self._high_water

    def try_reserve(self, nbytes: int) -> bool:
        """Reserve `nbytes` and return True, or change nothing and return False. Never waits."""
        if nbytes < 0:
            raise InvariantError(f"{self._tier.name}: a reservation of {nbytes} bytes was asked for")
        reserved = self._reserved + nbytes
        if reserved > self._capacity:
            return False
        self._reserved = reserved
        if reserved > self._high_water:
            self._high_water = reserved
        return True

    def release(self, nbytes: int) -> None:
        """Give back `nbytes`; raises InvariantError if fewer are reserved."""
        if not 0 <= nbytes <= self._reserved:
            raise InvariantError(f"{self._tier.name}: release of {nbytes} bytes while {self._reserved} are reserved")
        self._reserved -= nbytes
