"""The process a runtime lives in.

Owns the number of that process. Does not know runtimes. Guarantees that a forked child, to which neither the threads
nor the memory of a runtime come along, is told so instead of waiting for ever for threads it does not have.
"""

from __future__ import annotations

import os

from tiermem.errors import TiermemError


class HomeProcess:
    """The process that made this object."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process, and not a forked child of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise TiermemError in a forked child."""
        if not self.is_here:
            raise TiermemError(
                f"this is a forked child of process {self._pid}, which has the runtime: neither its threads nor its "
                "memory come along; leave the model alone here (data loader workers need the data only)"
            )
